"""From a component table to named causes: which component, which lines, and what evidence was tried.

A trial changes one thing and repeats the isolated forward. A cause that a trial confirms is certain; a pattern of the numbers is a hint and says so.
"""

import dataclasses
from dataclasses import asdict, dataclass

import numpy as np

from labkit.parity.capture import capture
from labkit.parity.citation import Line
from labkit.parity.compare import relative_error
from labkit.parity.components import ComponentTable, Fault, cite_ours, cite_reference, compare_components
from labkit.parity.controls import rebuild
from labkit.parity.score_trial import score_factor
from labkit.parity.transpose_trial import transposed_matrix

EPS_CANDIDATES = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass(frozen=True)
class Finding:
    """One named fault, as `--json` shows it. reference, ours: file:line; statement: what stands in ours, through: the layer's line it calls, where one runs.
    certain: a trial mended it."""

    component: str
    cause: str
    evidence: str
    fix: str
    reference: str = ""
    ours: str = ""
    certain: bool = False
    statement: str = ""
    through: str = ""

    def as_dict(self) -> dict:
        """Plain data."""
        return asdict(self)

    @classmethod
    def at(cls, component: str, cause: str, evidence: str, fix: str, *, reference: str = "", ours: Line | str = "", certain: bool = False) -> "Finding":
        """A finding whose line tells its statement."""
        statement, through = (ours.statement, ours.through) if isinstance(ours, Line) else ("", "")
        return cls(component, cause, evidence, fix, reference, str(ours), certain, statement, through)


def diagnose(model, model_type: str, config, tokens, captured, table: ComponentTable) -> list[Finding]:
    """Findings for every component that is red in the isolated run, the first in order of execution first.

    model: ours, float64, with `config`; captured: the reference's `Capture` of tokens [batch, length]; table: the checklist made from both.
    """
    isolated = capture(model, tokens, inject=captured)
    findings, seen = [], set()
    for fault in table.isolated_faults:
        kind = "norms" if fault.kind == "final norm" else fault.kind
        if kind in seen:
            continue
        seen.add(kind)
        cause, evidence, fix, certain, *line = (
            (_eps(model, model_type, config, tokens, captured) if kind == "norms" else None)
            or _rope(fault, isolated, captured)
            or _ratio(fault, isolated, captured)
            or score_factor(fault, model, config, tokens, captured, table)
            or transposed_matrix(fault, model, model_type, config, tokens, captured, table)
            or _positions(fault, isolated, captured)
        )
        evidence = f"{fault.place}{' (input)' if fault.what == 'input' else ''}, relative error {fault.error:.1e}; {evidence}"
        ours = (line and line[0]) or cite_ours(fault, isolated)
        findings.append(Finding.at(fault.kind, cause, evidence, fix, reference=cite_reference(fault, captured), ours=ours, certain=certain))
    findings += [
        Finding(
            "coverage",
            f"{name} of the reference has no counterpart",
            "the module ran in the reference and not in ours",
            "add the module or name it as the reference does",
            certain=True,
        )
        for name in table.missing
    ]
    return findings


def _eps(model, model_type, config, tokens, captured):
    """Swap the norms' eps: the candidate that turns every norm green is the right one."""
    keys = [f.name for f in dataclasses.fields(config) if f.name.endswith(("_eps", "_epsilon")) and isinstance(getattr(config, f.name), float)]
    for value in EPS_CANDIDATES if keys else ():
        if value == getattr(config, keys[0]):
            continue
        other = rebuild(model, model_type, dataclasses.replace(config, **dict.fromkeys(keys, value)))
        trial = compare_components(capture(other, tokens), capture(other, tokens, inject=captured), captured)
        if not any(fault.kind in ("norms", "final norm") for fault in trial.isolated_faults):
            return (
                f"{keys[0]} is {getattr(config, keys[0]):g} and must be {value:g}",
                f"with {value:g} every norm agrees",
                f"read {keys[0]} from the checkpoint's config",
                True,
            )
    return None


def _pair(fault: Fault, isolated, captured):
    ours, theirs = (isolated.inputs, captured.inputs) if fault.what == "input" else (isolated, captured.outputs)
    a, b = np.asarray(ours[fault.place]), np.asarray(theirs[fault.place])
    return (a.reshape(b.shape).astype(np.float64), b.astype(np.float64)) if a.size == b.size else (None, None)


def _rope(fault: Fault, isolated, captured):
    """Rotate the reference's own queries by the other pairing: what then equals ours names the layout that ours uses."""
    if fault.kind != "rope" or fault.place not in captured.inputs:
        return None
    ours, theirs = _pair(fault, isolated, captured)
    before = np.asarray(captured.inputs[fault.place], np.float64)
    if ours is None or before.shape != theirs.shape:
        return None
    angles = _angles(before, theirs)
    if angles is not None and relative_error(_rotate_neighbours(before, angles), ours) < 1e-6:
        return (
            "rope pairs neighbours (0, 1) where the reference pairs halves (0, dim / 2)",
            "the reference's input rotated over neighbouring pairs equals ours",
            "use the split-half pairing, or permute the rows of q_proj and k_proj",
            True,
        )
    if relative_error(before, ours) < 1e-9:
        return "ours does not rotate at all", "ours equals the unrotated input", "apply the rotation in this layer", True
    return None


def _angles(before, after):
    """The angles of a split-half rotation [batch, length, heads, dim / 2] from its input and output, or None when it is none."""
    half = before.shape[-1] // 2
    x, y = before[..., :half] + 1j * before[..., half:], after[..., :half] + 1j * after[..., half:]
    turned = y / np.where(np.abs(x) < 1e-12, 1, x)
    return np.angle(turned) if np.abs(np.abs(turned) - 1).max() < 1e-6 else None


def _rotate_neighbours(x, angles):
    out, c, s = np.empty_like(x), np.cos(angles), np.sin(angles)
    out[..., ::2], out[..., 1::2] = x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s
    return out


def _ratio(fault: Fault, isolated, captured):
    """Ours is the reference's times one constant."""
    ours, theirs = _pair(fault, isolated, captured)
    if ours is None or not np.abs(theirs).max():
        return None
    factor = float((ours * theirs).sum() / (theirs * theirs).sum())
    if factor and relative_error(ours / factor, theirs) < 1e-9:
        return (
            f"ours is {factor:.6g} x the reference everywhere",
            "the two tensors differ by this factor alone",
            "look for a multiplier of the config that is missing or applied twice",
            True,
        )
    return None


def _positions(fault: Fault, isolated, captured):
    """Where along the sequence it begins: a hint."""
    ours, theirs = _pair(fault, isolated, captured)
    if ours is None:
        return (
            "the tensors have different sizes",
            f"{np.asarray(captured.outputs.get(fault.place)).shape} in the reference",
            "compare the shapes that both files declare",
            True,
        )
    if ours.ndim < 3:
        return "unknown", "no trial mended it", "compare the two cited lines", False
    errors = np.abs(ours - theirs).max((0, *range(2, ours.ndim))) / np.abs(theirs).max()
    wrong = np.flatnonzero(errors > 1e-9)
    if wrong.size and wrong[0] == 0:
        return (
            "wrong from the first position on",
            "position 0 differs already",
            "look at weights, norms, projections, activation: rotation and mask leave position 0 alone",
            False,
        )
    if not wrong.size:
        return "unknown", "no position stands out", "compare the two cited lines", False
    hint = "rotation, scale or mask" if wrong[0] == 1 else f"a window, a rope threshold or a mask near {wrong[0]}"
    return f"right at position 0 and wrong from position {wrong[0]} on", "pattern of positions", f"look at {hint}", False
