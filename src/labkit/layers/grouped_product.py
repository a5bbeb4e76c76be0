"""The grouped product: each row times the matrix of the group it lies in. `ragged_dot` on TPU, rows per group elsewhere; one rule for gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers, ragged_dot_general

from labkit.layers.precision import wide_dtype

_PLAIN = RaggedDotDimensionNumbers(dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_TRANSPOSED = RaggedDotDimensionNumbers(dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])

MOST_ROWS = 1024
"""Rows per step of a weight gradient on TPU: enough for the matrix unit to take longer than reading and writing the float32 sum of a large expert."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(rows, group_sizes, weights, mean: int, transposed: bool = False):
    """Row i of [rows, in] times the [in, out] matrix of the group it lies in; rows sorted by group, group_sizes int [groups] summing to at most rows.

    mean: rows of a group at balanced load. transposed: weights are [groups, out, in].

    Rows past the last group come out as zero, and nothing of them reaches a gradient. On TPU this is `ragged_dot` with those rows masked before and after:
    there its own gradient leaves them unspecified. Elsewhere, where XLA would lower that to a product with every expert, the first rows of all groups are one
    batched product, a little more of them than a balanced load has, and what groups have beyond that is cut into blocks of which each meets its own matrix.
    The gradient of the weights goes by blocks on TPU too: the compiler lowers a `ragged_dot` over the rows to a product with all of them for every group.
    """

    def ragged(rows, group_sizes, weights):
        return _mask_tail(ragged_dot_general(_mask_tail(rows, group_sizes), weights, group_sizes, _TRANSPOSED if transposed else _PLAIN), group_sizes)

    def by_group(rows, group_sizes, weights):
        return _group_matmul(rows, group_sizes, weights, first_rows(mean), expert_block(mean), transposed)

    return jax.lax.platform_dependent(rows, group_sizes, weights, tpu=ragged, default=by_group)


def _forward(rows, group_sizes, weights, mean, transposed):
    return grouped_matmul(rows, group_sizes, weights, mean, transposed), (rows, group_sizes, weights)


def _backward(mean, transposed, kept, cotangent):
    rows, group_sizes, weights = kept
    return grouped_matmul(cotangent, group_sizes, weights, mean, not transposed), None, _outer(rows, cotangent, group_sizes, weights.dtype, mean, transposed)


grouped_matmul.defvjp(_forward, _backward)


