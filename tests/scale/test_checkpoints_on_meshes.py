"""A checkpoint saved from one mesh restores on every other and on one device, each device's part by itself."""

import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from labkit.converters import filling, load_model, restore
from labkit.converters.filling import abstract_model, state_arrays
from labkit.converters.save import save
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.models import get_family
from labkit.parity.meshes import MESHES
from labkit.scale.mesh import build_mesh

AXES = ("data", "fsdp", "tensor", "expert")
TRAINING = {"steps": 3}


def mesh_of(sizes):
    return build_mesh(**dict(zip(AXES, sizes)), devices=jax.devices()[: int(np.prod(sizes))])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(source, the model's arrays, folder): saved from a mesh of (1, 2, 2, 2)."""
    source, out = open_source("tiny:qwen3_moe?num_hidden_layers=2"), tmp_path_factory.mktemp("saved") / "ckpt"
    model, _, _ = load_model(source, mesh=mesh_of((1, 2, 2, 2)))
    save(model, source, out, training=TRAINING)
    return source, {path: np.asarray(array) for path, array in state_arrays(model).items()}, out


@pytest.mark.parametrize("sizes", [*MESHES, (1, 1, 1, 1)], ids=str)
def test_restores_on_every_mesh_bit_for_bit(saved, sizes):
    _, arrays, out = saved
    mesh = mesh_of(sizes)
    model, config, _ = restore(out, mesh=mesh)
    specs = abstract_model(get_family("qwen3_moe"), config, mesh).leaves
    found = state_arrays(model)
    assert found.keys() == arrays.keys() and model.mesh == mesh
    for path, leaf in specs.items():
        array = found[filling.dotted(path)]
        assert np.array_equal(np.asarray(array), arrays[filling.dotted(path)]), path
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, leaf.get_metadata("out_sharding")), array.ndim), path


def test_restores_on_one_device_without_a_mesh(saved):
    _, arrays, out = saved
    found = state_arrays(restore(out)[0])
    assert all(np.array_equal(np.asarray(found[path]), array) for path, array in arrays.items())


def buffers(monkeypatch, out, mesh):
    """(bytes of the largest host buffer, bytes of the largest part of a device, bytes of the largest parameter) of one restore."""
    made, original = [], filling.poisoned

    def noted(shape, dtype):
        made.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return original(shape, dtype)

    monkeypatch.setattr(sys.modules["labkit.converters.restore"], "poisoned", noted)
    arrays = state_arrays(restore(out, mesh=mesh)[0]).values()
    return max(made), max(shard.data.nbytes for array in arrays for shard in array.addressable_shards), max(array.nbytes for array in arrays)


def test_no_host_buffer_is_larger_than_a_devices_part(saved, monkeypatch):
    largest, part, whole = buffers(monkeypatch, saved[2], mesh_of((1, 2, 2, 2)))
    assert largest == part < whole / 3
    assert buffers(monkeypatch, saved[2], None)[0] == whole, "control: one device takes whole parameters"


def test_parts_that_several_devices_hold_are_read_once(saved, monkeypatch):
    mesh, reads = mesh_of((2, 2, 2, 1)), []
    original = filling.place_parts

    def counted(part, variable, mesh):
        def once(index):
            reads.append((part.args[0], str(index)))
            return part(index)

        return original(once, variable, mesh)

    monkeypatch.setattr(filling, "place_parts", counted)
    restore(saved[2], mesh=mesh)
    assert reads and len(reads) == len(set(reads))


def test_a_damaged_value_is_named_by_its_parameter(saved, tmp_path):
    shutil.copytree(saved[2], tmp_path / "ckpt")
    chunk = next((tmp_path / "ckpt" / "layers.0.0.mlp.experts.down_proj").glob("0.*"))
    chunk.write_bytes(np.full(chunk.stat().st_size // 4, np.nan, np.float32).tobytes())
    with pytest.raises(InputError, match="layers.0.0.mlp.experts.down_proj"):
        restore(tmp_path / "ckpt", mesh=mesh_of((1, 2, 2, 2)))


def test_two_layers_are_refused_where_three_are_wanted(saved):
    _, config, _ = load_model(open_source("tiny:qwen3_moe?num_hidden_layers=3"), dtype=jnp.float32)
    with pytest.raises(InputError, match="do not fit"):
        restore(saved[2], mesh=mesh_of((1, 2, 2, 2)), config=config)
