"""Abstract models, and models filled leaf by leaf from arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from labkit.converters.arrays import is_float
from labkit.models.mapping import Shape


@dataclass(frozen=True)
class AbstractModel:
    """A model without numbers. leaves: path -> the Variable that holds a ShapeDtypeStruct, in the order of the model's state."""

    graphdef: nnx.GraphDef
    leaves: dict[tuple, nnx.Variable]

    @property
    def paths(self) -> dict[str, tuple]:
        return {dotted(path): path for path in self.leaves}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {dotted(path): tuple(leaf.get_raw_value().shape) for path, leaf in self.leaves.items()}

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        return {dotted(path): np.dtype(leaf.get_raw_value().dtype) for path, leaf in self.leaves.items()}


def dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def abstract_model(family, config, mesh: Mesh | None = None) -> AbstractModel:
    """The family's model under eval_shape, for `mesh` or one device: nothing is allocated."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(0), mesh=mesh)))
    return AbstractModel(graphdef, dict(nnx.to_flat_state(state)))


def poisoned(shape: Shape, dtype) -> np.ndarray:
    """An array of NaN; integers and booleans, which have none, are zero."""
    return np.full(shape, np.nan, dtype) if is_float(dtype) else np.zeros(shape, dtype)


def place(array: np.ndarray, variable: nnx.Variable, mesh: Mesh | None) -> jax.Array:
    """The array on the default device, or on `mesh` by the variable's own sharding."""
    if mesh is None:
        return jax.device_put(array)
    spec = variable.get_metadata("out_sharding", None) or PartitionSpec()
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def filled_model(abstract: AbstractModel, value_of: Callable[[str], np.ndarray], mesh: Mesh | None = None, part_of=None):
    """The model with `value_of(path)` in every leaf; one leaf is in numpy's memory at a time.

    part_of(path, slices): on a mesh, the part of a leaf that a device holds, in place of whole leaves.
    """
    if mesh is None or part_of is None:
        leaves = [(path, leaf.replace(place(value_of(dotted(path)), leaf, mesh))) for path, leaf in abstract.leaves.items()]
    else:
        leaves = [(path, leaf.replace(place_parts(functools.partial(part_of, dotted(path)), leaf, mesh))) for path, leaf in abstract.leaves.items()]
    return nnx.merge(abstract.graphdef, nnx.from_flat_state(leaves))


def place_parts(part: Callable[[tuple[slice, ...]], np.ndarray], variable: nnx.Variable, mesh: Mesh) -> jax.Array:
    """The array whose parts `part(slices)` gives, on `mesh` by the variable's own sharding: a part that several devices hold is made once."""
    shape, sharding = variable.get_raw_value().shape, NamedSharding(mesh, variable.get_metadata("out_sharding", None) or PartitionSpec())
    by_part: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        by_part.setdefault(tuple(cut.indices(size) for cut, size in zip(index, shape)), []).append((device, index))
    arrays = []
    for holders in by_part.values():
        values = part(holders[0][1])
        arrays += [jax.device_put(values, device) for device, _ in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def state_arrays(model) -> Mapping[str, jax.Array]:
    """path -> array of every variable of a model, in the order of its state."""
    return {dotted(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
