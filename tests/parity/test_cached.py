"""A cache is measured by our full forward; by the reference fed in the same way only where the reference leaves its own."""

import types

import numpy as np

from labkit.parity import cached
from labkit.parity.cached import Way, cached_against_reference, shift_first_row

TOKENS = np.arange(16).reshape(2, 8)
FULL = np.random.default_rng(0).normal(size=(2, 8, 5))


def feed(monkeypatch, name, ours, padded=False):
    mask = np.ones_like(TOKENS)
    if padded:
        mask[0, :3] = 0
    wanted = shift_first_row(FULL, 3) if padded else FULL
    way = Way(shift_first_row(TOKENS, 3) if padded else TOKENS, mask, None if name == "padded" else [4, 1, 1, 1, 1], ours, wanted)
    monkeypatch.setattr(cached, "ways_of_feeding", lambda *a, **k: {name: way})


def reference(own):
    return types.SimpleNamespace(
        logits=lambda tokens, mask=None: FULL if mask is None else own,
        cached_logits=lambda tokens, pieces, mask=None: [own[:, :4], *(own[:, i : i + 1] for i in range(4, 8))],
    )


def test_a_wrong_cache_is_wrong_where_the_reference_keeps_to_itself(monkeypatch):
    feed(monkeypatch, "steps", FULL + 1e-3)
    errors, findings = cached_against_reference(None, reference(FULL), TOKENS)
    assert errors["steps"] > 1e-4 and not findings


def test_a_reference_whose_cache_leaves_its_full_forward_is_followed(monkeypatch):
    own = FULL + 1e-3
    feed(monkeypatch, "pieces", own.copy())
    errors, findings = cached_against_reference(None, reference(own), TOKENS)
    assert errors["pieces"] == 0 and "'pieces'" in findings[0]["cause"] and findings[0]["component"] == "reference"
    feed(monkeypatch, "pieces", FULL + 2e-3)
    assert cached_against_reference(None, reference(own), TOKENS)[0]["pieces"] > 1e-4


def test_a_reference_that_padding_moves_is_followed(monkeypatch):
    own = shift_first_row(FULL, 3)
    own[0, 3:] += 0.5
    for name in ("padded", "padded steps"):
        feed(monkeypatch, name, own.copy(), padded=True)
        errors, findings = cached_against_reference(None, reference(own), TOKENS)
        assert errors[name] == 0 and len(findings) == 1
    feed(monkeypatch, "padded", own, padded=True)
    errors, findings = cached_against_reference(None, reference(shift_first_row(FULL, 3)), TOKENS)
    assert errors["padded"] > 1e-2 and not findings


def test_padding_itself_is_not_compared(monkeypatch):
    ours = shift_first_row(FULL, 3)
    ours[0, :3] = 7.0
    feed(monkeypatch, "padded", ours, padded=True)
    assert cached_against_reference(None, reference(None), TOKENS)[0]["padded"] == 0


def test_a_reference_without_a_cache_leaves_the_measure(monkeypatch):
    feed(monkeypatch, "steps", FULL + 1e-3)

    def refuse(*_):
        raise TypeError("no cache")

    silent = types.SimpleNamespace(logits=lambda *a: FULL, cached_logits=refuse)
    errors, findings = cached_against_reference(None, silent, TOKENS)
    assert errors["steps"] > 1e-4 and not findings
    own = shift_first_row(FULL, 3)
    own[0, 3:] += 0.5
    feed(monkeypatch, "padded steps", own, padded=True)  # what padding does to its full forward is left
    silent = types.SimpleNamespace(logits=lambda tokens, mask=None: FULL if mask is None else own, cached_logits=refuse)
    errors, findings = cached_against_reference(None, silent, TOKENS)
    assert errors["padded steps"] == 0 and len(findings) == 1
