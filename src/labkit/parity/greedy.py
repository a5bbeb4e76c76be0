"""Greedy decoding as one compiled loop, for any model of the garden, and the proof that decoding with the cache equals the full forward."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.errors import InputError

CAPACITY_STEP = 32


class GreedyDecoder:
    """A model made ready for greedy decoding; call it as often as wanted.

    unroll: layers are unrolled in the single-token step and their weights kept apart, at the price of a second copy of them and of compile time that grows with
    depth. Off TPU a scan copies each layer's weights out of the stack at every token, which costs more than reading them.
    """

    def __init__(self, model, *, unroll: bool = False):
        self.model = model
        self.graphdef, self.state = nnx.split(model)
        self.weights, self.form = self.state, None
        if unroll:
            paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(self.state)
            stacked = [str(getattr(path[0], "key", path[0])) == "layers" for path, _ in paths_and_leaves]
            self.weights = [list(jnp.unstack(leaf)) if apart else leaf for apart, (_, leaf) in zip(stacked, paths_and_leaves)]
            self.form = treedef

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
        chosen = _decode(self.graphdef, self.form, self.weights, first, cache, jnp.asarray(steps, jnp.int32))
        return np.concatenate([np.asarray(tokens), np.asarray(chosen)[:, :steps]], 1)


def greedy(model, tokens, steps: int, *, segment_ids=None, capacity: int | None = None) -> np.ndarray:
    """tokens int [batch, length] and `steps` greedy continuations, int [batch, length + steps]: one call of a `GreedyDecoder`."""
    return GreedyDecoder(model)(tokens, steps, segment_ids=segment_ids, capacity=capacity)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(graphdef, state, tokens, segment_ids, cache):
    logits, cache = nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache)
    return _choose(logits), cache


@partial(jax.jit, static_argnums=(0, 1))
def _decode(graphdef, form, weights, first, cache, steps):
    """int [batch, capacity]: `first` and what follows from it, `steps` tokens in all, then zeros. The number of steps is not compiled in.

    weights: the model's state, or with `form`, its tree structure, the leaves, those of stacked layers as lists.
    """
    chosen = jnp.zeros((first.shape[0], cache.capacity), jnp.int32).at[:, 0].set(first)
    scan = form is None
    # Stacked inside the step and taken apart at its end, so that the compiler folds each layer's slice of a stack back into the array it came from.
    stack = lambda leaf: jnp.stack(leaf) if isinstance(leaf, list) else leaf
    apart = lambda cache: cache if scan else dataclasses.replace(cache, layers=jax.tree.map(lambda leaf: list(jnp.unstack(leaf)), cache.layers))
    whole = lambda cache: cache if scan else dataclasses.replace(cache, layers=jax.tree.map(stack, cache.layers, is_leaf=_is_layers))

    def step(carry):
        done, token, cache, chosen = carry
        state = weights if scan else jax.tree.unflatten(form, [stack(leaf) for leaf in weights])
        logits, cache = nnx.merge(graphdef, state)(token[:, None], cache=whole(cache), scan=scan)
        token = _choose(logits)
        return done + 1, token, apart(cache), jax.lax.dynamic_update_slice(chosen, token[:, None], (jnp.zeros_like(done), done))

    return jax.lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.ones((), jnp.int32), first, apart(cache), chosen))[-1]


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
