"""Stacked layers: one module per cycle position of the plan, every parameter with a leading layer axis; run by scan or by a loop over the same paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.plan import LayerPlan
from labkit.layers.sharding import stack_metadata
from labkit.layers.tags import layer_scope

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attn"),
}
"""What is kept for the backward pass: nothing but each layer's input, matrix products with weights, or attention outputs."""


def make_stack(make_layer, count: int, rngs: nnx.Rngs):
    """`count` layers from `make_layer(rngs)` as one module whose every variable has a leading layer axis, placed once."""
    stacked = nnx.vmap(make_layer, in_axes=0, out_axes=0)(rngs.split(count))
    graphdef, state = nnx.split(stacked)
    return nnx.merge(graphdef, jax.tree.map(stack_metadata, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def make_decoder(plan: LayerPlan, make_layer, rngs: nnx.Rngs):
    """All layers of a plan: the stack itself when there is one, else a list of segments, each a list of stacks by cycle position.

    make_layer(kind, rngs) builds one layer.
    """
    stacks = [[make_stack(functools.partial(make_layer, kind), segment.repeats, rngs) for kind in segment.cycle] for segment in plan.segments]
    return stacks[0][0] if plan.homogeneous else nnx.List([nnx.List(segment) for segment in stacks])


def decoder_stacks(plan: LayerPlan, layers) -> list[list[nnx.Module]]:
    """The stacks of `make_decoder` by segment and cycle position."""
    return [[layers]] if plan.homogeneous else [list(segment) for segment in layers]


def per_layer_at(plan: LayerPlan, data: dict, segment: int, position: int) -> dict:
    """The rows of per-layer arrays [num_layers, ...] that belong to one stack, in its order."""
    rows = np.asarray(plan.layers_at(segment, position))
    return {name: jnp.asarray(np.asarray(values)[rows]) for name, values in data.items()}


def run_decoder(plan: LayerPlan, layers, x, *, per_layer: dict, cache: list | None, scan: bool = True, remat: str | None = None, **shared):
    """Run all layers in order.

    x: [batch, length, hidden]. per_layer: name -> array [num_layers, ...], handed to each layer as a keyword. cache: list over segments of lists over cycle
    positions, or None. shared: keywords that every layer gets alike. Each layer returns (x, its cache, aux dict). Returns (x, cache, aux), aux[name] being an
    array [layers that report it, ...].
    """
    policy = None if remat is None else REMAT_POLICIES[remat]
    new_cache, aux = [], []
    for s, stacks in enumerate(decoder_stacks(plan, layers)):
        split = [nnx.split(stack) for stack in stacks]
        graphdefs = [graphdef for graphdef, _ in split]
        segment_cache = [None] * len(stacks) if cache is None else cache[s]
        inputs = ([state for _, state in split], [per_layer_at(plan, per_layer, s, p) for p in range(len(stacks))], segment_cache)

        def layer_step(x, graphdef, state, data, layer_cache):
            return nnx.merge(graphdef, state)(x, cache=layer_cache, **data, **shared)

        if remat is not None:
            layer_step = jax.checkpoint(layer_step, policy=policy, static_argnums=(1,))

        if scan:

            def cycle_step(x, cycle_inputs, graphdefs=graphdefs, layer_step=layer_step):
                out_caches, out_aux = [], []
                for graphdef, state, data, layer_cache in zip(graphdefs, *cycle_inputs):
                    x, layer_cache, layer_aux = layer_step(x, graphdef, state, data, layer_cache)
                    out_caches.append(layer_cache)
                    out_aux.append(layer_aux)
                return x, (out_caches, out_aux)

            x, (segment_out, segment_aux) = jax.lax.scan(cycle_step, x, inputs)
        else:
            x, segment_out, segment_aux = _loop(plan, s, x, graphdefs, inputs, layer_step)
        new_cache.append(segment_out)
        aux.extend(segment_aux)
    names = {name for entry in aux for name in entry}
    gathered = {name: jnp.concatenate([entry[name] for entry in aux if name in entry]) for name in sorted(names)}
    return x, (None if cache is None else new_cache), gathered


def _loop(plan: LayerPlan, s: int, x, graphdefs, inputs, layer_step):
    """The loop form of one segment: slices of axis 0, one layer after the other, each under its Hugging Face index."""
    segment, width = plan.segments[s], len(graphdefs)
    outs: list[list] = [[] for _ in range(width)]
    for index in range(segment.repeats):
        for position in range(width):
            state, data, layer_cache = (jax.tree.map(lambda leaf, i=index: leaf[i], part[position]) for part in inputs)
            with layer_scope(segment.layer(position, index)):
                x, layer_cache, layer_aux = layer_step(x, graphdefs[position], state, data, layer_cache)
            outs[position].append((layer_cache, layer_aux))
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries) for entries in outs]
    return x, [entry[0] for entry in stacked], [entry[1] for entry in stacked]
