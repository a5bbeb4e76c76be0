"""Masks and grouped-query attention."""

import dataclasses

import jax
import jax.numpy as jnp

from labkit.layers.cache import DecoderCache
from labkit.layers.precision import constant, scaled, widen
from labkit.layers.tags import tag

NO_WINDOW = 2**30
"""A window that no sequence reaches: full attention as per-layer data."""

CAUSAL_BLOCKS, SHORTEST_BLOCK = 4, 64
"""Causal attention works through its queries in at most this many blocks of at least this many rows: four leave out 3/8 of the scores."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tokens:
    """Where the tokens of one call stand: what masks and rotations need.

    positions: int32 [batch, length], as the rotation sees them. segment_ids: int32 [batch, length], 0 is padding. slots: int32 [length], their order in time.
    key_segment_ids: int32 [batch, keys] and key_slots: int32 [keys], the same for everything a query may see (the cache's capacity, or the call's own tokens).
    """

    positions: jax.Array
    segment_ids: jax.Array
    slots: jax.Array
    key_segment_ids: jax.Array
    key_slots: jax.Array


def _restarting_positions(segment_ids_bt):
    """Positions that start at 0 in each segment: [0, 0, 1, 1, 1, 2] -> [0, 1, 0, 1, 2, 0]."""
    index = jnp.arange(segment_ids_bt.shape[1], dtype=jnp.int32)
    first = jnp.concatenate([jnp.ones_like(segment_ids_bt[:, :1], bool), segment_ids_bt[:, 1:] != segment_ids_bt[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def locate_tokens(tokens_bt, positions=None, segment_ids=None, cache: DecoderCache | None = None) -> tuple[Tokens, DecoderCache | None]:
    """Positions, segments and slots of a call, and the cache with its bookkeeping brought forward (its layers are still the old ones).

    positions: int [batch, length] or None: counted from 0 in each segment, or onward from the cache. segment_ids: int [batch, length] or None: all one segment,
    or, with a cache, the segment of the last token. Left padding is segment 0.
    """
    batch, length = tokens_bt.shape
    given = segment_ids is not None
    if not given:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if cache is None:
        positions = _restarting_positions(segment_ids) if positions is None else jnp.asarray(positions, jnp.int32)
        slots = jnp.arange(length, dtype=jnp.int32)
        return Tokens(positions, segment_ids, slots, segment_ids, slots), None
    if not given:
        last = jnp.take_along_axis(cache.segment_ids, jnp.broadcast_to(jnp.maximum(cache.length - 1, 0), (batch, 1)), axis=1)
        segment_ids = jnp.broadcast_to(jnp.maximum(last, 1), (batch, length))
    if positions is None:
        fresh = _restarting_positions(segment_ids)
        continued = jnp.cumsum(segment_ids == segment_ids[:, :1], 1, dtype=jnp.int32) - 1 + cache.next_position[:, None]
        positions = jnp.where((segment_ids == segment_ids[:, :1]) & (segment_ids[:, :1] != 0) & (cache.next_position[:, None] > 0), continued, fresh)
    positions = jnp.asarray(positions, jnp.int32)
    written = jax.lax.dynamic_update_slice(cache.segment_ids, segment_ids, (jnp.zeros_like(cache.length), cache.length))
    slots = cache.length + jnp.arange(length, dtype=jnp.int32)
    located = Tokens(positions, segment_ids, slots, written, jnp.arange(cache.capacity, dtype=jnp.int32))
    after = jnp.where(segment_ids[:, -1] != 0, positions[:, -1] + 1, cache.next_position)
    return located, DecoderCache(cache.layers, written, after, cache.length + jnp.asarray(length, jnp.int32))


def causal_mask(tokens: Tokens, window=None):
    """bool [batch, query, key]: a query sees the keys of its own segment up to itself, and no further back than `window` - 1 slots (int or int32 scalar
    array)."""
    distance = tokens.slots[:, None] - tokens.key_slots[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    same = tokens.segment_ids[:, :, None] == tokens.key_segment_ids[:, None, :]
    return visible[None] & same & (tokens.segment_ids != 0)[:, :, None]


def _causal_blocks(length: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, last query + 1, keys that they may see) of each block of queries: one block unless the mask is causal over as many keys as queries."""
    blocks = max(1, min(CAUSAL_BLOCKS, length // SHORTEST_BLOCK)) if causal and length == keys else 1
    bounds = [length * i // blocks for i in range(blocks)] + [length]
    return [(start, stop, stop if blocks > 1 else keys) for start, stop in zip(bounds, bounds[1:])]


def attend(q_bthd, k_bskd, v_bskd, mask_bts, *, scale: float, softcap: float | None = None, causal: bool = False):
    """Grouped-query attention, head h reading key-value head h // (heads / kv_heads).

    q [batch, length, heads, head_dim], k and v [batch, keys, kv_heads, head_dim], mask bool [batch, length, keys] -> [batch, length, heads, head_dim].
    Scores in the input dtype, softmax in at least float32, probabilities back in the input dtype (`eager_attention_forward` of transformers). A query that sees
    nothing (padding) gets a finite value. causal: the mask hides every key in a later row than the query's when there are as many keys as queries; long calls
    then leave out blocks that the mask hides whole.
    """
    parts = [
        _attend(q_bthd[:, start:stop], k_bskd[:, :seen], v_bskd[:, :seen], mask_bts[:, start:stop, :seen], scale, softcap)
        for start, stop, seen in _causal_blocks(q_bthd.shape[1], k_bskd.shape[1], causal)
    ]
    return tag(parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1), "attn")


def _attend(q_bthd, k_bskd, v_bskd, mask_bts, scale, softcap):
    batch, length, heads, head_dim = q_bthd.shape
    keys, kv_heads = k_bskd.shape[1:3]
    # The queries of one key-value head as rows of one matrix: two plain batched products, twice as fast on CPU as the five-axis contraction.
    q_bkmd = q_bthd.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkmd,bksd->bkms", q_bkmd, k_bskd.transpose(0, 2, 1, 3)) * constant(scale, q_bthd.dtype)
    if softcap is not None:
        scores = jnp.tanh(scores / constant(softcap, scores.dtype)) * constant(softcap, scores.dtype)
    scores = widen(scores).reshape(batch, kv_heads, -1, length, keys)
    scores = jnp.where(mask_bts[:, None, None], scores, constant(jnp.finfo(scores.dtype).min, scores.dtype))
    probabilities = jax.nn.softmax(scores, -1).astype(v_bskd.dtype).reshape(batch, kv_heads, -1, keys)
    out = jnp.einsum("bkms,bksd->bkmd", probabilities, v_bskd.transpose(0, 2, 1, 3))
    out = out.reshape(batch, kv_heads, -1, length, v_bskd.shape[-1]).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)


def eager_attention(q_bhtd, k_bksd, v_bksd, mask, *, scaling: float, softcap: float | None = None, sinks=None, causal: bool = False):
    """`eager_attention_forward` of transformers: grouped-query attention with an additive mask, head h reading key-value head h // (heads / kv_heads).

    q [batch, heads, length, head_dim], k and v [batch, kv_heads, keys, head_dim], mask [batch, 1 or heads, length, keys] or None -> [batch, length, heads,
    head_dim]. Scores in the input dtype (numbers multiply in at least float32, as in torch), softmax in at least float32, probabilities back in the input
    dtype. sinks: [heads], one further logit per head that takes part in the softmax and is dropped after it (in `gpt_oss`' order of rounding: the maximum is
    taken off before the softmax). causal: as for `attend`.
    """
    blocks = _causal_blocks(q_bhtd.shape[2], k_bksd.shape[2], causal)
    parts = []
    for start, stop, seen in blocks:
        part_mask = mask[:, :, start:stop, :seen] if len(blocks) > 1 and mask is not None else mask
        parts.append(_eager(q_bhtd[:, :, start:stop], k_bksd[:, :, :seen], v_bksd[:, :, :seen], part_mask, scaling, softcap, sinks))
    return tag(parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1), "attn")


