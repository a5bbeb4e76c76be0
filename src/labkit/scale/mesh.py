"""One mesh over the visible devices, with the axes that slices shard over."""

import jax

from labkit.errors import InputError
from labkit.layers.sharding import MESH_AXIS_NAMES


def build_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, devices=None) -> jax.sharding.Mesh:
    """A mesh of Auto axes (data, fsdp, tensor, expert) over `devices` (all visible ones by default).

    Raises InputError when the product of the sizes is not the number of devices: none is left out in silence.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (data, fsdp, tensor, expert)
    product = data * fsdp * tensor * expert
    if min(sizes) < 1 or product != len(devices):
        shown = ", ".join(f"{name}={size}" for name, size in zip(MESH_AXIS_NAMES, sizes))
        raise InputError(f"a mesh of {shown} needs {product} devices, and there are {len(devices)}", next="choose sizes whose product is the number of devices")
    return jax.make_mesh(sizes, MESH_AXIS_NAMES, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)
