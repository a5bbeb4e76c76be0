"""Models on a mesh of forced host devices equal the unsharded ones, and their weights really are sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from labkit.converters import load_model
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.layers.sharding import MESH_AXIS_NAMES
from labkit.models import get_family, read_config
from labkit.scale.mesh import build_mesh, device_grid


def test_the_product_is_strict():
    with pytest.raises(InputError, match="needs 4 devices, and there are 8"):
        build_mesh(fsdp=2, tensor=2)
    with pytest.raises(InputError, match="data=0, fsdp=8"):
        build_mesh(data=0, fsdp=8)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the builder asks of a device."""

    id: int
    slice_index: int
    process_index: int
    device_kind: str = "chip"
    platform: str = "none"


def chips(slices: int, hosts: int, each: int) -> list[Chip]:
    """Devices by slice and host, as `jax.devices()` of a cluster lists them."""
    return [Chip((s * hosts + h) * each + d, s, s * hosts + h) for s in range(slices) for h in range(hosts) for d in range(each)]


def test_several_hosts_of_one_slice_are_one_grid():
    grid = device_grid({"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}, chips(1, 2, 4))
    assert grid.shape == (1, 4, 2, 1) and [device.id for device in grid.flat] == list(range(8))


@pytest.mark.parametrize(
    "sizes, across, axis",
    [
        ({"data": 2, "fsdp": 4, "tensor": 2, "expert": 1}, None, 0),
        ({"data": 1, "fsdp": 8, "tensor": 2, "expert": 1}, None, 1),
        ({"data": 2, "fsdp": 4, "tensor": 2, "expert": 1}, {"fsdp": 2}, 1),
        ({"data": 1, "fsdp": 4, "tensor": 2, "expert": 2}, {"expert": 2}, 3),
    ],
)
def test_several_slices_are_apart_along_one_axis_and_together_along_the_rest(sizes, across, axis):
    grid = device_grid(sizes, chips(2, 2, 4), across)
    assert grid.shape == tuple(sizes.values()) and len({device.id for device in grid.flat}) == 16
    number = np.vectorize(lambda device: device.slice_index)(grid)
    first, second = np.split(number, 2, axis)
    assert not first.any() and second.all(), "each half along the axis is one slice"


@pytest.mark.parametrize(
    "sizes, across, devices, said",
    [
        ((3, 1, 1, 4), None, chips(2, 1, 6), "neither data nor fsdp"),
        ((2, 4, 2, 1), {"fsdp": 4}, chips(2, 2, 4), "makes 4 slices, and there are 2"),
        ((2, 4, 2, 1), {"pipe": 2}, chips(2, 2, 4), "no mesh axis is named pipe"),
        ((2, 8, 1, 1), {"tensor": 2}, chips(2, 2, 4), "tensor=1 does not divide into 2 parts"),
        ((2, 4, 1, 1), {"data": 2}, chips(1, 2, 4), "lies across 2 slices, and the devices are of one"),
        ((1, 12, 1, 1), None, chips(2, 1, 8)[:12], "the slices have 8, 4 devices"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(sizes, across, devices, said):
    with pytest.raises(InputError, match=said):
        device_grid(dict(zip(MESH_AXIS_NAMES, sizes)), devices, across)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tiny:llama", "tiny:qwen3", "tiny:gemma2")]


@pytest.mark.parametrize("name", ["tiny:qwen3_moe?num_hidden_layers=2", *SLOW])
def test_sharded_forward_equals_the_unsharded_one(name):
    source = open_source(name)
    family = get_family(source.config.model_type)
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    alone, sharded = load_model(source)[0], load_model(source, mesh=mesh)[0]
    assert sharded.mesh is mesh
    tokens = jnp.asarray(np.random.RandomState(0).randint(0, config.vocab_size, (2, 9)), jnp.int32)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    want = np.asarray(forward(alone, tokens))
    with jax.sharding.set_mesh(mesh):
        got = np.asarray(forward(sharded, tokens))
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    weights = 0
    for path, leaf in nnx.to_flat_state(nnx.state(sharded, nnx.Param)):
        value, stacked = leaf.get_raw_value(), str(path[0]) == "layers"
        shape = value.shape[1:] if stacked else value.shape
        if len(shape) >= 2 and np.prod(shape) >= 256:
            assert value.sharding.is_equivalent_to(NamedSharding(mesh, leaf.get_metadata("out_sharding")), value.ndim), path
            assert not value.sharding.is_fully_replicated, path
            weights += 1
    assert weights >= 7


def test_abstract_and_eager_construction_give_one_state_tree():
    source = open_source("tiny:llama?num_hidden_layers=2")
    family = get_family("llama")
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    eager = family.create(config, rngs=nnx.Rngs(3), mesh=mesh)
    abstract = nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(3), mesh=mesh))
    other = nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(3), mesh=build_mesh(fsdp=4, devices=jax.devices()[:4])))

    def tree(model):
        return {
            path: (leaf.get_raw_value().shape, leaf.get_raw_value().dtype, leaf.get_metadata("out_sharding"))
            for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
        }

    assert tree(eager) == tree(abstract)
    assert eager.mesh is abstract.mesh is mesh and nnx.split(eager)[0] != nnx.split(other)[0]
