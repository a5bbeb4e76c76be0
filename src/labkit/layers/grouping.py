"""A mixture's expert loop as grouped products: tokens sorted by expert, each step over all rows at once. Dropless."""

import dataclasses

import jax
import jax.numpy as jnp

from labkit.layers.moe import expert_block, grouped_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ExpertGroups:
    """Rows are (token, choice) pairs sorted by expert, tokens in order within one.

    order: int32 [rows], the pair (token x top_k + choice) of each row. experts: int32 [rows]. sizes: int32 [experts]. places: int32 [tokens, top_k], the rows
    of each token, by ascending expert. block: rows per block of a product.
    """

    order: jax.Array
    experts: jax.Array
    sizes: jax.Array
    places: jax.Array
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def top_k(self) -> int:
        return self.places.shape[1]

    @property
    def num_experts(self) -> int:
        return self.sizes.shape[0]

    def rows(self, x):
        """[tokens, ...] -> [rows, ...]: each token once per choice, by expert."""
        return x[self.order // self.top_k]

    def linear(self, rows, w):
        """Row times its expert's matrix as `torch.nn.functional.linear` takes it: [rows, in], [experts, out, in] -> [rows, out]; zero for
        experts past the last matrix."""
        return grouped_matmul(rows, self.sizes[: w.shape[0]], w, self.block, transposed=True)

    def matmul(self, rows, w):
        """Row times its expert's matrix: [rows, in], [experts, in, out] -> [rows, out]."""
        return grouped_matmul(rows, self.sizes[: w.shape[0]], w, self.block)

    def expert(self, w) -> "ExpertMatrix":
        """Each row's own matrix of w [experts, in, out], for products: `rows @ groups.expert(w)`."""
        return ExpertMatrix(self, w)

    def take(self, b):
        """[experts, ...] -> [rows, ...]: what each row's expert holds, a bias for example."""
        return b[jnp.minimum(self.experts, self.num_experts - 1)]

    def weights(self, top_k_weights):
        """[tokens, top_k] -> [rows, 1]."""
        return top_k_weights.reshape(-1)[self.order][:, None]

    def sum(self, rows):
        """[rows, ...] -> [tokens, ...]: each token's rows added up by ascending expert, as the reference's loop adds them. Rows of no expert count as zero."""
        mine = (self.experts < self.num_experts).reshape(-1, *[1] * (rows.ndim - 1))
        picked = jnp.where(mine, rows, jnp.zeros((), rows.dtype))[self.places]
        total = picked[:, 0]
        for choice in range(1, self.top_k):
            total = total + picked[:, choice]
        return total


@dataclasses.dataclass(frozen=True)
class ExpertMatrix:
    """The matrix of a row's expert, where code is written for one expert: takes part in products and can be transposed."""

    groups: ExpertGroups
    w: jax.Array
    transposed: bool = False

    def __rmatmul__(self, rows):
        return self.groups.linear(rows, self.w) if self.transposed else self.groups.matmul(rows, self.w)

    @property
    def T(self) -> "ExpertMatrix":
        return dataclasses.replace(self, transposed=not self.transposed)

    def swapaxes(self, axis1: int, axis2: int) -> "ExpertMatrix":
        return self.T


def linear_by_counts(rows, counts, w):
    """[rows, in] that lie by expert, `counts` int [experts] of each, times the expert's matrix of w [experts, out, in] -> [rows, out]."""
    return grouped_matmul(rows, counts, w, expert_block(rows.shape[0], 1, w.shape[0]), transposed=True)


def group_tokens(top_k_index, num_experts: int) -> ExpertGroups:
    """top_k_index: int [tokens, top_k], the experts of each token; `num_experts` or more: none. -> groups of tokens x top_k rows."""
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
    places = jnp.sort(row_of.reshape(tokens, top_k), axis=1)
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    return ExpertGroups(order, flat[order], sizes, places, expert_block(tokens, top_k, num_experts))
