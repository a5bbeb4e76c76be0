"""One mesh over the visible devices, with the axes that slices shard over: of one host, of several, or of several TPU slices joined by a slower network."""

import math

import jax
import numpy as np
from jax.experimental import mesh_utils

from labkit.errors import InputError
from labkit.layers.sharding import MESH_AXIS_NAMES

SPLITS_PHYSICAL_AXES = ("TPU v5 lite", "TPU v5e")
"""Device kinds on which an axis of the mesh may take a part of a physical axis, as `jax.make_mesh` has it."""

ACROSS_SLICES = ("data", "fsdp")
"""The axes that may lie across slices unless the caller says otherwise, the first that divides: their collectives are the rarest."""


def build_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, across: dict[str, int] | None = None, devices=None) -> jax.sharding.Mesh:
    """A mesh of Auto axes (data, fsdp, tensor, expert) over `devices` (by default all of every host that `jax.distributed` joined).

    Sizes are those of the whole mesh. across: how much of an axis lies across slices, for devices of several: the rest of it, and every other axis, stays
    inside one slice. By default the first of data and fsdp that the number of slices divides. Raises InputError when the product of the sizes is not the
    number of devices (none is left out in silence), when slices have unequal numbers of them, and when `across` does not make up the slices or does not
    divide its axis.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(MESH_AXIS_NAMES, (data, fsdp, tensor, expert)))
    grid = device_grid(sizes, devices, across)
    return jax.sharding.Mesh(grid, MESH_AXIS_NAMES, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def device_grid(sizes: dict[str, int], devices, across: dict[str, int] | None = None) -> np.ndarray:
    """The devices in the shape of the mesh. sizes: by axis, in the mesh's order."""
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    product = math.prod(sizes.values())
    if min(sizes.values()) < 1 or product != len(devices):
        raise InputError(f"a mesh of {shown} needs {product} devices, and there are {len(devices)}", next="choose sizes whose product is the number of devices")
    slices = sorted({getattr(device, "slice_index", None) or 0 for device in devices})
    split = devices[0].device_kind in SPLITS_PHYSICAL_AXES
    if len(slices) == 1:
        if across and math.prod(across.values()) != 1:
            raise InputError(f"a mesh of {shown} lies across {math.prod(across.values())} slices, and the devices are of one", next="leave `across` out")
        return mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=split)
    counts = {number: sum((getattr(device, "slice_index", None) or 0) == number for device in devices) for number in slices}
    if len(set(counts.values())) != 1:
        raise InputError(f"the slices have {', '.join(map(str, counts.values()))} devices", next="take as many devices of each")
    outer = _across(sizes, len(slices), across, shown)
    inner = tuple(size // outer.get(name, 1) for name, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(inner, tuple(outer.get(name, 1) for name in sizes), devices, allow_split_physical_axes=split)


def _across(sizes: dict[str, int], slices: int, across: dict[str, int] | None, shown: str) -> dict[str, int]:
    if across is None:
        axis = next((name for name in ACROSS_SLICES if sizes[name] % slices == 0), None)
        if axis is None:
            raise InputError(
                f"neither {' nor '.join(ACROSS_SLICES)} of a mesh of {shown} divides by {slices} slices",
                next="choose other sizes, or say which axes lie across",
            )
        return {axis: slices}
    if unknown := sorted(set(across) - set(sizes)):
        raise InputError(f"no mesh axis is named {unknown[0]}", "across", f"axes are {', '.join(sizes)}")
    if math.prod(across.values()) != slices:
        raise InputError(f"across={across} makes {math.prod(across.values())} slices, and there are {slices}", next="give sizes whose product is their number")
    for name, count in across.items():
        if sizes[name] % count:
            raise InputError(f"{name}={sizes[name]} does not divide into {count} parts across slices", next="choose a size that does")
    return across
