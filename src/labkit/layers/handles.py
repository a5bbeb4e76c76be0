"""What a layer of a translated decoder sees of the cache: `transformers.Cache` without a layer index, over an explicit state."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class StateShapes:
    """Stands in for a cache in the call that finds out what each layer keeps. found: (segment, position) or a layer's name -> state name -> shape, dtype."""

    batch: int
    capacity: int
    found: dict = dataclasses.field(default_factory=dict)


class LayerHandle:
    """One layer's part of the cache during one call.

    call: the `DecoderCall`. state: name -> array, or None without a cache. place: where the layer stands (a key of `StateShapes.found`). layer_idx: Hugging
    Face's index of the layer, in a stack that of its first layer, which stands for all. index: int32 scalar, the layer's own index also within a scan.
    """

    def __init__(self, call, state: dict | None, place, layer_idx: int | None = None, index=None, prefix: str = ""):
        self.call, self.state, self.place, self.layer_idx, self.index = call, state, place, layer_idx, index
        self._prefix, self._counts, self._new = prefix, {}, {}

    @property
    def tokens(self):
        return self.call.tokens

    @property
    def attention_mask(self):
        return self.call.attention_mask

    @property
    def new_state(self) -> dict | None:
        """The state after the layer has run."""
        return None if self.state is None else {**self.state, **self._new}

    def _next(self, name: str) -> str:
        """The name of the state that the coming update of `name` writes: each update in one call has its own."""
        count = self._counts.get(name, 0)
        return f"{self._prefix}{name}#{count}" if count else f"{self._prefix}{name}"

    def _write(self, name: str, new):
        self._new[self._next(name)] = new
        self._counts[name] = self._counts.get(name, 0) + 1

    def _kept(self, name: str, shape, dtype):
        """The state that the coming update replaces; zeros of this shape in the call that finds the shapes."""
        key = self._next(name)
        if self.call.shapes is None:
            return self.state[key]
        self.call.shapes.found.setdefault(self.place, {})[key] = jax.ShapeDtypeStruct(tuple(shape), dtype)
        return jnp.zeros(shape, dtype)

    def kept(self, name: str, shape, dtype):
        """What `keep` was given under a name in the call before, zeros of this shape before the first one. Raises KeyError without a cache."""
        return self._kept(name, shape, dtype)

    def keep(self, name: str, new) -> None:
        self._write(name, new)

    def _append(self, name: str, new):
        """[..., length, features] written behind what is kept; everything kept, [..., capacity, features]."""
        kept = self._kept(name, (*new.shape[:-2], self.call.capacity, new.shape[-1]), new.dtype)
        start = self.tokens.slots[0]
        at = [jnp.zeros_like(start)] * new.ndim
        at[-2] = start
        return jax.lax.dynamic_update_slice(kept, new, at)

    def update(self, key_states, value_states, layer_idx=None, *_, **__):
        """Keys and values [batch, heads, length, head_dim] appended -> all of them, [batch, heads, capacity, head_dim]; themselves without a cache."""
        if self.state is None:
            return key_states, value_states
        keys = self._append("key", key_states)
        values = None if value_states is None else self._append("value", value_states)
        self._write("key", keys)
        if values is not None:
            self._write("value", values)
        return keys, values

    def update_indexer(self, indexer_key_states, layer_idx=None):
        """[batch, length, features] appended -> [batch, capacity, features]."""
        if self.state is None:
            return indexer_key_states
        keys = self._append("indexer", indexer_key_states)
        self._write("indexer", keys)
        return keys

    def store_compression_weights(self, name: str, kv, gate, compress_rate: int):
        """[batch, length, features] of both appended -> (kv, gate, 0): whole windows of all tokens so far, from the first on.

        Windows that the tokens do not fill yet hold zeros: whoever reads what they are compressed to masks them by position.
        """
        if self.state is not None:
            kv, gate = self._append(f"{name}_kv", kv), self._append(f"{name}_gate", gate)
            self._write(f"{name}_kv", kv)
            self._write(f"{name}_gate", gate)
        usable = kv.shape[1] // compress_rate * compress_rate
        return kv[:, :usable], gate[:, :usable], 0

    def update_compressor_states(self, name: str, compressed):
        """The entries of all windows: itself, since every call compresses them all."""
        return compressed

    def update_overlap_state(self, name: str, chunk_kv, chunk_gate, head_dim: int):
        """(None, None): no window comes before the first."""
        return None, None

    def _current(self, name: str):
        if self.state is None:
            return None
        last = self._counts.get(name, 0) - 1
        kept = self.state.get(self._next(name))
        return self._new[f"{self._prefix}{name}#{last}" if last else f"{self._prefix}{name}"] if kept is None and last >= 0 else kept

    def get_conv_state(self, layer_idx=None, state_idx: int = 0):
        """[batch, channels, kernel] before this call's tokens, None without a cache."""
        return self._current(f"conv_{state_idx}")

    def update_conv_state(self, conv_states, layer_idx=None, state_idx: int = 0, conv_kernel_size: int | None = None, **_):
        """[batch, channels, length] -> the kept `conv_kernel_size` columns (zeros before the first token) and it, [batch, channels, kernel + length]; itself
        without a cache."""
        if self.state is None:
            return conv_states
        name = f"conv_{state_idx}"
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        whole = jnp.concatenate([self._kept(name, (*conv_states.shape[:-1], kernel), conv_states.dtype), conv_states], -1)
        self._write(name, whole[..., -kernel:])
        return whole

    def get_recurrent_state(self, layer_idx=None, state_idx: int = 0):
        """What `update_recurrent_state` was given last, zeros before; None without a cache."""
        return self._current(f"recurrent_{state_idx}")

    def get_recurrent_states(self, count: int):
        """The first `count` recurrent states as a tuple; None where one of them is missing."""
        states = tuple(self.get_recurrent_state(state_idx=i) for i in range(count))
        return None if any(state is None for state in states) else states

    def update_recurrent_state(self, recurrent_states, layer_idx=None, state_idx: int = 0, **_):
        """Kept for the next call; returns its argument."""
        if self.state is not None:
            name = f"recurrent_{state_idx}"
            kept = self._kept(name, recurrent_states.shape, recurrent_states.dtype)
            self._write(name, recurrent_states.astype(kept.dtype))
        return recurrent_states

    def is_recording_past(self, layer_idx=None) -> bool:
        """True: a convolution always sees the kept columns and the new ones together, for one token or many."""
        return True

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        """Whether there is a state to read: zeros stand for what came before the first token."""
        return self.state is not None

    def get_seq_length(self, layer_idx=None):
        return self.call.get_seq_length()

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.call.get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx=0):
        return self.call.get_query_offset()
