"""Perturbed parameters: one leaf of ours, and through the inverse rule the reference's tensors. Both outputs must move, and move alike."""

import re
from collections.abc import Iterator

import numpy as np

from labkit.parity.components import EXACT_LIMIT
from labkit.parity.perturb_spec import ALIKE, NOTHING, PerturbSpec, Row
from labkit.parity.perturb_subject import MOVES, Subject, moved

STRENGTHS = (0.1, 1.0, 10.0)
"""Changes in units of a leaf's mean size: the next is tried while nothing moves (a bias that selects experts may need to grow until a choice flips)."""


def parameter_specs(subject: Subject) -> list[PerturbSpec]:
    """One spec for each leaf of the model; of a stacked one, at a layer chosen by the leaf's place in the list."""
    specs = []
    for number, (path, rows) in enumerate(_rows(subject).items()):
        indices = sorted(rows, key=lambda index: -1 if index is None else index)
        index = indices[number % len(indices)]
        reason = dead_reason(subject, path, index)
        specs.append(PerturbSpec("parameter", path, None if index is None else {"index": index}, NOTHING if reason else ALIKE, reason))
    return specs


def dead_reason(subject: Subject, path: str, index: int | None) -> str:
    """Why a change of this leaf moves nothing, as the slice declares it in `DEAD_LEAVES` (pattern of `path` or `path[index]` -> reason), "" for a live one."""
    declared = slice_attribute(subject.family, "DEAD_LEAVES", {})
    name = path if index is None else f"{path}[{index}]"
    return next((reason for pattern, reason in declared.items() if re.fullmatch(pattern, path) or re.fullmatch(pattern, name)), "")


def slice_attribute(family, name: str, default):
    """What a slice's package says of itself beside its `FAMILY`, where it does."""
    import sys

    package = sys.modules.get(family.model.__module__.rpartition(".")[0])
    return getattr(package, name, default)


def _rows(subject: Subject) -> dict[str, list[int | None]]:
    """path -> the rows of it that rules fill."""
    found: dict[str, list] = {}
    for assignment in subject.expansion.assignments:
        for target in assignment.targets:
            found.setdefault(target.path, []).append(target.index)
    return found


def check_parameter(subject: Subject, spec: PerturbSpec, seed: int = 0, *, frozen: bool = False) -> Row:
    """Change the leaf until the reference moves, by at most ten times its mean size, and compare. frozen: plant a fault, our leaf keeps its value."""
    before, after, error = subject.plain_theirs, 0.0, None
    for leaf, tensors in _changes(subject, spec, seed):
        theirs = subject.theirs(at=subject.variant(tensors=tensors))
        ours = subject.plain_ours if frozen else subject.ours(leaves={spec.target: leaf})
        after, own, error = moved(theirs, before), moved(ours, subject.plain_ours), moved(ours, theirs)
        if after > MOVES or own > MOVES or error > EXACT_LIMIT:
            break
    else:
        text = f"a dead leaf: changed by up to {STRENGTHS[-1]:g} times its size it moves nothing, on either side"
        return Row(
            spec, spec.follows == NOTHING, error, after, "" if spec.follows == NOTHING else text + "; declare it in the slice's DEAD_LEAVES with a reason"
        )
    if spec.follows == NOTHING:
        return Row(spec, False, error, after, f"declared dead ({spec.reason}), and it moves the {'reference' if after > MOVES else 'slice'}")
    if error > EXACT_LIMIT:
        told = "the slice ignores it" if own <= MOVES else f"ours by {own:.1e}"
        return Row(spec, False, error, after, f"the two sides move apart: the reference by {after:.1e}, {told}")
    return Row(spec, True, error, after)


def _changes(subject: Subject, spec: PerturbSpec, seed: int) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(our leaf, the reference's tensors by name) of each strength: the same numbers to the bit, as the file's dtype holds them."""
    index = (spec.change or {}).get("index")
    assignment, which = next(
        (a, which) for a in subject.expansion.assignments for which, t in enumerate(a.targets) if t.path == spec.target and t.index == index
    )
    arrays = assignment.forward(subject.source.tensors.read)
    rng = np.random.default_rng([seed, *spec.target.encode()])
    value = np.asarray(subject.leaves[spec.target][1].get_raw_value())
    for strength in STRENGTHS:
        changed = _changed(arrays[which], strength, rng)
        tensors = assignment.backward([changed if i == which else array for i, array in enumerate(arrays)], lambda name: subject.source.tensors[name].shape)
        tensors |= {name: tensors[tied.to] for name, tied in subject.expansion.tied.items() if tied.to in tensors}
        leaf = value.copy()
        leaf[... if index is None else index] = changed.astype(value.dtype)
        yield leaf, tensors


def _changed(array: np.ndarray, strength: float, rng) -> np.ndarray:
    """Every element changed, in the dtype it has; whole numbers are put in another order."""
    if not np.issubdtype(array.dtype, np.inexact) and array.dtype.kind in "iub":
        return rng.permutation(array)
    wide = array.astype(np.float64)
    size = float(np.abs(wide).mean()) or 1.0
    return (wide + strength * size * rng.standard_normal(array.shape)).astype(array.dtype)
