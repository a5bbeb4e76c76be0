"""Check 7: parameters are placed once, at construction. Found in the jaxpr: nothing that depends on parameters alone is constrained, resharded or put anywhere,
and every `shard_map` takes weights by the specs that they are stored with."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from labkit.converters.filling import dotted
from labkit.parity.conformance.jaxpr_walk import DATA, Weights, walk
from labkit.parity.conformance.report import Found

MOVES = ("sharding_constraint", "reshard", "device_put", "mesh_cast", "layout_constraint")
LENGTH = 8


def check(subject) -> Found:
    """The call on mesh (1, 2, 2, 1), by scan, by loop and with a cache. value: how many places a weight enters a `shard_map`."""
    found, seen = Found(), [0]
    graphdef, state = nnx.split(subject.sharded_model)
    tokens = np.ones((2, LENGTH), np.int32)
    with jax.set_mesh(subject.mesh):
        cache = subject.model.init_cache(2, LENGTH + 2)
        for way, options in (("scan", {}), ("loop", {"scan": False}), ("cache", {"cache": cache})):
            cached = options.pop("cache", None)

            def call(state, tokens, cache, options=options):
                return nnx.merge(graphdef, state)(tokens, segment_ids=jnp.ones_like(tokens), cache=cache, **options)

            jaxpr = jax.make_jaxpr(call)(state, tokens, cached).jaxpr
            marks = stored_marks(state)
            marks += [DATA] * (len(jaxpr.invars) - len(marks))
            problems = []
            walk(jaxpr, marks, lambda equation, inputs, problems=problems: _visit(equation, inputs, problems, seen))
            found.problems += [f"{what} ({way})" for what in dict.fromkeys(problems)]
    found.value = float(seen[0])
    return found


def stored_marks(state) -> list[Weights]:
    """One mark per leaf of a state, in the order of its flattening: the path and the spec that the variable is stored with."""
    marks = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, nnx.Variable))[0]:
        name = dotted(tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path))
        rank = len(leaf.get_raw_value().shape)
        marks.append(Weights(frozenset((name,)), spec_axes(leaf.get_metadata("out_sharding", None), rank)))
    return marks


def spec_axes(spec, rank: int) -> tuple[tuple[str, ...], ...]:
    """A partition spec as one tuple of mesh axes per dimension."""
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    entries = tuple(spec or ())
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries + (None,) * (rank - len(entries)))


def _visit(equation, inputs, problems: list[str], seen: list[int]) -> None:
    name = equation.primitive.name
    if name in MOVES:
        problems += [f"{name} on {_named(mark)}{_line(equation)}" for mark in inputs if isinstance(mark, Weights)]
    for key in ("in_shardings", "in_layouts"):
        # A jitted function within the call that asks for a sharding of its own is a constraint too.
        for mark, asked in zip(inputs, equation.params.get(key, ())):
            if isinstance(mark, Weights) and isinstance(asked, jax.sharding.Sharding):
                problems.append(f"{name} asks for {asked} of {_named(mark)}{_line(equation)}")
    if name == "shard_map":
        for mark, spec, variable in zip(inputs, equation.params["in_specs"], equation.invars, strict=True):
            if not isinstance(mark, Weights):
                continue
            seen[0] += 1
            asked = spec_axes(spec if isinstance(spec, PartitionSpec) else None, len(variable.aval.shape))
            if mark.spec is None:
                problems.append(f"shard_map takes what was computed from {_named(mark)}, not the stored weight{_line(equation)}")
            elif _active(mark.spec, equation) != _active(asked, equation):
                problems.append(f"shard_map takes {_named(mark)} by {PartitionSpec(*asked)} and it is stored by {PartitionSpec(*mark.spec)}{_line(equation)}")


def _active(spec, equation):
    """Axes of size 1 cut nothing."""
    sizes = dict(equation.params["mesh"].shape)
    return tuple(tuple(axis for axis in axes if sizes.get(axis, 1) > 1) for axes in spec)


def _named(mark: Weights) -> str:
    names = sorted(mark.paths)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _line(equation) -> str:
    """Where in the model the equation came from."""
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else []
    own = next((frame for frame in frames if "/modeling_" in frame.file_name), None) or next(
        (frame for frame in frames if "/site-packages/" not in frame.file_name and "/conformance/" not in frame.file_name), None
    )
    return f", {'/'.join(own.file_name.split('/')[-2:])}:{own.line_num}" if own else ""