def _eager(q_bhtd, k_bksd, v_bksd, mask, scaling, softcap, sinks):
    batch, heads, length, head_dim = q_bhtd.shape
    kv_heads, keys = k_bksd.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, length)
    scores = scaled(jnp.einsum("bkmd,bksd->bkms", q_bhtd.reshape(batch, kv_heads, -1, head_dim), k_bksd), scaling)
    if softcap is not None:
        wide = widen(scores)
        scores = scaled(jnp.tanh((wide / constant(softcap, wide.dtype)).astype(scores.dtype)), softcap)
    scores = scores.reshape(*grouped, keys)
    if mask is not None:
        scores = scores + (mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(mask.shape[0], *grouped[1:3], *mask.shape[2:])).astype(scores.dtype)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(scores.dtype).reshape(1, kv_heads, -1, 1, 1), (*grouped, 1))
        scores = jnp.concatenate([scores, column], -1)
        scores = scores - jnp.max(scores, -1, keepdims=True)
    probabilities = jax.nn.softmax(widen(scores), -1).astype(v_bksd.dtype)
    out = jnp.einsum("bkms,bksd->bkmd", probabilities[..., :keys].reshape(batch, kv_heads, -1, keys), v_bksd)
    return out.reshape(batch, heads, length, -1).swapaxes(1, 2)
