"""One call of a translated decoder: its tokens, its cache, its layers by scan or loop, its outputs. The cache is explicit: taken and returned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.attention import Tokens, locate_tokens
from labkit.layers.cache import DecoderCache
from labkit.layers.handles import LayerHandle, StateShapes
from labkit.layers.outputs import pack_outputs
from labkit.layers.reports import collecting, report, start_collecting, stop_collecting
from labkit.layers.stack import REMAT_POLICIES, decoder_stacks
from labkit.layers.tags import layer_scope


class DecoderCall:
    """What one call of a model works with. tokens: `Tokens`; positions: int32 [batch, length]; attention_mask: bool [batch, length], False in padding."""

    def __init__(self, model, tokens: Tokens, before: DecoderCache | None, after: DecoderCache | None, shapes: StateShapes | None, scan: bool, remat):
        self.model, self.tokens, self.scan, self.shapes = model, tokens, scan, shapes
        self.policy = None if remat is None else REMAT_POLICIES[remat]
        self.remat = remat is not None
        self._before, self._after = before, after
        self._runs, self._handles, self._layers, self._layer_aux = 0, {}, None, {}
        self._aux, self._token = start_collecting()

    @classmethod
    def begin(cls, model, tokens, positions=None, segment_ids=None, cache=None, scan: bool = True, remat: str | None = None) -> "DecoderCall":
        """tokens, positions, segment_ids: int [batch, length]; cache: `DecoderCache`, or `StateShapes` in the call that finds its shapes."""
        shapes = cache if isinstance(cache, StateShapes) else None
        before = DecoderCache.empty([], shapes.batch, shapes.capacity) if shapes is not None else cache
        located, after = locate_tokens(tokens, positions, segment_ids, before)
        return cls(model, located, before, after, shapes, scan, remat)

    @property
    def positions(self):
        return self.tokens.positions

    @property
    def attention_mask(self):
        return self.tokens.segment_ids != 0

    @property
    def key_attention_mask(self):
        """bool [batch, keys]: the tokens so far, False in padding and in slots not yet written. What the reference calls the attention mask of a call."""
        return self.tokens.key_segment_ids != 0

    @property
    def capacity(self) -> int:
        """How many keys a query may see: the cache's capacity, or the call's length."""
        return self.tokens.key_slots.shape[0]

    def get_seq_length(self, layer_idx=0):
        """Tokens in the cache before this call: 0 without one, else an int32 scalar array."""
        return 0 if self._before is None else self._before.length

    def get_query_offset(self, layer_idx=0):
        return self.get_seq_length()

    def get_mask_sizes(self, query_length, layer_idx=0):
        """(how many keys, the slot of the first): (capacity, 0)."""
        return self.capacity, 0

    def is_recording_past(self, layer_idx=None) -> bool:
        return True

    def has_previous_state(self, layer_idx=None, state_idx=None) -> bool:
        return self._before is not None

    def update(self, key_states, value_states, layer_idx: int):
        """`LayerHandle.update` of a layer that lives outside the stack, by its index; those of other states likewise."""
        return self.layer(f"layer{layer_idx}").update(key_states, value_states)

    def update_indexer(self, indexer_key_states, layer_idx: int):
        return self.layer(f"layer{layer_idx}").update_indexer(indexer_key_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        return self.layer(f"layer{layer_idx}").get_conv_state(state_idx=state_idx)

    def update_conv_state(self, conv_states, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None):
        return self.layer(f"layer{layer_idx}").update_conv_state(conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0):
        return self.layer(f"layer{layer_idx}").get_recurrent_state(state_idx=state_idx)

    def update_recurrent_state(self, recurrent_states, layer_idx: int, state_idx: int = 0):
        return self.layer(f"layer{layer_idx}").update_recurrent_state(recurrent_states, state_idx=state_idx)

    def kept_state(self, name: str, initial):
        """What `keep_state` was given in the call before this one; `initial`, a pytree of arrays [batch, ...], before the first token and without a cache."""
        if self._before is None:
            return initial
        handle, (leaves, tree) = self.layer(name), jax.tree.flatten(initial)
        kept = [handle.kept(str(i), leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
        return tree.unflatten([jnp.where(self.get_seq_length() == 0, new, old) for new, old in zip(leaves, kept)])

    def keep_state(self, name: str, state) -> None:
        """Keeps a pytree of arrays [batch, ...] for the next call."""
        if self._before is not None:
            for i, leaf in enumerate(jax.tree.leaves(state)):
                self.layer(name).keep(str(i), leaf)

    def layer(self, name: str, layer_idx: int | None = None) -> LayerHandle:
        """The handle of a layer outside the stack, the same one for the same name throughout the call. layer_idx: where it stands in a list."""
        if name not in self._handles:
            self._handles[name] = LayerHandle(self, self._named_state(name), name, layer_idx, layer_idx)
        return self._handles[name]

    def _named_state(self, name: str) -> dict | None:
        if self._before is None:
            return None
        named = self._before.layers[-1] if self._before.layers and isinstance(self._before.layers[-1], dict) else {}
        return {key: leaf[0] for key, leaf in named.get(name, {}).items()}

    def run(self, layers, step, *carry, grows: bool = False):
        """All layers in order: step(layer, handle, *carry) -> carry, a single array or a tuple as it was given.

        layers: what `Build.layers` made of the plan of the model's config (by scan, or by a loop that runs each layer under its index), or a plain list of
        modules (always by loop, each with a handle of its own). grows: the carry may become longer from layer to layer, as a list of earlier outputs does; then
        always by loop. Raises ValueError when a step changes structure, dtype or (unless it grows) shape of the carry.
        """
        run, self._runs = self._runs, self._runs + 1
        if isinstance(layers, list | tuple) or (isinstance(layers, nnx.List) and not any(isinstance(item, nnx.List) for item in layers)):
            for index, layer in enumerate(layers):
                with layer_scope(index):
                    out = self._list_step(step, layer, self.layer(f"run{run}.{index}", index), carry)
                    carry = _checked(out, carry, f"layer {index}", grows)
            return carry if len(carry) != 1 else carry[0]
        plan, prefix = self.model.config.plan, f"run{run}." if run else ""
        kept = [[{} for _ in segment.cycle] for segment in plan.segments]
        if self._before is not None and self.shapes is None:
            mine = lambda state: {name: leaf for name, leaf in state.items() if name.startswith("run") is bool(run) and name.startswith(prefix)}
            kept = [[mine(state) for state in segment] for segment in self._before.layers[: len(plan.segments)]]
        written, aux = [], []
        for s, stacks in enumerate(decoder_stacks(plan, layers)):
            segment = plan.segments[s]
            steps = [self._layer_step(step, nnx.split(stack)[0], (s, p), segment, prefix, grows) for p, stack in enumerate(stacks)]
            indices = [jnp.asarray(plan.layers_at(s, p), jnp.int32) for p in range(len(stacks))]
            inputs = list(zip([nnx.split(stack)[1] for stack in stacks], kept[s], indices))
            scanned = self.scan and segment.repeats > 1 and not grows
            run_stack = _scan if scanned else functools.partial(_loop, segment, scoped=not self.scan)
            try:
                carry, outs = run_stack(steps, carry, inputs)
            except _WiderCarry as wider:
                # A residual stream that the first layer makes wide (`residual_in_fp32`): wide from the start it holds the same values.
                carry, outs = run_stack(steps, jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), carry, wider.dtypes), inputs)
            written.append([state for state, _ in outs])
            aux.extend(entry for _, entry in outs)
        for entry in aux:
            for name, leaf in entry.items():
                self._layer_aux.setdefault(name, []).append(leaf)
        if self._before is not None:
            before = self._layers or [[{} for _ in segment] for segment in written]
            self._layers = [[old | new for old, new in zip(*pair)] for pair in zip(before, written)]
        return carry if len(carry) != 1 else carry[0]

    def _list_step(self, step, layer, handle, carry):
        """One layer of a plain list; computed anew in the backward pass when the call says so, which no call with a cache needs."""
        if not self.remat or self._before is not None:
            return step(layer, handle, *carry)

        def run_layer(carry):
            with collecting() as aux:
                return step(layer, handle, *carry), aux

        out, aux = jax.checkpoint(run_layer, policy=self.policy)(carry)
        for name, value in aux.items():
            report(name, value)
        return out

    def _layer_step(self, step, graphdef, place, segment, prefix, grows):
        """(carry, (state of the module, kept state, index)) -> (carry, (kept state, aux)) for one position of the plan."""

        def run_layer(carry, module_state, kept, index):
            handle = LayerHandle(self, None if self._before is None else kept, place, segment.layer(place[1], 0), index, prefix)
            with collecting() as aux:
                out = step(nnx.merge(graphdef, module_state), handle, *carry)
            out = _checked(out, carry, f"a layer of kind {segment.cycle[place[1]]!r}", grows)
            return out, ({} if self.shapes is not None else handle.new_state or {}, aux)

        return jax.checkpoint(run_layer, policy=self.policy) if self.remat else run_layer

    def outputs(self, logits, return_aux: bool = False, **aux):
        """`logits[, aux][, cache]`. aux: what layers and the model reported, and what is given here."""
        stop_collecting(self._token)
        after = self._after
        if after is not None and self.shapes is None:
            named = {name: {key: leaf[None] for key, leaf in handle.new_state.items()} for name, handle in self._handles.items()}
            stacked = [segment for segment in self._before.layers if isinstance(segment, list)] if self._layers is None else self._layers
            layers = stacked + ([named] if named else [])
            after = dataclasses.replace(after, layers=layers)
        return pack_outputs(logits, self.aux() | aux if return_aux else None, after, return_aux=return_aux)

    def aux(self) -> dict:
        """What was reported so far: name -> array [layers that report it, ...], and what was reported outside layers as it is."""
        return {name: jnp.concatenate(leaves) for name, leaves in sorted(self._layer_aux.items())} | self._aux


class _WiderCarry(Exception):
    """A layer made floats of the carry wider. dtypes: those of its result, in the carry's structure."""

    def __init__(self, dtypes):
        super().__init__()
        self.dtypes = dtypes


