"""Check 6: one mesh, shared with the driver; built abstractly, under jit or eagerly, a model has the same state tree with the same sharding metadata."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from labkit.converters.filling import dotted
from labkit.parity.conformance.report import Found

OWN_FLAG = "eager_sharding"
"""NNX's own note of how a variable was made: the one difference that may be."""


def check(subject) -> Found:
    """On mesh (1, 2, 2, 1). value: how many variables were compared."""
    found, mesh = Found(), subject.mesh
    eager = subject.create(mesh)
    found.problems += foreign_meshes(eager, mesh)
    abstract = nnx.eval_shape(lambda: subject.create(mesh))
    found.problems += foreign_meshes(abstract, mesh)
    made = []

    def construct():
        graphdef, state = nnx.split(subject.create(mesh))
        made.append(graphdef)
        return state

    lowered = jax.jit(construct).lower()
    jitted = nnx.merge(made[0], jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info))
    described = {"abstract": describe(abstract), "jitted": describe(jitted)}
    first = describe(eager)
    for how, other in described.items():
        found.problems += [f"{how} construction: {what}" for what in differences(first, other)]
    found.problems += misplaced(eager, mesh)
    found.value = float(len(first))
    return found


def foreign_meshes(model, mesh) -> list[str]:
    """Meshes that are not the driver's, by where they hang, and the driver's own in any place but the model's."""
    problems = [] if getattr(model, "mesh", None) is mesh else [f"model.mesh is {_short(getattr(model, 'mesh', None))}, not the driver's mesh"]
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in vars(node).items():
            value = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(value, jax.sharding.Mesh) and not (node is model and name == "mesh"):
                problems.append(f"{dotted(path)}.{name} is a mesh of its own: modules below the model hold none")
    return problems


def describe(model) -> dict[str, tuple]:
    """path -> what is known of it without numbers: the class of a module; class, shape, dtype and metadata of a variable."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            value = node.get_raw_value()
            metadata = {key: _plain(entry) for key, entry in node.get_metadata().items() if key != OWN_FLAG}
            found[dotted(path)] = (type(node).__name__, tuple(value.shape), str(value.dtype), metadata)
        elif isinstance(node, nnx.Module):
            found[dotted(path)] = (type(node).__name__,)
    return found


def differences(eager: dict, other: dict) -> list[str]:
    """What another construction has otherwise, by path."""
    problems = [f"{path} is missing" for path in eager if path not in other] + [f"{path} is there as well" for path in other if path not in eager]
    for path in eager.keys() & other.keys():
        for ours, theirs in zip(eager[path], other[path], strict=False):
            if ours != theirs:
                problems.append(f"{path} has {theirs} where eager construction has {ours}")
    return sorted(problems)


def misplaced(model, mesh) -> list[str]:
    """Variables that do not lie on `mesh` by the spec of their own metadata: its devices in its order."""
    problems = []
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        spec, array = leaf.get_metadata("out_sharding", None), leaf.get_raw_value()
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if spec is None and array.ndim < 2:
            continue
        wanted = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        if not array.sharding.is_equivalent_to(wanted, array.ndim):
            problems.append(f"{dotted(path)} lies {_short(array.sharding)}, its metadata say {spec} on the driver's mesh")
    return problems


def _plain(entry):
    return tuple(entry) if isinstance(entry, PartitionSpec) else repr(entry) if callable(entry) else entry


def _short(thing) -> str:
    mesh = thing.mesh if isinstance(thing, NamedSharding) else thing
    if not isinstance(mesh, jax.sharding.Mesh):
        return str(thing)
    devices = ", ".join(str(device.id) for device in np.asarray(mesh.devices).flat)
    return f"on devices {devices}" + (f" by {thing.spec}" if isinstance(thing, NamedSharding) else "")
