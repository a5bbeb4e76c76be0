"""What travels when experts live on different devices: tokens go out to them, results come home; weights stay. Used inside `shard_map`."""

import contextlib
import contextvars
import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

EXPERT_AXES = ("fsdp", "expert")
"""The mesh axes that experts are cut over, in the one order that specs, indices and collectives share."""

TOKEN_AXES = ("data", *EXPERT_AXES)
"""The mesh axes that tokens are cut over between mixtures."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The mesh as a mixture's body sees it inside `shard_map`.

    sizes: (axis, size) of the mesh. experts: the axes that the experts are cut over, in the weights' own order. gathered: the axes of EXPERT_AXES that tokens
    are cut over and that some weight is cut over too, so that every token must visit all of their devices; empty where tokens are on every device already.
    """

    sizes: tuple[tuple[str, int], ...]
    experts: tuple[str, ...]
    gathered: tuple[str, ...]

    def shards(self, axes) -> int:
        return math.prod(dict(self.sizes)[axis] for axis in axes)

    def index(self, axes):
        """This device's number along `axes`, int32."""
        return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)

    def gather(self, tokens):
        """[tokens here, ...] -> [tokens of all gathered axes, ...]."""
        return jax.lax.all_gather(tokens, self.gathered, axis=0, tiled=True) if self.gathered else tokens

    def columns(self, rows, axes):
        """This device's part of the last axis, cut over `axes`."""
        width = rows.shape[-1] // self.shards(axes)
        return jax.lax.dynamic_slice_in_dim(rows, self.index(axes) * width, width, axis=-1)

    def home(self, x, partial, columns):
        """[gathered tokens, hidden] -> [tokens here, hidden] of whole results.

        partial: the axes along which devices hold parts of a sum. columns: those along which they hold parts of the last axis.
        """
        if not self.gathered:
            x = jax.lax.psum(x, partial) if partial else x
            return jax.lax.all_gather(x, columns, axis=1, tiled=True) if columns else x
        if set(self.gathered) <= set(partial):
            x = jax.lax.psum_scatter(x, self.gathered, scatter_dimension=0, tiled=True)
        else:
            x = x.reshape(*(self.shards((axis,)) for axis in self.gathered), -1, x.shape[-1])
            for dim, axis in reversed(list(enumerate(self.gathered))):
                if axis in partial:
                    x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim)
                elif axis in columns:
                    x = jnp.squeeze(jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=x.ndim - 1, tiled=True), dim)
                else:
                    x = jax.lax.dynamic_index_in_dim(x, self.index((axis,)), dim, keepdims=False)
        rest = tuple(axis for axis in partial if axis not in self.gathered)
        return jax.lax.psum(x, rest) if rest else x


_current: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


def current_exchange() -> Exchange | None:
    """The exchange of the mixture whose body is being traced; None where all experts are here."""
    return _current.get()


@contextlib.contextmanager
def exchanging(exchange: Exchange):
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def stored_spec(variable: nnx.Variable) -> PartitionSpec:
    """The spec that a variable was placed with, without the axis of the layers where it is one layer of a stack: one entry per dimension."""
    spec = tuple(variable.get_metadata("out_sharding", None) or ())
    rank = variable.get_raw_value().ndim
    spec = spec[len(spec) - rank :] if len(spec) > rank else spec + (None,) * (rank - len(spec))
    return PartitionSpec(*spec)
