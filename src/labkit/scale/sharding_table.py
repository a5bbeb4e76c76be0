"""Where each parameter of a model would lie on a mesh, from abstract construction alone."""

import math
from dataclasses import dataclass

import jax
import numpy as np

from labkit.converters.filling import abstract_model, dotted
from labkit.layers.sharding import MESH_AXIS_NAMES


@dataclass(frozen=True)
class Placed:
    """One parameter. shape: stacked layers first; spec: mesh axes per dimension; shards: how many different parts the mesh holds."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    shards: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def per_device(self) -> int:
        return self.nbytes // self.shards


def sharding_table(family, config, sizes: dict[str, int]) -> list[Placed]:
    """One row per variable of the family's model on a mesh of these sizes (mesh axis -> size; absent ones 1); no device is needed."""
    whole = {axis: sizes.get(axis, 1) for axis in MESH_AXIS_NAMES}
    mesh = jax.sharding.AbstractMesh(tuple(whole.values()), tuple(whole))
    rows = []
    for path, leaf in abstract_model(family, config, mesh).leaves.items():
        value, spec = leaf.get_raw_value(), leaf.get_metadata("out_sharding", None) or ()
        entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
        shards = math.prod(whole[axis] for entry in entries for axis in entry)
        shown = ", ".join(" × ".join(entry) if entry else "–" for entry in [*entries, *[()] * (len(value.shape) - len(entries))])
        rows.append(Placed(dotted(path), tuple(value.shape), np.dtype(value.dtype).name, shown, shards))
    return rows


def spread_too_little(rows: list[Placed], sizes: dict[str, int]) -> list[str]:
    """Weights of two or more dimensions and 256 or more elements (the layer axis of a stack not counted) of which every device would hold the whole, though an
    axis of the mesh divides one of their dimensions."""
    found, active = [], [size for size in sizes.values() if size > 1]
    for row in rows:
        shape = row.shape[1:] if row.path.startswith("layers.") else row.shape
        divides = any(dim % size == 0 for dim in shape for size in active)
        if len(shape) > 1 and math.prod(shape) >= 256 and row.shards == 1 and divides:
            found.append(row.path)
    return found
