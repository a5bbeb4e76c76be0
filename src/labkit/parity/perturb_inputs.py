"""Perturbed inputs: changed tokens, neighbours in a packed row, padding, the edge of a window, lengths around a rope threshold."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from labkit.parity.components import EXACT_LIMIT
from labkit.parity.perturb_spec import PerturbSpec, Row
from labkit.parity.perturb_subject import LENGTH, MOVES, Subject, moved
from labkit.parity.perturb_values import ORIGINAL, rope_tables

SAME = 1e-12
"""Logits that must not move may differ by rounding: other tokens elsewhere in a batch can change the order of a sum."""
AT, FIRST, PAD = 23, 13, 5
_WINDOWS = re.compile(r"(^|_)(sliding_window|attention_chunk_size|window_size|attention_window_size|local_attention_window)$")


def input_specs(subject: Subject, rng, *, full: bool = False) -> list[PerturbSpec]:
    """The probes that a model has a place for; with `full` also rope tables that look at the length, at and around their threshold."""
    specs = [
        PerturbSpec("input", "nothing", None, "unchanged, both sides agree"),
        PerturbSpec("input", "causality", {"token": AT}, "positions before the changed token stay, the rest moves as the reference's"),
        PerturbSpec("input", "segments", {"packed": [FIRST, LENGTH - FIRST]}, "a packed segment gives what it gives alone, whatever its neighbour holds"),
        PerturbSpec("input", "padding", {"left": PAD, "right": PAD}, "padding changes nothing, whatever tokens stand in it"),
    ]
    specs += [PerturbSpec("input", "window", {key: size}, "exact at lengths w-1, w and w+1") for key, size in windows(subject.source.config.effective).items()]
    lengths = thresholds(subject.source.config.effective)
    specs += [PerturbSpec("input", "rope", {"length": length + 1}, "exact past the threshold") for length in lengths]
    if full:
        specs += [PerturbSpec("input", "rope", {"length": length + off}, "exact at the threshold") for length in lengths for off in (-1, 0)]
        specs += _rope_specs(subject)
    return specs


def windows(effective: Mapping) -> dict[str, int]:
    """key -> size of every window or chunk of the config that rows of 40 tokens reach."""
    found = {key: value for key, value in effective.items() if _WINDOWS.search(key) and isinstance(value, int) and not isinstance(value, bool)}
    return {key: value for key, value in found.items() if 1 < value < LENGTH}


def thresholds(effective: Mapping) -> list[int]:
    """Lengths at which the config's rope tables change what they do."""
    found = set()

    def look(table, top):
        if table.get("rope_type") in ("dynamic", "longrope"):
            found.add(top.get("max_position_embeddings") if table["rope_type"] == "dynamic" else None)
        found.add(table.get("original_max_position_embeddings"))
        for inner in table.values():
            if isinstance(inner, Mapping):
                look(inner, top)

    look(effective.get("rope_parameters") or {}, effective)
    if (effective.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        found.add(effective.get("original_max_position_embeddings"))
    return sorted(length for length in found if isinstance(length, int) and 1 < length < 600)


def _rope_specs(subject: Subject) -> list[PerturbSpec]:
    """Tables that look at the length, put over the config, with 15, 16 and 17 tokens."""
    effective = subject.source.config.effective
    table = effective.get("rope_parameters")
    if not isinstance(table, Mapping) or any(isinstance(inner, Mapping) for inner in table.values()) or "rope_theta" not in table:
        return []
    base, specs = {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}, []
    for name in ("dynamic", "longrope"):
        for other, more in rope_tables(name, effective, base):
            change = {"rope_parameters": {**base, **other}, **more}
            try:
                subject.theirs(at=subject.variant(config=change))
            except Exception:  # not a table that this reference can have
                continue
            specs += [PerturbSpec("input", "rope", {"length": ORIGINAL + off, "config": change}, f"exact around the threshold of {name}") for off in (0, 1)]
            break
    return specs


def check_input(subject: Subject, spec: PerturbSpec, *, ours: Callable | None = None) -> Row:
    """One probe. ours: what stands in for our model, called as `Subject.ours` is (a planted fault)."""
    probe = {"nothing": _nothing, "causality": _causality, "segments": _segments, "padding": _padding, "window": _window, "rope": _rope}.get(spec.target)
    if probe is None:
        raise ValueError(f"there is no input probe {spec.target!r}")
    return probe(subject, spec, ours or subject.ours)


def _judge(spec: PerturbSpec, parts: dict[str, tuple[float, float]], moved_by: float | None = None, note: str = "") -> Row:
    """parts: what was compared -> (value, limit). The row's value is the worst against its limit."""
    worst = max(parts, key=lambda name: parts[name][0] / parts[name][1])
    failed = [f"{name}: {value:.1e}, limit {limit:.0e}" for name, (value, limit) in parts.items() if not value <= limit]
    return Row(spec, not failed, parts[worst][0], moved_by, "; ".join(failed), note)


def _other_token(subject: Subject, tokens: np.ndarray, where) -> np.ndarray:
    """The tokens with those at `where` changed to others of the vocabulary (special ones left out)."""
    changed = tokens.copy()
    changed[where] = 3 + (changed[where] - 3 + 1 + (subject.vocab - 3) // 3) % (subject.vocab - 3)
    return changed


def _nothing(subject: Subject, spec: PerturbSpec, ours) -> Row:
    """What every other spec starts from: a slice that is off to begin with agrees after no change."""
    return _judge(spec, {"nothing changed": (moved(ours(subject.tokens), subject.plain_theirs), EXACT_LIMIT)})


def _causality(subject: Subject, spec: PerturbSpec, ours) -> Row:
    at = spec.change["token"]
    changed = _other_token(subject, subject.tokens, (slice(None), slice(at, at + 1)))
    before = np.zeros(subject.tokens.shape, bool)
    before[:, :at] = True
    theirs, own = subject.theirs(changed), ours(changed)
    base = ours(subject.tokens)
    looks_ahead = moved(theirs, subject.plain_theirs, before)
    parts = {"after the change, against the reference": (moved(own, theirs), EXACT_LIMIT)}
    if looks_ahead <= MOVES:
        parts["positions before the changed token"] = (moved(own, base, before), SAME)
    step = moved(theirs, subject.plain_theirs, ~before)
    parts["the changed token moves nothing"] = (0.0 if step > MOVES and moved(own, base, ~before) > MOVES else 1.0, MOVES)
    return _judge(spec, parts, step, f"the reference itself looks ahead: {looks_ahead:.1e}" if looks_ahead > MOVES else "")


def _segments(subject: Subject, spec: PerturbSpec, ours) -> Row:
    first = spec.change["packed"][0]
    segments = np.ones(subject.tokens.shape, np.int32)
    segments[:, first:] = 2
    is_first = segments == 1
    packed = ours(subject.tokens, segments)
    other_first = ours(_other_token(subject, subject.tokens, (slice(None), slice(0, first))), segments)
    other_second = ours(_other_token(subject, subject.tokens, (slice(None), slice(first, None))), segments)
    parts = {
        "the first segment against the reference alone": (moved(packed[:, :first], subject.theirs(subject.tokens[:, :first])), EXACT_LIMIT),
        "the second segment against the reference alone": (moved(packed[:, first:], subject.theirs(subject.tokens[:, first:])), EXACT_LIMIT),
        "the second segment when the first changes": (moved(other_first, packed, ~is_first), SAME),
        "the first segment when the second changes": (moved(other_second, packed, is_first), SAME),
    }
    return _judge(spec, parts, moved(other_first, packed))


def _padding(subject: Subject, spec: PerturbSpec, ours) -> Row:
    left, right = spec.change["left"], spec.change["right"]
    mask = np.ones(subject.tokens.shape, np.int32)
    mask[0, :left] = 0
    mask[1, -right:] = 0
    padded = ours(subject.tokens, mask)
    refilled = ours(np.where(mask == 0, _other_token(subject, subject.tokens, slice(None)), subject.tokens), mask)
    alone = {0: subject.tokens[:1, left:], 1: subject.tokens[1:, :-right]}
    parts = {
        "real tokens when the padding's change": (moved(refilled, padded, mask), SAME),
        "right padding against the reference alone": (moved(padded[1:, :-right], subject.theirs(alone[1])), EXACT_LIMIT),
    }
    plain, masked = subject.theirs(alone[0]), subject.theirs(subject.tokens[:1], mask[:1])[:, left:]
    own = moved(masked, plain)
    # A reference that left padding moves is followed where it goes, by its own mask.
    parts["left padding against the reference"] = (min(moved(padded[:1, left:], masked), moved(padded[:1, left:], plain)), EXACT_LIMIT)
    return _judge(spec, parts, None, f"left padding moves the reference itself by {own:.1e}" if own > EXACT_LIMIT else "")


def _window(subject: Subject, spec: PerturbSpec, ours) -> Row:
    """Rows of w-1, w, w+1 and 2w tokens, the rest of each row padding; without padding where a rope table looks at the length of the whole batch."""
    size = next(iter(spec.change.values()))
    lengths = [length for length in (size - 1, size, size + 1, 2 * size) if 0 < length < LENGTH]
    parts = {}
    if any(threshold < LENGTH for threshold in thresholds(subject.source.config.effective)):
        for length in lengths:
            tokens = subject.tokens[:1, :length]
            parts[f"length {length}"] = (moved(ours(tokens, np.ones(tokens.shape, np.int32)), subject.theirs(tokens)), EXACT_LIMIT)
        return _judge(spec, parts)
    for pair in (lengths[i : i + 2] for i in range(0, len(lengths), 2)):
        pair = (pair * 2)[:2]
        mask = np.zeros(subject.tokens.shape, np.int32)
        for row, length in enumerate(pair):
            mask[row, :length] = 1
        logits = ours(subject.tokens, mask)
        for row, length in enumerate(pair):
            parts[f"length {length}"] = (moved(logits[row : row + 1, :length], subject.theirs(subject.tokens[row : row + 1, :length])), EXACT_LIMIT)
    return _judge(spec, parts)


def _rope(subject: Subject, spec: PerturbSpec, ours) -> Row:
    length, change = spec.change["length"], spec.change.get("config")
    tokens = np.resize(subject.tokens[0], (1, length)) if length > LENGTH else subject.tokens[:1, :length]
    if change is None:
        return _judge(spec, {f"length {length}": (moved(ours(tokens), subject.load_reference(subject.source.path).logits(tokens)), EXACT_LIMIT)})
    directory = subject.variant(config=change)
    theirs = subject.theirs(tokens, at=directory)
    own = ours(tokens, model=subject.load_ours(directory)[0])
    return _judge(spec, {f"length {length}": (moved(own, theirs), EXACT_LIMIT)}, moved(theirs, subject.theirs(tokens)))
