"""Mixture dispatch: tokens sorted by expert, one grouped product per projection, and the way back. Dropless."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def grouped_matmul(rows, group_sizes, weights, block: int, transposed: bool = False):
    """Row i of [rows, in] times the [in, out] matrix of the group it lies in; rows sorted by group, group_sizes int [groups] summing to at most rows.

    transposed: weights are [groups, out, in].

    Rows past the last group come out as zero. On TPU this is `ragged_dot`. Elsewhere, where XLA would lower that to a product with every expert, groups are cut
    into blocks of `block` rows and each block meets its own matrix only.
    """

    def ragged(rows, group_sizes, weights):
        out = jax.lax.ragged_dot(rows, weights.swapaxes(1, 2) if transposed else weights, group_sizes)
        return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(group_sizes))[:, None], out, jnp.zeros((), out.dtype))

    def blocked(rows, group_sizes, weights):
        return _blocked_matmul(rows, group_sizes, weights, block, transposed)

    return jax.lax.platform_dependent(rows, group_sizes, weights, tpu=ragged, default=blocked)


@functools.partial(jax.jit, static_argnames=("block", "transposed"))  # compiled once when a capture runs the model eagerly
def _blocked_matmul(rows, group_sizes, weights, block: int, transposed: bool = False):
    count, groups, width = rows.shape[0], weights.shape[0], weights.shape[1 if transposed else 2]
    blocks = min(count, -(-count // block) + groups)
    starts = jnp.cumsum(group_sizes) - group_sizes
    blocks_before = jnp.cumsum(-(-group_sizes // block))
    index = jnp.arange(blocks, dtype=group_sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(blocks_before, index, side="right"), groups - 1)
    first = starts[group] + (index - (blocks_before - (-(-group_sizes // block)))[group]) * block
    row = first[:, None] + jnp.arange(block, dtype=first.dtype)
    valid = (index < blocks_before[-1])[:, None] & (row < (starts + group_sizes)[group][:, None])
    gathered = jnp.where(valid[..., None], rows[jnp.minimum(row, count - 1)], jnp.zeros((), rows.dtype))
    product = lambda pair: pair[0] @ (weights[pair[1]].T if transposed else weights[pair[1]])
    products = jax.lax.map(product, (gathered, group))
    target = jnp.where(valid, row, count)
    return jnp.zeros((count, width), rows.dtype).at[target.reshape(-1)].set(products.reshape(-1, width), mode="drop")


def expert_block(tokens: int, top_k: int, experts: int) -> int:
    """Rows per block: the mean group size as a power of two, between 1 and 128."""
    mean = max(1, tokens * top_k // experts)
    return int(min(128, 2 ** int(np.log2(mean))))


def apply_experts(x_th, indices_tk, weights_tk, gate_up_proj, down_proj, activation):
    """The sum over each token's chosen experts of weight x down(activation(gate(x)) * up(x)).

    x [tokens, hidden], indices int [tokens, top_k], weights [tokens, top_k], gate_up_proj [experts, hidden, 2, intermediate] (gate first), down_proj
    [experts, intermediate, hidden] -> [tokens, hidden].
    """
    tokens, top_k = indices_tk.shape
    experts, hidden, _, intermediate = gate_up_proj.shape
    flat = indices_tk.reshape(-1)
    order = jnp.argsort(flat)
    group_sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    block = expert_block(tokens, top_k, experts)
    rows = x_th[order // top_k]
    gate_up = grouped_matmul(rows, group_sizes, gate_up_proj.reshape(experts, hidden, 2 * intermediate), block)
    gate, up = jnp.split(gate_up, 2, -1)
    down = grouped_matmul(activation(gate) * up, group_sizes, down_proj, block)
    unsorted = jnp.zeros_like(down).at[order].set(down).reshape(tokens, top_k, hidden)
    return jnp.sum(unsorted * weights_tk[..., None].astype(down.dtype), 1)


def routing_statistics(probabilities_te, indices_tk, counted_t):
    """What the load-balancing loss needs of one layer: tokens_per_expert and router_probability, each [experts], means over counted tokens.

    probabilities [tokens, experts], indices int [tokens, top_k], counted bool [tokens] (False for padding).
    """
    counted = counted_t.astype(probabilities_te.dtype)
    total = jnp.maximum(jnp.sum(counted), jnp.ones((), counted.dtype))
    chosen = jax.nn.one_hot(indices_tk, probabilities_te.shape[-1], dtype=counted.dtype).sum(1)
    return {
        "tokens_per_expert": (chosen * counted[:, None]).sum(0) / total,
        "router_probability": (probabilities_te * counted[:, None]).sum(0) / total,
    }
