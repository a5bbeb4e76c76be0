"""Where decoding through the cache first leaves our own full forward: the component, the slice's line, and whether the full forward's value there mends it."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from labkit.parity.cached import SPARE_SLOTS, Way, shift_first_row
from labkit.parity.capture import Recording, capture
from labkit.parity.compare import relative_error
from labkit.parity.components import EXACT_LIMIT, ComponentTable, Fault, cite_ours, cite_reference, compare_components, input_kind, kind_of, tail
from labkit.parity.diagnose import Finding

FIX = "see what this statement makes of a call with a cache: branches on its length, slots that are written and read, positions, the mask over slots"
PADDING_FIX = "see what this statement makes of masked tokens: positions that count them, keys of padding that stay visible"


def name_cached_faults(model, tokens, ways: dict[str, Way], errors: dict[str, float], captured, *, limit: float = EXACT_LIMIT) -> list[Finding]:
    """One finding for each place where a way of feeding first leaves our full forward of tokens [batch, length]; none where every error holds.

    ways: of `ways_of_feeding`; errors: of `cached_against_reference`. captured: the reference's `Capture`, for its classes and lines.
    """
    full, found = None, {}
    for name, way in ways.items():
        if errors[name] <= limit:
            continue
        full = capture(model, tokens, segment_ids=np.ones_like(tokens)) if full is None else full
        told = _first_fault(model, way, full, captured, limit)
        key = (tail(told[0].place), told[0].what) if told else None
        found.setdefault(key, []).append((name, way, told))
    findings = []
    for alike in found.values():
        wrong = ", ".join(f"{name!r} {errors[name]:.1e}" for name, _, _ in alike)
        right = ", ".join(repr(name) for name in ways if errors[name] <= limit)
        name, way, told = alike[0]
        measured = f"against our own full forward, fed as {wrong}" + (f" (right: {right})" if right else "")
        if told is None:
            findings.append(Finding("cache", "decoding through the cache leaves the full forward, and no place of a run by loop does", measured, FIX))
            continue
        fault, recording, start, count, before = told
        mended = _mended(model, way, full, fault, limit)
        at = f"token {start}" if count == 1 else f"tokens {start} to {start + count - 1}"
        what = " (input)" if fault.what == "input" else ""
        how = "through the cache" if way.pieces else "with padding"
        trial = "with the full forward's values put in there the logits agree" if mended else "with the full forward's values put in there it stays wrong"
        where = f"fed as {name!r}, in the call with {at}, {fault.place}{what} has relative error {fault.error:.1e}"
        evidence = f"{measured}; {where} and the {before} values before it agree"
        findings.append(
            Finding.at(
                fault.kind,
                f"the forward {how} leaves the full forward here first: {fault.place}{what}",
                f"{evidence}; {trial}",
                FIX if way.pieces else PADDING_FIX,
                reference=cite_reference(fault, captured),
                ours=cite_ours(fault, recording),
                certain=mended,
            )
        )
    return findings


def name_padding_fault(model, reference, tokens, mask, table: ComponentTable, *, limit: float = EXACT_LIMIT) -> list[Finding]:
    """The first place at fault alone where tokens [batch, length] are left-padded as `mask` says on both sides; [] when there is none.

    table: the checklist without padding: a place that is wrong there is wrong for another cause.
    """
    captured = reference.capture(tokens, mask)
    isolated = capture(model, tokens, inject=captured, segment_ids=mask)
    padded = compare_components(capture(model, tokens, segment_ids=mask), isolated, captured, mask=mask, limit=limit)
    known = {(fault.place, fault.what) for fault in table.isolated_faults}
    return [
        Finding.at(
            fault.kind,
            f"with left padding this leaves the reference first: {fault.place}",
            f"relative error {fault.error:.1e} beside the reference's own attention mask",
            PADDING_FIX,
            reference=cite_reference(fault, captured),
            ours=cite_ours(fault, isolated),
        )
        for fault in [fault for fault in padded.isolated_faults if (fault.place, fault.what) not in known][:1]
    ]


def _calls(model, way: Way, inject=None) -> Iterator[tuple[int, int, Recording]]:
    """(first token, token after the last, recording) of each call of a way. inject(first, after): what to put in, as `capture` takes it."""
    batch, length = way.tokens.shape
    cache = model.init_cache(batch, length + SPARE_SLOTS) if way.pieces else None
    start = 0
    for piece in way.pieces or [length]:
        stop = start + piece
        call = {} if cache is None else {"cache": cache}
        recording = capture(
            model, way.tokens[:, start:stop], inject=inject and inject(start, stop), segment_ids=np.asarray(way.segment_ids[:, start:stop], np.int32), **call
        )
        yield start, stop, recording
        if cache is not None:
            cache = recording.result[-1]
        start = stop


def _wanted(full_values, way: Way, name: str, start: int, stop: int) -> np.ndarray | None:
    """The full forward's value of a name at the tokens of a call, [batch, count, ...] moved as the way moves its tokens; None for what has no token axis."""
    whole = _by_token(full_values.get(name), *way.tokens.shape)
    if whole is None:
        return None
    moved = whole if way.segment_ids.all() else shift_first_row(whole, int((way.segment_ids[0] == 0).sum()))
    return moved[:, start:stop]


def _by_token(value, batch: int, length: int) -> np.ndarray | None:
    """[batch, length, ...] of a value that has it so or as [batch * length, ...], else None."""
    shape = np.shape(value)
    if shape[:2] == (batch, length):
        return np.asarray(value)
    return np.asarray(value).reshape(batch, length, *shape[1:]) if shape[:1] == (batch * length,) else None


def _first_fault(model, way: Way, full: Recording, captured, limit: float):
    """(fault, the call's recording, its first token, its number of tokens, how many values before the fault were compared), or None."""
    for start, stop, recording in _calls(model, way):
        mask, before = np.asarray(way.segment_ids[:, start:stop], bool), 0
        for name, what in [*recording.order, ("logits", "output")]:
            ours, theirs = (recording.inputs, full.inputs) if what == "input" else (recording, full)
            value, wanted = _by_token(ours.get(name), len(mask), stop - start), _wanted(theirs, way, name, start, stop)
            if value is None or wanted is None or value.shape != wanted.shape or not mask.any():
                continue
            # Against the size of all tokens' values: what one token leaves at zero is no measure.
            size = np.abs(np.asarray(theirs[name], np.float64)).max() or 1.0
            apart = np.abs(value.astype(np.float64) - wanted.astype(np.float64))[mask]
            error = float(apart.max() / size)
            if not error <= limit:
                kind = (kind_of if what == "output" else input_kind)(name, captured.classes)
                return Fault(name, what, kind, error), recording, start, stop - start, before
            before += 1
    return None


def _mended(model, way: Way, full: Recording, fault: Fault, limit: float) -> bool:
    """Whether the logits agree when the place of the fault, in every layer, is given the full forward's values."""
    alike = {tail(fault.place), tail(fault.place).replace("q_rope", "k_rope")}  # queries and keys are rotated by one table
    names = [name for name in (full.inputs if fault.what == "input" else full) if tail(name) in alike]

    def inject(start, stop):
        values = {name: _wanted(full.inputs if fault.what == "input" else full, way, name, start, stop) for name in names}
        values = {name: value for name, value in values.items() if value is not None}
        return SimpleNamespace(inputs=values if fault.what == "input" else {}, outputs=values if fault.what == "output" else {})

    logits = np.concatenate([recording["logits"] for _, _, recording in _calls(model, way, inject)], 1)
    return fault.place != "logits" and relative_error(logits, way.wanted, way.segment_ids) <= limit
