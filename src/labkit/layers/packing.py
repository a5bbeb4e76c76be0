"""Packed rows in decoders that carry a state along the row: a mask keeps segments apart for attention, not for a state, so segments run in turn."""

import functools

import jax
import jax.numpy as jnp


def apart_when_packed(call):
    """A decoder's `__call__` in which no segment sees the state that the one before it left behind.

    Each segment of a row but the first is run as if it stood at the row's start; what comes out is put back to its place. The work is that of one call per
    segment of the fullest row, whatever their lengths, and calls without segment_ids, with a cache or of one token are as they were. Logits [batch, length,
    vocab]; of what `return_aux` gives, arrays with an axis of tokens are put together by token, all others are means over tokens and are weighted by them.
    """

    @functools.wraps(call)
    def run(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, **options):
        batch, length = tokens.shape
        if segment_ids is None or cache is not None or length == 1:
            return call(self, tokens, positions, segment_ids, cache, return_aux, **options)
        index, starts = _segments(jnp.asarray(segment_ids, jnp.int32))
        columns = jnp.arange(length, dtype=jnp.int32)[None]
        total = jnp.maximum(jnp.sum(index >= 0), 1)

        def one(segment):
            """The call's outputs with only this segment in each row, by the tokens' own places; zero elsewhere."""
            start = jnp.take_along_axis(starts, jnp.broadcast_to(segment, (batch, 1)), 1)
            there, back = (columns + start) % length, (columns - start) % length
            member = index == segment
            move = lambda rows, places: jnp.take_along_axis(rows, places, 1)
            moved = move(member, there).astype(jnp.int32)
            out = call(self, move(tokens, there), None if positions is None else move(jnp.asarray(positions), there), moved, None, return_aux, **options)
            share = jnp.sum(member) / total
            return jax.tree.map(lambda leaf: _home(leaf, back, member, share), out)

        shapes = jax.eval_shape(one, jnp.zeros((), jnp.int32))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def step(sums, segment):
            # The backward pass computes each segment anew: nothing is kept for the many numbers of segments that a row could have and does not.
            some = jax.checkpoint(lambda segment: jax.lax.cond(segment <= jnp.max(index), one, lambda _: zeros, segment))(segment)
            return jax.tree.map(jnp.add, sums, some), None

        return jax.lax.scan(step, zeros, jnp.arange(length, dtype=jnp.int32))[0]

    return run


def _segments(segment_ids):
    """(index, starts), int32 [batch, length] each: the number of each token's segment in its row from 0, -1 in padding; where segment number i begins, 0 for
    the first, whose left padding stays before it, and for numbers that the row does not have."""
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    real = segment_ids != 0
    begins = real & (segment_ids != before)
    number = jnp.cumsum(begins, 1, dtype=jnp.int32) - 1
    length = segment_ids.shape[1]
    places = jnp.where(begins & (number > 0), number, length)
    rows = jnp.arange(segment_ids.shape[0], dtype=jnp.int32)[:, None]
    starts = jnp.zeros_like(segment_ids).at[rows, places].set(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), places.shape), mode="drop")
    return jnp.where(real, number, -1), starts


def _home(leaf, back, member, share):
    """One output at its tokens' own places and zero elsewhere; a mean over tokens by its share of them."""
    batch, length = member.shape
    pairs = [axis for axis in range(leaf.ndim - 1) if leaf.shape[axis : axis + 2] == (batch, length)]
    flat = [axis for axis in range(leaf.ndim) if leaf.shape[axis] == batch * length]
    if not pairs and not flat:
        return leaf * share.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
    axis = pairs[0] if pairs else flat[0]
    rest = leaf.shape[axis + 2 :] if pairs else leaf.shape[axis + 1 :]
    rows = leaf.reshape(*leaf.shape[:axis], batch, length, *rest)
    lead, trail = (1,) * axis, (1,) * len(rest)
    rows = jnp.take_along_axis(rows, back.reshape(*lead, batch, length, *trail), axis + 1)
    return jnp.where(member.reshape(*lead, batch, length, *trail), rows, jnp.zeros((), leaf.dtype)).reshape(leaf.shape)
