"""Decoding with the cache against the full forward: of ours, and of the reference where its own cache or its own padding leaves its own full forward."""

import contextlib
import dataclasses

import numpy as np

from labkit.errors import InputError
from labkit.parity.compare import relative_error
from labkit.parity.components import EXACT_LIMIT
from labkit.parity.greedy import cached_logits, forward

SPARE_SLOTS = 5


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of feeding tokens [batch, length]: what came out, and the full forward's logits at the same tokens. pieces: None for one call without a cache."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    pieces: list[int] | None
    ours: np.ndarray
    wanted: np.ndarray

    @property
    def error(self) -> float:
        return relative_error(self.ours, self.wanted, self.segment_ids)


def ways_of_feeding(model, tokens, *, prefill: int | None = None, padding: int = 3) -> dict[str, Way]:
    """Tokens [batch, length] fed in four ways.

    "steps": one prefill of `prefill` tokens (all but six by default), then single tokens, in a cache with slots to spare. "pieces": prefill in two pieces,
    then single tokens. "padded": the first row shifted right by `padding` masked tokens, full forward; "padded steps": the same through the cache.
    """
    tokens = np.asarray(tokens)
    batch, length = tokens.shape
    prefill = (prefill or max(2, length - 6)) // 2 * 2
    if length < 4 or not 2 <= prefill < length:
        raise InputError(f"cached decoding is checked on at least 4 tokens, of which 2 or more are prefilled: length {length}, prefill {prefill}")
    segments, ones, capacity = np.ones_like(tokens), [1] * (length - prefill), length + SPARE_SLOTS
    full = forward(model, tokens, segment_ids=segments)
    found = {}
    for name, pieces in {"steps": [prefill, *ones], "pieces": [*[prefill // 2] * 2, *ones]}.items():
        found[name] = Way(tokens, segments, pieces, cached_logits(model, tokens, pieces, segment_ids=segments, capacity=capacity), full)
    moved, shifted = shift_first_row(tokens, padding), segments.copy()
    shifted[0, :padding] = 0
    wanted = shift_first_row(full, padding)
    found["padded"] = Way(moved, shifted, None, forward(model, moved, segment_ids=shifted), wanted)
    pieces = [prefill, *ones]
    found["padded steps"] = Way(moved, shifted, pieces, cached_logits(model, moved, pieces, segment_ids=shifted, capacity=capacity), wanted)
    return found


def shift_first_row(rows, padding: int) -> np.ndarray:
    """Row 0 keeps its first length - padding places, moved right; the other rows keep all of theirs and see no padding."""
    moved = np.array(rows)
    moved[0, padding:], moved[0, :padding] = rows[0, : rows.shape[1] - padding], 0
    return moved


def cached_equals_full(model, tokens, *, prefill: int | None = None, padding: int = 3) -> dict[str, float]:
    """Relative error of every way of feeding, against our full forward."""
    return {name: way.error for name, way in ways_of_feeding(model, tokens, prefill=prefill, padding=padding).items()}


def cached_against_reference(model, reference, tokens, *, padding: int = 3, limit: float = EXACT_LIMIT, ways=None) -> tuple[dict[str, float], list[dict]]:
    """(relative error by way of feeding, findings): as `cached_equals_full`, but where ours leaves our full forward, and the reference fed in the same way
    leaves its own by more than the limit, the reference's answer to that way is the measure; a finding says so. ways: those of
    `ways_of_feeding`, when at hand."""
    errors, findings, full = {}, [], None
    for name, way in (ways or ways_of_feeding(model, tokens, padding=padding)).items():
        errors[name] = way.error
        if way.error <= limit:
            continue
        mask = None if way.segment_ids.all() else way.segment_ids
        full = reference.logits(np.asarray(tokens)) if full is None else full
        measure = full if mask is None else shift_first_row(full, padding)
        for own in _own_answers(reference, way, mask):
            apart = relative_error(own, measure, way.segment_ids)
            if apart > limit:
                errors[name] = relative_error(way.ours, own, way.segment_ids)
                cause = (
                    f"fed as {name!r} the reference differs from its own full forward by {apart:.1e}; measured by that answer (by the other: {way.error:.1e})"
                )
                findings.append({"component": "reference", "cause": cause, "evidence": "", "fix": ""})
                break
    return errors, findings


def _own_answers(reference, way: Way, mask):
    """The reference's logits of the way: through its cache where it has one that takes the pieces, then with the padding alone."""
    if way.pieces:
        with contextlib.suppress(Exception):
            yield np.concatenate(reference.cached_logits(way.tokens, way.pieces, mask), 1)
    if mask is not None:
        yield reference.logits(way.tokens, mask)
