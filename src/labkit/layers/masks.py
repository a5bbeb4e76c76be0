"""Additive attention masks of a call, by the names of `transformers.masking_utils`: [batch, 1, length, keys], 0 where a query sees a key, else the dtype's
lowest number. A query that sees nothing (padding) has the lowest number everywhere, so that its softmax is finite."""

import jax.numpy as jnp

from labkit.layers.attention import causal_mask
from labkit.layers.precision import constant


def additive(visible, dtype):
    """bool -> 0 where True, the lowest number of `dtype` elsewhere."""
    return jnp.where(visible, constant(0.0, dtype), constant(jnp.finfo(dtype).min, dtype))


def _mask(call, visible_bts, dtype, or_mask=None, and_mask=None):
    """`or_mask` and `and_mask`: functions of (batch, head, query slot, key slot), index arrays that broadcast to [batch, 1, length, keys] -> bool."""
    tokens = call.tokens
    visible = visible_bts[:, None]
    if or_mask is not None or and_mask is not None:
        batch = jnp.arange(visible.shape[0], dtype=jnp.int32)[:, None, None, None]
        at = (batch, jnp.zeros((1, 1, 1, 1), jnp.int32), tokens.slots[None, None, :, None], tokens.key_slots[None, None, None, :])
        if or_mask is not None:
            same = (tokens.segment_ids[:, :, None] == tokens.key_segment_ids[:, None, :]) & (tokens.segment_ids != 0)[:, :, None]
            visible = visible | (or_mask(*at) & same[:, None])
        if and_mask is not None:
            visible = visible & and_mask(*at)
    return additive(visible, dtype)


def create_causal_mask(call, dtype, *, or_mask=None, and_mask=None):
    """A query sees its own segment up to itself."""
    return _mask(call, causal_mask(call.tokens), dtype, or_mask, and_mask)


def create_sliding_window_causal_mask(call, window: int, dtype, *, or_mask=None, and_mask=None):
    """A query sees `window` tokens of its segment, itself the last. window None: as `create_causal_mask`."""
    return _mask(call, causal_mask(call.tokens, window), dtype, or_mask, and_mask)


def create_chunked_causal_mask(call, chunk: int, dtype, *, or_mask=None, and_mask=None):
    """A query sees the tokens of its own chunk up to itself; chunks of `chunk` tokens are counted from the start of its segment (left padding does not
    count)."""
    tokens = call.tokens
    visible = causal_mask(tokens)
    far = constant(jnp.iinfo(jnp.int32).max, jnp.int32)
    own = tokens.segment_ids[:, :, None] == tokens.key_segment_ids[:, None, :]
    start = jnp.min(jnp.where(own, tokens.key_slots[None, None, :], far), -1, keepdims=True)
    same_chunk = (tokens.key_slots[None, None, :] - start) // chunk == (tokens.slots[None, :, None] - start) // chunk
    return _mask(call, visible & same_chunk, dtype, or_mask, and_mask)


def create_recurrent_attention_mask(call):
    """bool [batch, length]: False in padding, which recurrent layers must not read."""
    return call.attention_mask
