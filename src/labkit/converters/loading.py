"""Straight from the tensors of a checkpoint to a model, nothing written."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from labkit.converters.arrays import cast, contiguous, copy_into, difference, first_non_finite, same_bits
from labkit.converters.audit import Audit, audit_table
from labkit.converters.filling import abstract_model, filled_model, poisoned
from labkit.converters.rules import Assignment, Expansion
from labkit.errors import InputError
from labkit.hf.tensors import holds_non_finite
from labkit.models import get_family, read_config


class FiniteReader:
    """`read(name)` of a tensor table that refuses NaN and infinity by name and index."""

    def __init__(self, tensors, where):
        self.tensors, self.where, self._checked = tensors, where, set()

    def __call__(self, name: str) -> np.ndarray:
        array = self.tensors.read(name)
        if name not in self._checked:
            index = first_non_finite(array)
            if index is not None:
                raise holds_non_finite(name, array.shape, array[index], index, self.tensors[name].shard)
            self._checked.add(name)
        return array


def effective_config(source, family=None) -> dict:
    """The config as the reference runs it on these tensors: where a checkpoint stores a head that differs from the embedding it should be tied to, transformers
    runs with the stored head, and so does the slice."""
    effective, family = source.config.effective, family or get_family(source.config.model_type)
    config, _ = read_config(family, effective, source.config.defaults)
    for entry in family.rules(config).tied:
        if entry.name in source.tensors and entry.to in source.tensors and not same_bits(source.tensors.read(entry.name), source.tensors.read(entry.to)):
            effective = {**effective, "tie_word_embeddings": False}
    return effective


def model_config(source, dtype):
    """(family, config, reading) of a source, tied or untied as its tensors are."""
    family = get_family(source.config.model_type)
    config, reading = read_config(family, effective_config(source, family), source.config.defaults, dtype=jnp.dtype(dtype))
    return family, config, reading


def audit(source, family=None, config=None) -> Audit:
    """Names and shapes of a source against the family's model: unread tensors, unfilled parameters, doubled ones, shapes that do not fit.

    Problems are listed, not raised. family and config: those of the source when left out.
    """
    if family is None or config is None:
        family, config, _ = model_config(source, jnp.float32)
    return fit(source, family, config, abstract_model(family, config))


def fit(source, family, config, abstract) -> Audit:
    """The audit against a model that is at hand already."""
    return audit_table(family.rules(config), config.plan, abstract.shapes, {name: info.shape for name, info in source.tensors.items()})


def load_model(source, *, dtype=jnp.float32, mesh: Mesh | None = None):
    """(model, config, findings): the family's model with every parameter in `dtype`, on the default device or sharded over `mesh`.

    findings: dicts with component, cause, evidence, fix. Raises InputError when the audit fails or a weight is NaN or infinite, BlockedError when the garden
    lacks the family.
    """
    family, config, _ = model_config(source, dtype)
    abstract = abstract_model(family, config, mesh)
    report = fit(source, family, config, abstract)
    report.require(source.path)
    read, by_path, dtypes = FiniteReader(source.tensors, source.path), assignments_by_path(report.expansion), abstract.dtypes

    def value(path: str) -> np.ndarray:
        array = poisoned(abstract.shapes[path], dtypes[path])
        for assignment, which, index in by_path[path]:
            write_row(array, index, assignment.forward(read)[which])
        require_filled(path, array)
        return array

    findings = source_findings(source, family, config, report.expansion)
    return filled_model(abstract, value, mesh), config, findings


def assignments_by_path(expansion: Expansion) -> dict[str, list[tuple[Assignment, int, int | None]]]:
    """path -> (assignment, which of its targets, stack index) of everything that fills it."""
    out = defaultdict(list)
    for assignment in expansion.assignments:
        for which, target in enumerate(assignment.targets):
            out[target.path].append((assignment, which, target.index))
    return out


def write_row(array: np.ndarray, index: int | None, view: np.ndarray) -> None:
    """`array[index] = view` in the array's dtype (the whole array when index is None)."""
    row = array[...] if index is None else array[index : index + 1].reshape(array.shape[1:])
    copy_into(row, view if view.dtype == array.dtype else cast(contiguous(view), array.dtype))


def require_filled(path: str, array: np.ndarray) -> None:
    """What is not finite after the fill was not filled, or does not fit the dtype: the sources were finite."""
    index = first_non_finite(array)
    if index is not None:
        raise InputError(
            f"The parameter {path} is {float(array[index])} at index {list(index)} after it was filled from finite tensors",
            f"dtype {array.dtype}",
            "If the dtype is narrower than the file's, the value overflows it: choose a wider dtype; else the rule for this parameter leaves a part unfilled",
        )


def source_findings(source, family, config, expansion: Expansion) -> list[dict[str, str]]:
    """What of a source is not as its config says, and what is on disk and makes no parameter: dicts with component, cause, evidence, fix."""
    findings, tensors = [], source.tensors
    if source.config.effective.get("tie_word_embeddings") and not config.tie_word_embeddings:
        for entry in family.rules(dataclasses.replace(config, tie_word_embeddings=True)).tied:
            findings.append(
                _finding(
                    entry.name,
                    "the tied head on disk differs",
                    f"{entry.name} against {entry.to}: {difference(tensors.read(entry.name), tensors.read(entry.to))}; the reference runs with the stored "
                    "head, and so does the port",
                    "set tie_word_embeddings to false if the stored head is meant, or remove the tensor",
                )
            )
    for name, entry in expansion.tied.items():
        if entry.to not in tensors:
            findings.append(_finding(name, "tied to a tensor that is not on disk", f"{entry.to} is absent", "get the missing tensor"))
        else:
            evidence = f"equal to {entry.to} bit for bit; it is read once and not written by export"
            findings.append(_finding(name, "a tied tensor is on disk as well", evidence, "none needed"))
    for name, entry in expansion.ignored.items():
        findings.append(_finding(name, "a tensor on disk is no parameter", f"{tensors[name].nbytes} bytes: {entry.reason}", "none needed"))
    return findings


def _finding(component: str, cause: str, evidence: str, fix: str) -> dict[str, str]:
    return {"component": component, "cause": cause, "evidence": evidence, "fix": fix}
