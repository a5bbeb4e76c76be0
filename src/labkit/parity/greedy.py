"""Greedy decoding as one compiled loop, for any model of the garden, and the proof that decoding with the cache equals the full forward."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.errors import InputError
from labkit.parity import row_product
from labkit.parity.row_products import RowProducts

CAPACITY_STEP = 32


class GreedyDecoder:
    """A model made ready for greedy decoding; call it as often as wanted.

    unroll: layers are unrolled in the single-token step and their weights kept apart, at the price of a second copy of them and of compile time that grows with
    depth. Off TPU a scan copies each layer's weights out of the stack at every token, which costs more than reading them. On CPU, one row in float32 goes
    through `row_product` where the machine has a C++ compiler; weights that bfloat16 holds exactly are kept as bfloat16 there and computed with in float32.
    """

    def __init__(self, model, *, unroll: bool = False):
        self.model = model
        self.graphdef, self.state = nnx.split(model)
        self.form = jax.tree.structure(self.state) if unroll else None
        self.weights, self.rows = None if unroll else self.state, None

    def __call__(self, tokens, steps: int, *, segment_ids=None, capacity: int | None = None) -> np.ndarray:
        """tokens int [batch, length] and `steps` greedy continuations: int [batch, length + steps].

        One compiled call prefills the cache, one compiled loop does all steps; the first of equal logits wins; no token ends a row early. segment_ids: int
        [batch, length], 0 marks left padding. capacity: slots of the cache, length + steps or more; calls of equal capacity share the compiled loop.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        if tokens.ndim != 2 or tokens.shape[1] < 1 or steps < 1:
            raise InputError("greedy takes tokens [batch, length] and at least one step", f"tokens {tokens.shape}, steps {steps}")
        batch, length = tokens.shape
        # Rounded up, so that prompts and steps of similar size share the compiled loop.
        capacity = capacity or -(-(length + steps) // CAPACITY_STEP) * CAPACITY_STEP
        if capacity < length + steps:
            raise InputError(f"a cache of {capacity} slots cannot hold {length} tokens and {steps} steps")
        segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        first, cache = _prefill(self.graphdef, self.state, tokens, segment_ids, self.model.init_cache(batch, capacity))
        weights, rows = self._decoding(first, cache)
        chosen = _decode(self.graphdef, self.form, rows, weights, first, cache, jnp.asarray(steps, jnp.int32))
        return np.concatenate([np.asarray(tokens), np.asarray(chosen)[:, :steps]], 1)

    def _decoding(self, first, cache):
        """The weights of the loop, and the `RowProducts` that they are stored for, or None."""
        if self.form is not None and self.rows is None and first.shape[0] == 1 and len(first.devices()) == 1 and row_product.available():
            self.rows = self._row_products(first, cache)
        if self.rows is not None and first.shape[0] == 1:
            return self.rows
        if self.weights is None:
            self.weights = self._layers_apart()
        return self.weights, None

    def _row_products(self, first, cache):
        flat, form = jax.tree.flatten(self._layers_apart())
        step = _step(self.graphdef, self.form)
        rows = RowProducts(lambda flat, *carry: step(jax.tree.unflatten(form, flat), *carry), flat, first, _apart(cache))
        return (rows.store(flat), rows) if rows.replaces else None

    def _layers_apart(self) -> list:
        """The leaves of the state, those of stacked layers as lists."""
        stacked = lambda path: str(getattr(path[0], "key", path[0])) == "layers"
        return [list(jnp.unstack(leaf)) if stacked(path) else leaf for path, leaf in jax.tree_util.tree_flatten_with_path(self.state)[0]]


def greedy(model, tokens, steps: int, *, segment_ids=None, capacity: int | None = None) -> np.ndarray:
    """tokens int [batch, length] and `steps` greedy continuations, int [batch, length + steps]: one call of a `GreedyDecoder`."""
    return GreedyDecoder(model)(tokens, steps, segment_ids=segment_ids, capacity=capacity)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(graphdef, state, tokens, segment_ids, cache):
    logits, cache = nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache)
    return _choose(logits), cache


@partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(graphdef, form, rows, weights, first, cache, steps):
    """int [batch, capacity]: `first` and what follows from it, `steps` tokens in all, then zeros. The number of steps is not compiled in.

    weights: the model's state, or with `form`, its tree structure, the leaves, those of stacked layers as lists. rows: None, or the `RowProducts` of the step,
    whose weights these are.
    """
    chosen = jnp.zeros((first.shape[0], cache.capacity), jnp.int32).at[:, 0].set(first)
    take = _step(graphdef, form) if rows is None else rows

    def step(carry):
        done, token, cache, chosen = carry
        token, cache = take(weights, token, cache)
        return done + 1, token, cache, jax.lax.dynamic_update_slice(chosen, token[:, None], (jnp.zeros_like(done), done))

    cache = cache if form is None else _apart(cache)
    return jax.lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.ones((), jnp.int32), first, cache, chosen))[-1]


def _step(graphdef, form):
    """step(weights, token [batch], cache) -> (the next token, the cache); with `form`, weights and cache are those of layers kept apart."""

    def step(weights, token, cache):
        if form is None:
            logits, cache = nnx.merge(graphdef, weights)(token[:, None], cache=cache, scan=True)
            return _choose(logits), cache
        # Stacked inside the step and taken apart at its end, so that the compiler folds each layer's slice of a stack back into the array it came from.
        stack = lambda leaf: jnp.stack(leaf) if isinstance(leaf, list) else leaf
        state = jax.tree.unflatten(form, [stack(leaf) for leaf in weights])
        whole = dataclasses.replace(cache, layers=jax.tree.map(stack, cache.layers, is_leaf=_is_layers))
        logits, cache = nnx.merge(graphdef, state)(token[:, None], cache=whole, scan=False)
        return _choose(logits), _apart(cache)

    return step


def _apart(cache):
    """A cache with its layers' arrays as lists, one per layer."""
    return dataclasses.replace(cache, layers=jax.tree.map(lambda leaf: list(jnp.unstack(leaf)), cache.layers))


def _is_layers(node) -> bool:
    return isinstance(node, list) and all(isinstance(leaf, jax.Array) for leaf in node)


def _choose(logits):
    return jnp.argmax(logits[:, -1], -1).astype(jnp.int32)


def cached_logits(model, tokens, pieces: Sequence[int], *, segment_ids=None, capacity: int | None = None) -> np.ndarray:
    """Logits [batch, length, vocab] of tokens [batch, length] fed through the cache in `pieces` (lengths that sum to length), each a compiled call."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, length = tokens.shape
    if sum(pieces) != length or min(pieces) < 1:
        raise InputError(f"pieces {list(pieces)} do not make up {length} tokens")
    graphdef, state = nnx.split(model)
    cache, start, parts = model.init_cache(batch, capacity or length), 0, []
    for piece in pieces:
        segments = None if segment_ids is None else jnp.asarray(segment_ids[:, start : start + piece], jnp.int32)
        logits, cache = _forward(graphdef, state, tokens[:, start : start + piece], segments, cache)
        parts.append(np.asarray(logits))
        start += piece
    return np.concatenate(parts, 1)


@partial(jax.jit, static_argnums=0)
def _forward(graphdef, state, tokens, segment_ids, cache):
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache)


def forward(model, tokens, *, segment_ids=None) -> np.ndarray:
    """Logits [batch, length, vocab] of tokens [batch, length] in one compiled call without a cache."""
    graphdef, state = nnx.split(model)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return np.asarray(_forward(graphdef, state, jnp.asarray(tokens, jnp.int32), segment_ids, None))
