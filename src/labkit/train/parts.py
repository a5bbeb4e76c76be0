"""What is trained of a model as a flat dict of arrays, what is frozen as it is, and the way back to the model."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from labkit.layers.plan import LayerPlan
from labkit.models.registry import get_family


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """The shape of a model without its arrays. names: dotted paths of its Params, in order. specs: name -> partition spec. plan: its layers."""

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    names: tuple[str, ...]
    specs: dict[str, PartitionSpec]
    plan: LayerPlan

    def merge(self, params: dict[str, jax.Array], frozen: nnx.State) -> nnx.Module:
        """The model with these arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, [params[name] for name in self.names]), frozen)

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Where each parameter lies, and with it its gradient and its optimiser state."""
        return {name: NamedSharding(mesh, self.specs[name]) for name in self.names}

    def matrices(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, bool]:
        """Which parameters are matrices in one layer (the layer axis of a stack left out): those that weight decay acts on."""
        prefixes = tuple(self.plan.parameter_path(s, p) + "." for s, p, _ in self.plan.positions())
        return {name: len(shapes[name]) - name.startswith(prefixes) >= 2 for name in self.names}


def split_model(model: nnx.Module) -> tuple[ModelParts, dict[str, jax.Array], nnx.State]:
    """(parts, params, frozen) of a model, concrete or abstract: params maps the dotted path of every `nnx.Param` to its array, frozen is the state of every
    other Variable, which training leaves untouched."""
    graphdef, params, frozen = nnx.split(model, nnx.Param, ...)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    specs = {name: leaf.get_metadata("out_sharding", None) or PartitionSpec() for name, leaf in flat.items()}
    leaves, treedef = jax.tree.flatten(params)
    if len(leaves) != len(flat):
        raise ValueError(f"{len(flat)} parameters hold {len(leaves)} arrays")
    return ModelParts(graphdef, treedef, tuple(flat), specs, model.config.plan), dict(zip(flat, leaves)), frozen


def with_compute_dtype(model: nnx.Module, model_type: str, dtype) -> nnx.Module:
    """The same arrays in a model that computes in `dtype`."""
    config = dataclasses.replace(model.config, dtype=jnp.dtype(dtype))
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: get_family(model_type).create(config, rngs=nnx.Rngs(0), mesh=model.mesh)))
    return nnx.merge(graphdef, nnx.state(model))
