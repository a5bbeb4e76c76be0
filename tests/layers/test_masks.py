"""Masks against the installed `masking_utils`: causal, windowed, chunked, with extras, padded and packed, with and without a cache."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, masking_utils

from labkit.layers.attention import eager_attention, locate_tokens
from labkit.layers.cache import DecoderCache
from labkit.layers.masks import create_causal_mask, create_chunked_causal_mask, create_recurrent_attention_mask, create_sliding_window_causal_mask

LENGTH = 13
PADDED = np.array([[0] * 5 + [1] * 8, [1] * 13], np.int32)
OURS = {
    "causal": create_causal_mask,
    "sliding": lambda call, dtype, **extras: create_sliding_window_causal_mask(call, 4, dtype, **extras),
    "chunked": lambda call, dtype, **extras: create_chunked_causal_mask(call, 4, dtype, **extras),
}
THEIRS = {
    "causal": masking_utils.create_causal_mask,
    "sliding": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
}


def reference(kind, mask=None, position_ids=None, **extras):
    """bool [2, LENGTH, LENGTH]."""
    config = LlamaConfig(attn_implementation="eager")
    config.sliding_window = config.attention_chunk_size = 4
    mask = None if mask is None else torch.from_numpy(mask)
    position_ids = None if position_ids is None else torch.from_numpy(position_ids)
    made = THEIRS[kind](config=config, inputs_embeds=torch.zeros(2, LENGTH, 4), attention_mask=mask, cache=None, position_ids=position_ids, **extras)
    return (made[:, 0] == 0).expand(2, -1, -1).numpy()


def call(segment_ids=None, cache=None, length=LENGTH):
    located, after = locate_tokens(jnp.zeros((2, length), jnp.int32), None, segment_ids, cache)
    return SimpleNamespace(tokens=located, attention_mask=located.segment_ids != 0), after


@functools.cache
def visible(kind, padded=False, packed=False):
    segments = PADDED if padded else np.array([[1] * 6 + [2] * 7, [1] * 13], np.int32) if packed else None
    made = np.asarray(jax.jit(lambda: OURS[kind](call(segments)[0], jnp.float32))())
    assert made.shape == (2, 1, LENGTH, LENGTH) and set(np.unique(made)) == {0.0, np.finfo(np.float32).min}
    return made[:, 0] == 0


@pytest.mark.parametrize("kind", OURS)
def test_equals_the_reference_plain_padded_and_packed(kind):
    assert np.array_equal(visible(kind), reference(kind))
    real = PADDED[:, :, None] != 0
    assert np.array_equal(visible(kind, padded=True) & real, reference(kind, PADDED.astype(np.int64)) & real)
    positions = np.array([[*range(6), *range(7)], [*range(13)]])
    assert np.array_equal(visible(kind, packed=True), reference(kind, position_ids=positions))


def test_the_kinds_are_told_apart():
    assert not np.array_equal(visible("causal"), visible("sliding")) and not np.array_equal(visible("sliding"), visible("chunked"))
    real = PADDED[0] != 0
    assert not np.array_equal(visible("chunked", padded=True)[0][real], visible("chunked")[0][real]), "control: padding moves the chunks"


@pytest.mark.parametrize("kind", OURS)
def test_through_a_cache_in_pieces(kind):
    @jax.jit
    def one(segments, cache):
        piece, cache = call(segments, cache, segments.shape[1])
        return OURS[kind](piece, jnp.float32), cache

    cache, rows = DecoderCache.empty([], 2, LENGTH + 2), []
    for start, end in ((0, 7), (7, 8), (8, 13)):
        mask, cache = one(PADDED[:, start:end], cache)
        rows.append(np.asarray(mask)[:, 0] == 0)
    through = np.concatenate(rows, 1)
    assert np.array_equal(through[..., :LENGTH], visible(kind, padded=True)) and not through[..., LENGTH:].any()


def test_extras_widen_and_narrow():
    both = lambda batch, head, query, key: (query < 3) & (key < 3)
    even = lambda batch, head, query, key: key % 2 == 0
    made = np.asarray(create_causal_mask(call()[0], jnp.float32, or_mask=both, and_mask=even))[:, 0] == 0
    assert np.array_equal(made, reference("causal", or_mask_function=both, and_mask_function=even)) and not np.array_equal(made, visible("causal"))


def test_a_query_that_sees_nothing_stays_finite():
    for dtype in (jnp.float32, jnp.bfloat16):
        mask = create_causal_mask(call(PADDED)[0], dtype)
        q = jnp.asarray(np.random.RandomState(0).randn(2, 4, LENGTH, 8) * 30, dtype)
        assert np.isfinite(jax.jit(lambda q, mask: eager_attention(q, q[:, :2], q[:, :2], mask, scaling=1.0))(q, mask).astype(jnp.float32)).all()


def test_the_recurrent_mask_is_the_padding():
    assert np.array_equal(create_recurrent_attention_mask(call(PADDED)[0]), PADDED != 0)


def eager(module, *tensors, **options):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    with torch.no_grad():
        return eager_attention_forward(module, *tensors, **options)[0]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_attention_with_sinks_equals_the_reference(dtype):
    random = np.random.RandomState(0)
    q, k, v, sinks = random.randn(2, 6, 11, 8), random.randn(2, 2, 11, 8), random.randn(2, 2, 11, 8), random.randn(6)
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k, v, sinks)]
    mask = np.where(np.tril(np.ones((11, 11), bool)), 0.0, float(jnp.finfo(dtype).min))[None, None].repeat(2, 0)
    module = SimpleNamespace(num_key_value_groups=3, sinks=tensors[3], training=False)
    want = eager(module, *tensors[:3], torch.from_numpy(mask).to(getattr(torch, dtype)), scaling=0.3).double().numpy()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        arrays = [jnp.asarray(x, dtype) for x in (q, k, v, sinks, mask)]
        got = np.asarray(eager_attention(*arrays[:3], arrays[4], scaling=0.3, sinks=arrays[3]), np.float64)
        without = np.asarray(eager_attention(*arrays[:3], arrays[4], scaling=0.3), np.float64)
    if dtype == "float64":
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    else:
        assert np.mean(got == want) > 0.9 and np.abs(got - want).max() < 0.05
    assert np.abs(without - want).max() > 0.1


def test_a_mask_per_head():
    random = np.random.RandomState(1)
    q, k, v = (jnp.asarray(random.randn(2, heads, 5, 4), jnp.float32) for heads in (4, 2, 2))
    bias = jnp.asarray(random.randn(1, 4, 5, 5), jnp.float32)
    got = eager_attention(q, k, v, bias, scaling=1.0)
    for head in range(4):
        one = eager_attention(q[:, head : head + 1], k[:, head // 2, None], v[:, head // 2, None], bias[:, head : head + 1], scaling=1.0)
        np.testing.assert_allclose(got[:, :, head], one[:, :, 0], atol=1e-6)
