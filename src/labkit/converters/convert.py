"""Hugging Face to Orbax, streamed: one layer of one parameter is in memory at a time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from labkit.converters.arrays import cast, common, contiguous, exact, first_non_finite, is_float
from labkit.converters.audit import Audit
from labkit.converters.checkpoint import HF_FILES, METADATA, SCHEMA, CheckpointWriter, read_metadata, sync
from labkit.converters.filling import abstract_model
from labkit.converters.loading import FiniteReader, effective_config, fit, model_config, source_findings
from labkit.converters.placement import Placement, placements
from labkit.converters.rules import Assignment
from labkit.errors import InputError
from labkit.hf.safetensors_io import NAMES
from labkit.hf.scratch import atomic_directory, ensure_free

KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".spm", ".md", ".py")
WORKERS = 2
OWNER = ".labkit-owner"
MARGIN = 16 << 20  # headers, metadata and the file system's own blocks


@dataclass(frozen=True)
class Conversion:
    """What `convert` did. nbytes: of all arrays. narrowed: tensor -> (dtype on disk, dtype in the checkpoint), where values were rounded."""

    path: Path
    family: str
    scan: bool
    dtype: str | None
    parameters: int
    tensors: int
    nbytes: int
    audit: Audit
    narrowed: dict[str, tuple[str, str]] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)

    def __str__(self):
        text = f"{self.tensors} tensors -> {self.parameters} parameters, {self.nbytes:,} bytes, {'scanned' if self.scan else 'unscanned'}, in {self.path}"
        return text + (f"; {len(self.narrowed)} tensors were narrowed to {self.dtype}, which cannot be undone" if self.narrowed else "")

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(str(self))}</p>"


def convert(
    source, out: str | os.PathLike, *, dtype=None, scan: bool = True, force: bool = False, progress: Callable[[int, int], None] | None = None
) -> Conversion:
    """Writes a source as an Orbax checkpoint at `out`, which appears only when it is complete.

    dtype: what floating-point parameters are stored in (None: as on disk). scan: stacked parameters, or one entry per Hugging Face layer.
    force: replace a checkpoint of the same source at `out`. progress(done, total) in bytes.
    Raises InputError when the audit fails, a weight is NaN or infinite, a value overflows `dtype`, or `out` cannot be written or is not empty; BlockedError
    when the garden lacks the family.
    """
    out = Path(out).absolute()
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype is not None and not is_float(dtype):
        raise InputError(f"A checkpoint cannot be stored in {dtype}", "dtype", "Choose a floating-point dtype, or none to keep the one on disk")
    replace = force and _replaceable(out, source)
    family, config, _ = model_config(source, np.float32)
    abstract = abstract_model(family, config)
    audit = fit(source, family, config, abstract)
    audit.require(source.path)
    placed = placements(config.plan, abstract.shapes, scan)
    stored = _stored_dtypes(audit.expansion.assignments, placed, source.tensors, dtype)
    total = sum(stored[key].itemsize * int(np.prod(shape)) for place in placed.values() for key, shape in entries(place))
    kept = kept_files(source.path)
    findings = source_findings(source, family, config, audit.expansion)
    narrowed = _narrowed(audit.expansion.assignments, placed, source.tensors, stored)
    metadata = described(source, family, audit.expansion, kept) | {
        "origin": source.origin,
        "fingerprint": source.fingerprint,
        "scan": scan,
        "dtype": None if dtype is None else dtype.name,
        "parameters": {path: list(shape) for path, shape in abstract.shapes.items()},
        "tensors": {n: {"dtype": i.dtype, "shape": list(i.shape), "shard": str(i.shard.relative_to(source.path))} for n, i in disk_order(source.tensors)},
        "narrowed": {name: list(pair) for name, pair in narrowed.items()},
        "findings": findings,
    }
    with output_folder(out, replace) as folder:
        ensure_free(folder, total + sum(p.stat().st_size for p in kept) + MARGIN)
        writer = CheckpointWriter(folder)
        for place in placed.values():
            for key, shape in entries(place):
                writer.declare(key, shape, stored[key], bool(place.layers) and not place.unscanned)
        _stream(audit.expansion.assignments, placed, writer, FiniteReader(source.tensors, source.path), total, progress)
        (folder / HF_FILES).mkdir()
        for path in kept:
            shutil.copyfile(path, folder / HF_FILES / path.name)
        (folder / METADATA).write_text(json.dumps(metadata, indent=1))
        writer.close({"labkit": {k: metadata[k] for k in ("schema", "family", "name", "fingerprint", "scan", "dtype", "narrowed", "dropped", "versions")}})
    return Conversion(out, family.name, scan, metadata["dtype"], len(placed), len(source.tensors), total, audit, narrowed, findings)


def described(source, family, expansion, kept) -> dict:
    """What the metadata of every checkpoint of a source says alike: whose it is, its config, which layout each rule took, what is not stored and why."""
    return {
        "schema": SCHEMA,
        "family": family.name,
        "model": source.model,
        "name": source.name,
        "slug": source.slug,
        "config": {"raw": source.config.raw, "effective": effective_config(source, family), "defaults": source.config.defaults},
        "layouts": {", ".join(a.rule.targets): list(a.layout.sources) for a in expansion.assignments},
        "dropped": {n: {"nbytes": source.tensors[n].nbytes, "reason": f"tied to {e.to}"} for n, e in expansion.tied.items()}
        | {n: {"nbytes": source.tensors[n].nbytes, "reason": e.reason} for n, e in expansion.ignored.items()},
        "files": [path.name for path in kept],
        "versions": {name: importlib.metadata.version(name) for name in ("orbax-checkpoint", "flax", "jax", "transformers")},
    }


def entries(place: Placement):
    """(key, shape) of everything on disk that holds a parameter."""
    return [(key, place.entry_shape) for key in place.keys]


def disk_order(tensors):
    """Tensors by shard and position in it."""
    order = {shard: i for i, shard in enumerate(tensors.shards)}
    return sorted(tensors.items(), key=lambda item: (order[item[1].shard], item[1].begin))


def _stored_dtypes(assignments: tuple[Assignment, ...], placed: dict[str, Placement], tensors, dtype) -> dict[str, np.dtype]:
    """The dtype of every entry on disk: the smallest that holds its sources exactly, or `dtype` where that is given and they are floats."""
    found: dict[str, set] = {}
    for assignment in assignments:
        for target in assignment.targets:
            found.setdefault(placed[target.path].row(target.index)[0], set()).update(tensors[name].numpy_dtype for name in assignment.names)
    return {key: dtype if dtype is not None and all(map(is_float, dtypes)) else common(dtypes) for key, dtypes in found.items()}


def _narrowed(assignments: tuple[Assignment, ...], placed: dict[str, Placement], tensors, stored) -> dict[str, tuple[str, str]]:
    """Tensors whose dtype has values that the stored dtype lacks."""
    out = {}
    for assignment in assignments:
        kept = common({stored[placed[t.path].row(t.index)[0]] for t in assignment.targets})
        out.update({name: (tensors[name].dtype, NAMES.get(kept, kept.name)) for name in assignment.names if not exact(tensors[name].numpy_dtype, kept)})
    return out


def _stream(assignments: tuple[Assignment, ...], placed: dict[str, Placement], writer: CheckpointWriter, read: FiniteReader, total: int, progress) -> None:
    """Every assignment on one of a few threads (numpy and the disk release the interpreter). The first error stops the rest."""
    done = 0

    def one(assignment: Assignment) -> int:
        written = 0
        for target, view in zip(assignment.targets, assignment.forward(read)):
            key, chunk = placed[target.path].row(target.index)
            array = contiguous(view) if view.dtype == writer.keys[key][1] else cast(contiguous(view), writer.keys[key][1])
            if view.dtype != array.dtype and (index := first_non_finite(array)) is not None:
                raise InputError(
                    f"A value of {assignment.names[0]} overflows {array.dtype} at index {list(index)} of {key}", str(writer.folder), "Choose a wider dtype"
                )
            writer.write(key, chunk, array)
            written += array.nbytes
        return written

    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(one, assignment) for assignment in assignments]
        try:
            for future in futures:
                done += future.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def kept_files(directory: Path) -> list[Path]:
    """Config, tokenizer, templates and licence of a checkpoint directory: what makes an export complete. Weights and their index are made anew."""
    return sorted(
        p
        for p in Path(directory).iterdir()
        if p.is_file()
        and not p.name.startswith(".")
        and not p.name.endswith(".index.json")
        and (p.suffix in KEPT_SUFFIXES or p.name.upper().startswith(("LICENSE", "NOTICE")))
    )


def _replaceable(out: Path, source) -> bool:
    """True when `out` is a checkpoint of this source; False when it is free. Raises InputError for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / METADATA).is_file() or read_metadata(out)["fingerprint"] != source.fingerprint:
        raise InputError(
            "The output exists and is not a checkpoint of this source, so force does not replace it", out, "Choose a new folder, or remove this one"
        )
    return True


@contextlib.contextmanager
def output_folder(out: Path, replace: bool) -> Iterator[Path]:
    """A folder that becomes `out` at the end; with `replace`, what is at `out` stays until then."""
    remove_abandoned(out)
    target = out.with_name(f".{out.name}.new") if replace else out
    with atomic_directory(target) as folder:
        (folder / OWNER).write_text(str(os.getpid()))
        yield folder
        (folder / OWNER).unlink()
    if replace:
        old = out.with_name(f".{out.name}.old")
        os.rename(out, old)
        os.rename(target, out)
        shutil.rmtree(old)
    sync(out.parent)


def remove_abandoned(out: Path) -> None:
    """Removes what a killed conversion to `out` left beside it: hidden folders that name an owner process which is gone."""
    for folder in out.parent.glob(f".{out.name}.*"):
        try:
            owner = int((folder / OWNER).read_text())
        except (OSError, ValueError):
            continue
        if not psutil.pid_exists(owner):
            shutil.rmtree(folder, ignore_errors=True)
