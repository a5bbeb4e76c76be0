"""A mixture's expert loop as grouped products: tokens sorted by expert, each step over all rows at once. Dropless."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.grouped_product import grouped_matmul, mean_rows
from labkit.layers.token_exchange import EXPERT_AXES, Exchange, axes_of, current_exchange, stored_spec
from labkit.layers.variables import value


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ExpertGroups:
    """Rows are (token, choice) pairs sorted by expert, tokens in order within one. On a mesh: all tokens that this device's experts may get, its own experts
    first, then the rows of experts elsewhere, which count as rows of no expert.

    order: int32 [rows], the pair (token x top_k + choice) of each row. experts: int32 [rows]. sizes: int32 [experts]. places: int32 [tokens, top_k], the rows
    of each token, by ascending expert. mean: rows of an expert at balanced load. exchange: how tokens come and go; None where all experts are here.
    """

    order: jax.Array
    experts: jax.Array
    sizes: jax.Array
    places: jax.Array
    mean: int = dataclasses.field(metadata={"static": True})
    exchange: Exchange | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def top_k(self) -> int:
        return self.places.shape[1]

    @property
    def num_experts(self) -> int:
        return self.sizes.shape[0]

    def rows(self, x):
        """[tokens, ...] -> [rows, ...]: each token once per choice, by expert."""
        return self._all(x)[self.order // self.top_k]

    def linear(self, rows, w, interleaved: bool = False):
        """Row times its expert's matrix as `torch.nn.functional.linear` takes it: [rows, in], [experts, out, in] -> [rows, out]; zero for
        experts past the last matrix. [experts, 2, half, in] gives both halves of out = 2 x half, interleaved: element by element in turn."""
        return self._product(rows, w, interleaved, transposed=True)

    def matmul(self, rows, w, interleaved: bool = False):
        """Row times its expert's matrix: [rows, in], [experts, in, out] or [experts, in, 2, half] -> [rows, out]; otherwise as `linear`."""
        return self._product(rows, w, interleaved, transposed=False)

    def expert(self, w) -> "ExpertMatrix":
        """Each row's own matrix of w [experts, in, out], for products: `rows @ groups.expert(w)`."""
        return ExpertMatrix(self, w)

    def take(self, b, interleaved: bool = False):
        """[experts, ...] -> [rows, ...]: what each row's expert holds, a bias for example; [experts, 2, half] as in `linear`."""
        b = value(b)
        rows = b[jnp.minimum(self.experts, self.num_experts - 1)]
        return rows if rows.ndim < 3 else _flat(rows, interleaved)

    def weights(self, top_k_weights):
        """[tokens, top_k] -> [rows, 1]."""
        return self._all(top_k_weights).reshape(-1)[self.order][:, None]

    def sum(self, rows):
        """[rows, ...] -> [tokens, ...]: each token's rows added up by ascending expert, as the reference's loop adds them. Rows of no expert count as zero."""
        partial, columns = (rows.partial, rows.columns) if isinstance(rows, PartialRows) else ((), ())
        rows = rows.local if isinstance(rows, PartialRows) else rows
        mine = (self.experts < self.num_experts).reshape(-1, *[1] * (rows.ndim - 1))
        picked = jnp.where(mine, rows, jnp.zeros((), rows.dtype))[self.places]
        total = picked[:, 0]
        for choice in range(1, self.top_k):
            total = total + picked[:, choice]
        return total if self.exchange is None else self.exchange.home(total, (*self.exchange.experts, *partial), columns)

    def _all(self, x):
        return x if self.exchange is None else self.exchange.gather(x)

    def _product(self, rows, w, interleaved: bool, transposed: bool):
        """The product with this device's part of the matrices. Where it has a part of their input, rows that are whole give it their columns, and the sum over
        devices follows at once; rows that are cut the same way give partial sums, which are added up at the end."""
        matrices = value(w)
        matrices = matrices.astype(rows.dtype) if isinstance(w, nnx.Variable) and w.get_metadata("compute_dtype", None) is None else matrices
        halves = matrices.ndim == 4
        flat = matrices.reshape(matrices.shape[0], -1, matrices.shape[-1]) if transposed else matrices.reshape(*matrices.shape[:2], -1)
        inner, outer = self._cuts(w, matrices.ndim, transposed)
        width, partial = flat.shape[2 if transposed else 1], inner
        if self.exchange is not None and rows.shape[-1] == width * self.exchange.shards(inner) and inner:
            rows, partial = self.exchange.columns(rows, inner), ()
        if rows.shape[-1] != width:
            raise ValueError(f"rows of width {rows.shape[-1]} meet experts of input width {width}, cut over {inner or 'no axis'}")
        out = grouped_matmul(rows, self.sizes[: flat.shape[0]], flat, self.mean, transposed)
        if inner and not partial:
            out = jax.lax.psum(out, inner)
        if halves:
            out = _flat(out.reshape(out.shape[0], 2, -1), interleaved)
        columns = tuple(axis for axis in outer if axis in EXPERT_AXES)
        return PartialRows(out, partial, columns, self.exchange) if partial or columns else out

    def _cuts(self, w, rank: int, transposed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes that the matrices' input and output are cut over."""
        if self.exchange is None:
            return (), ()
        if not isinstance(w, nnx.Variable):
            raise TypeError("experts on a mesh are given as variables, which know how they are cut")
        spec = stored_spec(w)
        sizes = dict(self.exchange.sizes)
        cut = [tuple(axis for axis in axes_of(entry) if sizes[axis] > 1) for entry in spec]
        inner = rank - 1 if transposed else 1
        return cut[inner], tuple(axis for dim in range(1, rank) if dim != inner for axis in cut[dim])


def _flat(rows, interleaved: bool):
    """[rows, 2, half] -> [rows, 2 x half]: one half after the other, or element by element in turn."""
    return (rows.swapaxes(1, 2) if interleaved else rows).reshape(rows.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class PartialRows:
    """Rows [rows, hidden] of which this device has a part: of the sum, along `partial`, or of the columns, along `columns`. Scaling, casting and adding what
    every device has go on with the part; anything else takes the whole rows."""

    local: jax.Array
    partial: tuple[str, ...]
    columns: tuple[str, ...]
    exchange: Exchange

    @property
    def dtype(self):
        return self.local.dtype

    def astype(self, dtype) -> "PartialRows":
        return dataclasses.replace(self, local=self.local.astype(dtype))

    def __mul__(self, weights) -> "PartialRows":
        """Times [rows, 1]."""
        return dataclasses.replace(self, local=self.local * weights)

    __rmul__ = __mul__

    def __add__(self, rows) -> "PartialRows":
        """Plus rows that the devices along `partial` have alike: one of them adds."""
        first = self.exchange.index(self.partial) == 0
        return dataclasses.replace(self, local=self.local + jnp.where(first, rows, jnp.zeros((), rows.dtype)))

    __radd__ = __add__

    def __jax_array__(self):
        whole = jax.lax.psum(self.local, self.partial) if self.partial else self.local
        return jax.lax.all_gather(whole, self.columns, axis=1, tiled=True) if self.columns else whole


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
    return grouped_matmul(rows, counts, w, mean_rows(rows.shape[0], 1, w.shape[0]), transposed=True)


def group_tokens(top_k_index, experts) -> ExpertGroups:
    """Groups of tokens x top_k rows.

    top_k_index: int [tokens, top_k], the experts of each token; as many as there are, or more: none. experts: their number, or their weights [experts, ...].
    """
    count, exchange = experts if isinstance(experts, int) else experts.shape[0], current_exchange()
    chosen = top_k_index.astype(jnp.int32)
    if exchange is not None:
        chosen = exchange.gather(chosen) - exchange.index(exchange.experts).astype(jnp.int32) * count
        chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
    tokens, top_k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
    places = jnp.sort(row_of.reshape(tokens, top_k), axis=1)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    shards = 1 if exchange is None else exchange.shards(exchange.experts)
    return ExpertGroups(order, flat[order], sizes, places, mean_rows(tokens, top_k, count * shards), exchange)
