"""Greedy decoding against the reference's, and the cache against the full forward."""

import jax.numpy as jnp
import numpy as np
import pytest

from labkit.errors import InputError
from labkit.layers.cache import KVCache
from labkit.parity.cached import cached_equals_full
from labkit.parity.greedy import GreedyDecoder, greedy


def test_greedy_is_the_references(both, x64):
    ours = greedy(both.model, both.tokens[:1], 16)
    assert ours.shape == (1, 28) and np.array_equal(ours, both.reference.greedy(both.tokens[:1], 16))
    assert np.array_equal(ours, greedy(both.model, both.tokens[:1], 16, capacity=40))


def test_unrolled_decoding_chooses_the_same_tokens(both, x64):
    decode = GreedyDecoder(both.model, unroll=True)
    assert np.array_equal(decode(both.tokens[:1], 16), greedy(both.model, both.tokens[:1], 16))


def test_greedy_refuses_what_it_cannot_do(both):
    with pytest.raises(InputError, match="at least one step"):
        greedy(both.model, both.tokens, 0)
    with pytest.raises(InputError, match="cannot hold"):
        greedy(both.model, both.tokens, 8, capacity=12)


def test_decode_with_cache_equals_full_forward(both, x64):
    errors = cached_equals_full(both.model, both.tokens)
    assert set(errors) == {"steps", "pieces", "padded", "padded steps"} and max(errors.values()) <= 1e-13


def test_a_cache_that_forgets_a_slot_is_seen(both, x64, monkeypatch):
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda self, key, value, start: write(self, key, jnp.where(start == 7, 0.0, value), start))
    # Another length than elsewhere: the compiled calls of other tests must not serve here.
    errors = cached_equals_full(both.model, both.tokens[:, :11])
    assert errors["steps"] > 1e-6


def test_cache_check_needs_tokens(both):
    with pytest.raises(InputError, match="at least 4 tokens"):
        cached_equals_full(both.model, both.tokens[:, :3])