def _widens(old, new) -> bool:
    floats = jnp.issubdtype(old.dtype, jnp.floating) and jnp.issubdtype(new.dtype, jnp.floating)
    return old.dtype == new.dtype or (floats and new.dtype.itemsize > old.dtype.itemsize)


def _checked(out, carry, who: str, grows: bool) -> tuple:
    """The step's result as a tuple; ValueError when it does not fit the carry."""
    out = out if isinstance(out, tuple) and len(carry) != 1 else (out,)
    if len(out) == len(carry):
        carry = tuple(new if old is None or isinstance(old, dict) else old for old, new in zip(carry, out))
    describe = lambda tree: jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{jnp.ndim(leaf) if grows else list(jnp.shape(leaf))}", tree)
    if jax.tree.structure(out) != jax.tree.structure(tuple(carry)) or describe(out) != describe(tuple(carry)):
        same = jax.tree.structure(out) == jax.tree.structure(tuple(carry)) and not grows
        leaves = list(zip(jax.tree.leaves(tuple(carry)), jax.tree.leaves(out))) if same else []
        if same and all(jnp.shape(old) == jnp.shape(new) and _widens(old, new) for old, new in leaves):
            raise _WiderCarry(jax.tree.map(lambda leaf: leaf.dtype, out))
        raise ValueError(f"{who} was given {describe(tuple(carry))} and returned {describe(out)}: what goes through the layers keeps its shape and dtype")
    return out


