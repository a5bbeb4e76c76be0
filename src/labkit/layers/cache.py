"""The explicit cache: a pytree that a call takes and returns. Nothing in a model remembers a token."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """Keys and values of one layer, or of a stack of layers.

    key, value: [(layers,) batch, capacity, kv_heads, head_dim]. Slots are written in order; how many is known to the `DecoderCache` around it.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def empty(cls, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype) -> "KVCache":
        shape = (layers, batch, capacity, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, key_bthd, value_bthd, start) -> "KVCache":
        """The cache with `length` new entries from slot `start` on (a traced scalar)."""
        zero = jnp.zeros_like(start)
        at = (zero, start, zero, zero)
        return KVCache(jax.lax.dynamic_update_slice(self.key, key_bthd, at), jax.lax.dynamic_update_slice(self.value, value_bthd, at))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DecoderCache:
    """All layers' caches, and what the next call must know of the tokens so far.

    layers: one entry per stacked module of the plan, each with a leading layer axis. segment_ids: int32 [batch, capacity], 0 in padding and in slots not
    yet written.
    next_position: int32 [batch], the position that the next token of each row gets. length: int32 scalar, slots written so far.
    """

    layers: list
    segment_ids: jax.Array
    next_position: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, layers: list, batch: int, capacity: int) -> "DecoderCache":
        return cls(layers, jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32), jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.segment_ids.shape[1]
