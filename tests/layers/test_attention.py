"""Attention and masks against the installed reference's eager function, and the bookkeeping of positions, segments and caches."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from labkit.hf.exact import exact_mode
from labkit.layers.attention import NO_WINDOW, attend, causal_mask, locate_tokens
from labkit.layers.cache import DecoderCache


def inputs(batch=2, length=11, heads=6, kv_heads=2, head_dim=8):
    random = np.random.RandomState(0)
    return [random.randn(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]


def reference(q, k, v, mask, scale, softcap):
    tensors = [torch.from_numpy(x.swapaxes(1, 2).copy()) for x in (q, k, v)]
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    with exact_mode(), torch.no_grad():
        bias = torch.where(torch.from_numpy(mask[:, None].copy()), 0.0, torch.finfo(torch.float64).min)
        return eager_attention_forward(module, *tensors, bias, scaling=scale, softcap=softcap)[0].numpy()


def ours(q, k, v, window=None, **options):
    @jax.jit
    def run(q, k, v, window):
        located, _ = locate_tokens(jnp.zeros(q.shape[:2], jnp.int32))
        mask = causal_mask(located, window)
        return attend(q, k, v, mask, **options), mask

    with jax.enable_x64(True):
        window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32)
        return jax.tree.map(np.asarray, run(*map(jnp.asarray, (q, k, v)), window))


@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize("window", [None, 1, 3, 11])
def test_equals_the_reference(softcap, window):
    q, k, v = inputs()
    got, mask = ours(q, k, v, window, scale=0.3, softcap=softcap)
    np.testing.assert_allclose(got, reference(q, k, v, mask, 0.3, softcap), rtol=0, atol=1e-13)


@pytest.mark.parametrize("fault", ["tiled heads", "no softcap", "other scale", "window one short"])
def test_each_fault_is_noticed(fault):
    q, k, v = inputs()
    got, mask = ours(q, k, v, 3, scale=0.3, softcap=1.0)
    if fault == "tiled heads":
        q = q.reshape(2, 11, 2, 3, 8).swapaxes(2, 3).reshape(q.shape)
    elif fault == "window one short":
        mask = ours(q, k, v, 2, scale=0.3)[1]
    wrong = reference(q, k, v, mask, 0.31 if fault == "other scale" else 0.3, None if fault == "no softcap" else 1.0)
    assert np.abs(got - wrong).max() > 1e-3


def test_a_window_counts_the_query_itself():
    located, _ = locate_tokens(jnp.zeros((1, 5), jnp.int32))
    assert np.asarray(causal_mask(located, 2))[0].astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert np.array_equal(causal_mask(located, jnp.asarray(NO_WINDOW)), causal_mask(located))


def test_segments_restart_positions_and_do_not_see_each_other():
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2, 2]])
    located, _ = locate_tokens(jnp.zeros((1, 7), jnp.int32), segment_ids=segments)
    assert located.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    mask = np.asarray(causal_mask(located))[0]
    assert not mask[:2].any() and not mask[2:, :2].any() and not mask[5:, :5].any() and mask[4, 2:5].all()


def test_a_query_that_sees_nothing_stays_finite():
    q, k, v = map(jnp.asarray, inputs(1, 3))
    assert np.isfinite(attend(q, k, v, jnp.zeros((1, 3, 3), bool), scale=1.0)).all()


def test_the_cache_carries_positions_and_segments_on():
    cache = DecoderCache.empty([], batch=2, capacity=6)
    segments = jnp.asarray([[0, 0, 1], [1, 1, 1]])
    located, cache = jax.jit(locate_tokens)(jnp.zeros((2, 3), jnp.int32), segment_ids=segments, cache=cache)
    assert located.positions.tolist() == [[0, 1, 0], [0, 1, 2]] and cache.next_position.tolist() == [1, 3]
    located, cache = jax.jit(locate_tokens)(jnp.zeros((2, 2), jnp.int32), cache=cache)
    assert located.positions.tolist() == [[1, 2], [3, 4]] and int(cache.length) == 5
    mask = np.asarray(causal_mask(located)).astype(int)
    assert mask[0].tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]] and mask[1].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_a_new_segment_starts_over_in_the_cache():
    cache = DecoderCache.empty([], batch=1, capacity=6)
    _, cache = jax.jit(locate_tokens)(jnp.zeros((1, 2), jnp.int32), cache=cache)
    located, _ = jax.jit(locate_tokens)(jnp.zeros((1, 3), jnp.int32), segment_ids=jnp.asarray([[1, 2, 2]]), cache=cache)
    assert located.positions.tolist() == [[2, 0, 1]]
    assert np.asarray(causal_mask(located))[0].astype(int).tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("length", [128, 201, 300])
def test_causal_blocks_equal_the_reference_on_long_calls(length):
    q, k, v = inputs(batch=1, length=length)
    blocked, mask = ours(q, k, v, 70, scale=0.35, softcap=30.0, causal=True)
    whole, _ = ours(q, k, v, 70, scale=0.35, softcap=30.0)
    assert np.abs(blocked - reference(q, k, v, mask, 0.35, 30.0)).max() < 1e-12
    assert np.abs(blocked - whole).max() < 1e-12


def test_causal_blocks_are_wrong_for_a_mask_that_is_not_causal_and_untouched_when_keys_outnumber_queries():
    q, k, v = map(jnp.asarray, inputs(batch=1, length=128))
    everything = jnp.ones((1, 128, 128), bool)
    whole = attend(q, k, v, everything, scale=0.35)
    assert np.abs(attend(q, k, v, everything, scale=0.35, causal=True) - whole).max() > 1e-2
    more_keys = everything[:, :64]
    assert np.array_equal(attend(q[:, :64], k, v, more_keys, scale=0.35, causal=True), attend(q[:, :64], k, v, more_keys, scale=0.35))