def _outer(rows, cotangent, group_sizes, dtype, mean: int, transposed: bool):
    """The gradient of the weights: rows^T @ cotangent of each group (its transpose when transposed)."""
    left, right = (cotangent, rows) if transposed else (rows, cotangent)

    def on_tpu(left, right, group_sizes):
        steps = -(-mean // MOST_ROWS)
        return _blocked_outer(left, right, group_sizes, -(-mean // (8 * steps)) * 8, dtype, steps)

    def elsewhere(left, right, group_sizes):
        return _group_outer(left, right, group_sizes, first_rows(mean), expert_block(mean), dtype)

    return jax.lax.platform_dependent(left, right, group_sizes, tpu=on_tpu, default=elsewhere)


def _mask_tail(rows, group_sizes):
    valid = jnp.arange(rows.shape[0], dtype=group_sizes.dtype) < jnp.sum(group_sizes, dtype=group_sizes.dtype)
    return jnp.where(valid[:, None], rows, jnp.zeros((), rows.dtype))


def _blocks(group_sizes, count: int, first: int, block: int):
    """(how many blocks the rows after each group's `first` take, group of each block, its first row, its rows); room for the most there can be."""
    rest = jnp.maximum(group_sizes - first, 0)
    most = min(count, count // block + group_sizes.shape[0])
    per_group = -(-rest // block)
    before = jnp.cumsum(per_group, dtype=group_sizes.dtype)
    index = jnp.arange(most, dtype=group_sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(before, index, side="right"), group_sizes.shape[0] - 1).astype(group_sizes.dtype)
    within = (index - (before - per_group)[group]) * block
    return before[-1], group, _starts(group_sizes)[group] + first + within, rest[group] - within


def _starts(group_sizes):
    return jnp.cumsum(group_sizes, dtype=group_sizes.dtype) - group_sizes


def _first(rows, group_sizes, first: int):
    """[groups, first, ...]: the first rows of each group, zeros where it has fewer."""
    place = jnp.arange(first, dtype=group_sizes.dtype)
    index = jnp.where(place < group_sizes[:, None], _starts(group_sizes)[:, None] + place, rows.shape[0])
    return jnp.pad(rows, ((0, 1), (0, 0)))[index]


@functools.partial(jax.jit, static_argnames=("first", "block", "transposed"))  # compiled once when a capture runs the model eagerly
def _group_matmul(rows, group_sizes, weights, first: int, block: int, transposed: bool = False):
    """The first rows of all groups at once, then blocks of what is left of each."""
    count, width = rows.shape[0], weights.shape[1 if transposed else 2]
    out = jnp.zeros((count + block, width), rows.dtype)
    if first:
        product = jnp.einsum("gbi,goi->gbo" if transposed else "gbi,gio->gbo", _first(rows, group_sizes, first), weights).reshape(-1, width)
        group = jnp.repeat(jnp.arange(group_sizes.shape[0], dtype=group_sizes.dtype), group_sizes, total_repeat_length=count)
        place = jnp.arange(count, dtype=group_sizes.dtype) - _starts(group_sizes)[group]
        out = jnp.pad(product[group * first + jnp.minimum(place, first - 1)], ((0, block), (0, 0)))
    used, group, start, size = _blocks(group_sizes, count, first, block)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def step(i, out):
        w = jax.lax.dynamic_index_in_dim(weights, group[i], keepdims=False)
        product = jax.lax.dynamic_slice_in_dim(padded, start[i], block) @ (w.T if transposed else w)
        mine = (jnp.arange(block, dtype=size.dtype) < size[i])[:, None]
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, product, jax.lax.dynamic_slice_in_dim(out, start[i], block)), start[i], 0)

    return _mask_tail(jax.lax.fori_loop(jnp.zeros((), used.dtype), used, step, out)[:count], group_sizes)


@functools.partial(jax.jit, static_argnames=("first", "block", "dtype"))
def _group_outer(left, right, group_sizes, first: int, block: int, dtype):
    """left^T @ right of each group: [rows, m], [rows, n] -> [groups, m, n], added up in at least float32; as `_group_matmul`."""
    wide, shape = wide_dtype(left.dtype), (group_sizes.shape[0], left.shape[1], right.shape[1])
    total = jnp.zeros(shape, wide)
    if first:
        total = jnp.einsum("gbm,gbn->gmn", _first(left, group_sizes, first), _first(right, group_sizes, first), preferred_element_type=wide)
    used, group, start, size = _blocks(group_sizes, left.shape[0], first, block)
    left, right = (jnp.pad(array, ((0, block), (0, 0))) for array in (left, right))

    def step(i, total):
        mine = jnp.where(
            (jnp.arange(block, dtype=size.dtype) < size[i])[:, None], jax.lax.dynamic_slice_in_dim(left, start[i], block), jnp.zeros((), left.dtype)
        )
        product = jnp.matmul(mine.T, jax.lax.dynamic_slice_in_dim(right, start[i], block), preferred_element_type=wide)
        return jax.lax.dynamic_update_index_in_dim(total, jax.lax.dynamic_index_in_dim(total, group[i], keepdims=False) + product, group[i], 0)

    return jax.lax.fori_loop(jnp.zeros((), used.dtype), used, step, total).astype(dtype)


@functools.partial(jax.jit, static_argnames=("block", "dtype", "steps"))
def _blocked_outer(left, right, group_sizes, block: int, dtype, steps: int):
    """left^T @ right of each group: [rows, m], [rows, n] -> [groups, m, n], added up in at least float32. steps: blocks of a group at balanced load, which
    the loop's name says for those who count operations (`scale/hlo_flow.EXPECTED`)."""
    wide = wide_dtype(left.dtype)
    left, right = (jnp.pad(array, ((0, block), (0, 0))) for array in (left, right))

    def group(_, start_and_size):
        start, size = start_and_size

        def step(i, total):
            first = start + i * block
            row = i * block + jnp.arange(block, dtype=size.dtype)
            mine = jnp.where((row < size)[:, None], jax.lax.dynamic_slice_in_dim(left, first, block), jnp.zeros((), left.dtype))
            return total + jnp.matmul(mine.T, jax.lax.dynamic_slice_in_dim(right, first, block), preferred_element_type=wide)

        with jax.named_scope(f"about_{steps}_times"):
            total = jax.lax.fori_loop(jnp.zeros((), size.dtype), -(-size // block), step, jnp.zeros((left.shape[1], right.shape[1]), wide))
        return None, total.astype(dtype)

    return jax.lax.scan(group, None, (_starts(group_sizes), group_sizes))[1]


def mean_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of an expert at balanced load, at least 1."""
    return max(1, tokens * top_k // experts)


def first_rows(mean: int) -> int:
    """Rows of each group that one batched product takes off TPU: what nearly every group has when rows fall on groups by chance; 0 where groups are so small
    that many would be empty."""
    return -(-int(mean + 2 * np.sqrt(mean)) // 8) * 8 if mean >= 8 else 0


def expert_block(mean: int) -> int:
    """Rows per block off TPU: `mean` as a power of two, between 1 and 128."""
    return int(min(128, 2 ** int(np.log2(mean))))