def _scan(steps, carry, inputs):
    def cycle(carry, cycle_inputs):
        outs = []
        for layer_step, layer_inputs in zip(steps, cycle_inputs):
            carry, out = layer_step(carry, *layer_inputs)
            outs.append(out)
        return carry, outs

    return jax.lax.scan(cycle, carry, inputs)


def _loop(segment, steps, carry, inputs, scoped: bool):
    """Slices of axis 0, one layer after the other, each under its Hugging Face index."""
    outs: list[list] = [[] for _ in steps]
    for index in range(segment.repeats):
        for position, (layer_step, layer_inputs) in enumerate(zip(steps, inputs)):
            with layer_scope(segment.layer(position, index) if scoped else None):
                carry, out = layer_step(carry, *jax.tree.map(lambda leaf, i=index: leaf[i], layer_inputs))
            outs[position].append(out)
    return carry, [jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries) for entries in outs]


def empty_cache(model, batch: int, capacity: int) -> DecoderCache:
    """An empty cache for `capacity` tokens per row: every layer's state by name, zeros, with a leading layer axis; shapes come from one abstract call."""
    found = _state_shapes(model, batch, capacity)
    plan = model.config.plan
    empty = lambda place, repeats: {name: jnp.zeros((repeats, *leaf.shape), leaf.dtype) for name, leaf in found.get(place, {}).items()}
    layers = [[empty((s, p), segment.repeats) for p in range(len(segment.cycle))] for s, segment in enumerate(plan.segments)]
    named = {place: empty(place, 1) for place in found if isinstance(place, str)}
    return DecoderCache.empty(layers + ([named] if named else []), batch, capacity)


_shapes: dict = {}


def _state_shapes(model, batch: int, capacity: int) -> dict:
    key = (type(model), model.config, batch, capacity, jax.config.jax_enable_x64)
    if key not in _shapes:
        graphdef, state = nnx.split(model)
        shapes = StateShapes(batch, capacity)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        jax.eval_shape(lambda state: nnx.merge(graphdef, state)(jnp.ones((batch, 1), jnp.int32), cache=shapes)[0], abstract)
        _shapes[key] = shapes.found
    return _shapes[key]


__all__ = ["DecoderCall", "LayerHandle", "empty_cache", "report"]
