"""Mixture dispatch: on a mesh the body of a mixture runs where its experts are. One implementation for all families; dropless."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from labkit.layers.grouping import group_tokens
from labkit.layers.loss import entropy
from labkit.layers.token_exchange import EXPERT_AXES, TOKEN_AXES, Exchange, axes_of, exchanging, stored_spec


def on_local_experts(method):
    """A method of a module of experts, `method(self, *arrays) -> array`, all arrays [tokens, ...]: on a mesh it runs inside `shard_map` on this device's
    experts and tokens.

    The module's variables come in by the specs that they are stored with, so no weight moves. Inside, `group_tokens` gathers the tokens over EXPERT_AXES and
    `ExpertGroups.sum` scatters the sums back and adds up over the tensor axis. Tokens that the shards do not divide (a single token that is decoded) are on
    every device instead, and the sums are added up over all axes. The mesh is the ambient one (`jax.set_mesh`). Without one, on one device, inside another
    `shard_map`, and for experts that are stored whole or not all cut alike, the method runs as it is written and the compiler places it.
    """

    @functools.wraps(method)
    def run(self, *arrays, **named):
        mesh = jax.sharding.get_abstract_mesh()
        tokens = jax.tree.leaves((arrays, named))
        if mesh.empty or mesh.size == 1 or any(kind == AxisType.Manual for kind in mesh.axis_types) or not all(map(jnp.ndim, tokens)):
            return method(self, *arrays, **named)
        graphdef, state = nnx.split(self)
        paths, variables = zip(*nnx.to_flat_state(state))
        specs = tuple(stored_spec(variable) for variable in variables)
        cut, token_spec = _exchange(mesh, variables, specs, tokens)
        if cut is None:
            return method(self, *arrays, **named)

        def local(values, arrays, named):
            mine = nnx.from_flat_state([(path, variable.replace(value)) for path, variable, value in zip(paths, variables, values)])
            with exchanging(cut):
                return method(nnx.merge(graphdef, mine), *arrays, **named)

        dispatch = jax.shard_map(local, in_specs=(specs, token_spec, token_spec), out_specs=token_spec, check_vma=False)
        return dispatch(tuple(variable.get_raw_value() for variable in variables), arrays, named)

    return run


def _exchange(mesh, variables, specs, arrays) -> tuple[Exchange | None, PartitionSpec]:
    """How tokens travel, and the spec of every array of tokens; None where the method is to run as it is written."""
    sizes = {axis: mesh.shape.get(axis, 1) for axis in (*TOKEN_AXES, "tensor")}
    cuts = [[tuple(axis for axis in axes_of(entry) if sizes[axis] > 1) for entry in spec] for spec in specs]
    stacks = {(variable.get_raw_value().shape[0], cut[0]) for variable, cut in zip(variables, cuts) if len(cut) > 1}
    used = {axis for cut in cuts for entry in cut for axis in entry}
    if len(stacks) != 1 or not used:
        return None, PartitionSpec()
    tokens_cut = all(array.shape[0] % (sizes["data"] * sizes["fsdp"] * sizes["expert"]) == 0 for array in arrays)
    gathered = tuple(axis for axis in EXPERT_AXES if axis in used) if tokens_cut else ()
    return Exchange(tuple(sizes.items()), stacks.pop()[1], gathered), PartitionSpec(TOKEN_AXES) if tokens_cut else PartitionSpec()


def apply_experts(x_th, indices_tk, weights_tk, gate_up_proj, down_proj, activation):
    """The sum over each token's chosen experts of weight x down(activation(gate(x)) * up(x)).

    x [tokens, hidden], indices int [tokens, top_k], weights [tokens, top_k], gate_up_proj [experts, hidden, 2, intermediate] (gate first), down_proj
    [experts, intermediate, hidden], both variables inside `on_local_experts`, elsewhere arrays or variables -> [tokens, hidden].
    """
    groups = group_tokens(indices_tk, down_proj)
    gate, up = jnp.split(groups.matmul(groups.rows(x_th), gate_up_proj), 2, -1)
    down = groups.matmul(activation(gate) * up, down_proj)
    return groups.sum(down * groups.weights(weights_tk.astype(down.dtype)))


def routing_statistics(probabilities_te, indices_tk, counted_t):
    """What the load-balancing loss needs of one layer, tokens_per_expert and router_probability, each [experts], and router_entropy [], nats: means over
    counted tokens.

    probabilities [tokens, experts], indices int [tokens, top_k], counted bool [tokens] (False for padding).
    """
    counted = counted_t.astype(probabilities_te.dtype)
    total = jnp.maximum(jnp.sum(counted), jnp.ones((), counted.dtype))
    chosen = jax.nn.one_hot(indices_tk, probabilities_te.shape[-1], dtype=counted.dtype).sum(1)
    return {
        "tokens_per_expert": (chosen * counted[:, None]).sum(0) / total,
        "router_probability": (probabilities_te * counted[:, None]).sum(0) / total,
        "router_entropy": (entropy(probabilities_te) * counted).sum() / total,
    }
