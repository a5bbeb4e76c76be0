"""The checkpoint on disk: plain Orbax reads it, any number of devices restores it, and everything that does not fit is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from labkit.converters import convert, load_model, read_metadata, restore
from labkit.converters.checkpoint import CheckpointReader, CheckpointWriter
from labkit.converters.filling import abstract_model, dotted, state_arrays
from labkit.errors import InputError
from labkit.models import get_family

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """stored(scan) -> a checkpoint of tiny gemma2, whose layers lie in several stacks or carry per-layer data; not to be changed."""
    folder = tmp_path_factory.mktemp("stored")
    made = {scan: convert(tiny("gemma2"), folder / f"scan-{scan}", scan=scan).path for scan in (True, False)}
    return made.__getitem__


def flat(tree):
    return {dotted(tuple(p.key for p in path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_plain_orbax_restores_it_without_the_lab(tiny, stored):
    arrays = state_arrays(load_model(tiny("gemma2"))[0])
    for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
        tree = flat(checkpointer.restore(stored(True)))
        assert tree.keys() == arrays.keys() and all(np.array_equal(tree[p].astype(np.float32), arrays[p]) for p in arrays)
        assert len(flat(checkpointer.restore(stored(False)))) > len(arrays)
    unscanned = flat(ocp.StandardCheckpointer().restore(stored(False)))
    assert np.array_equal(unscanned["layers.1.mlp.up_proj.kernel"], tiny("gemma2").tensors.read("model.layers.1.mlp.up_proj.weight").T)
    metadata = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(stored(True))
    assert metadata.custom_metadata["labkit"]["fingerprint"] == tiny("gemma2").fingerprint


def test_plain_orbax_restores_into_the_models_own_state(tiny, stored):
    family, (model, config, _) = get_family("gemma2"), load_model(tiny("gemma2"))
    _, state = nnx.split(nnx.eval_shape(lambda: family.create(config, rngs=nnx.Rngs(0))))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nnx.to_pure_dict(state))
    tree = flat(ocp.StandardCheckpointer().restore(stored(True), target))
    assert all(isinstance(leaf, jax.Array) and np.array_equal(leaf, state_arrays(model)[path]) for path, leaf in tree.items()) and len(tree) == len(
        state_arrays(model)
    )


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, np.int64, np.int8, np.uint8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
@pytest.mark.parametrize("shape, stacked", [((), False), ((3,), False), ((3, 2, 5), True), ((1, 4), True), ((0, 4), False)])
def test_every_dtype_is_written_and_read_bit_for_bit(tmp_path, dtype, shape, stacked):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    writer = CheckpointWriter(tmp_path)
    writer.declare("a.b", shape, dtype, stacked)
    for index in range(shape[0]) if stacked else [None]:
        writer.write("a.b", index, array if index is None else array[index])
    writer.close({})
    reader = CheckpointReader(tmp_path)
    mine = np.stack([reader.read("a.b", i) for i in range(shape[0])]) if stacked else reader.read("a.b")
    assert mine.dtype == array.dtype and mine.shape == array.shape and mine.tobytes() == array.tobytes()
    if array.size:
        theirs = ocp.StandardCheckpointer().restore(tmp_path)["a"]["b"]
        assert np.dtype(theirs.dtype).name == array.dtype.name and np.asarray(theirs).tobytes() == array.tobytes()


def test_the_writer_refuses_what_was_not_declared_and_writes_nothing_twice(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.declare("a", (2, 3), np.float32, True)
    for wrong in (np.zeros((2, 3), np.float32), np.zeros(3, np.float64)):
        with pytest.raises(ValueError, match="for a float32"):
            writer.write("a", 0, wrong)
    writer.write("a", 0, np.zeros(3, np.float32))
    with pytest.raises(FileExistsError):
        writer.write("a", 0, np.zeros(3, np.float32))


def test_metadata_tells_what_was_converted(tiny, stored):
    metadata, source = read_metadata(stored(True)), tiny("gemma2")
    assert (metadata["family"], metadata["fingerprint"], metadata["scan"], metadata["dtype"]) == ("gemma2", source.fingerprint, True, None)
    assert metadata["config"]["raw"] == source.config.raw and metadata["tensors"].keys() == source.tensors.keys()
    assert metadata["versions"].keys() == {"orbax-checkpoint", "flax", "jax", "transformers"}


@pytest.mark.parametrize("scan", [True, False])
def test_a_wrong_layout_flag_is_detected_not_obeyed(stored, scan):
    with pytest.raises(
        InputError, match="The checkpoint is scanned and was asked for as unscanned" if scan else "The checkpoint is unscanned and was asked for as scanned"
    ):
        restore(stored(scan), scan=not scan)


def test_another_source_and_another_family_are_refused(tiny, stored):
    with pytest.raises(InputError, match=r"made from tiny:gemma2 \(gemma2\).* not from tiny:llama \(llama\)"):
        restore(stored(True), source=tiny("llama"))
    _, llama, _ = load_model(tiny("llama"))
    with pytest.raises(InputError, match="holds a gemma2 model and a LlamaConfig was given"):
        restore(stored(True), config=llama)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("layers, other", [(2, 3), (3, 2)])
def test_another_number_of_layers_is_refused(tiny, tmp_path, scan, layers, other):
    convert(tiny(f"llama?num_hidden_layers={layers}"), tmp_path / "ckpt", scan=scan)
    _, config, _ = load_model(tiny(f"llama?num_hidden_layers={other}"))
    wanted = (
        rf"layers.mlp.down_proj.kernel is stored as \({layers}, .* and needed as \({other},"
        if scan
        else r"layers.2.\S+ \(.* is (needed and not stored|stored and not needed)"
    )
    with pytest.raises(InputError, match=wanted):
        restore(tmp_path / "ckpt", config=config)
    assert restore(tmp_path / "ckpt")[1].plan.num_layers == layers


def test_a_changed_shape_is_refused_with_both_shapes(tiny, stored):
    _, config, _ = load_model(tiny("gemma2"))
    with pytest.raises(InputError, match=r"embed_tokens.embedding is stored as \((\d+), .* and needed as \(7, "):
        restore(stored(True), config=dataclasses.replace(config, vocab_size=7))


def copy_of(path, out):
    import shutil

    return shutil.copytree(path, out)


DAMAGES = {
    "cut short": (lambda p: os.truncate(p / "norm.weight" / "0", 6), "A chunk has 6 bytes"),
    "chunk gone": (lambda p: (p / "norm.weight" / "0").unlink(), "norm.weight/0"),
    "header gone": (lambda p: (p / "norm.weight" / ".zarray").unlink(), "norm.weight/.zarray"),
    "tree gone": (lambda p: (p / "_METADATA").unlink(), "_METADATA"),
    "no metadata": (lambda p: (p / "labkit.json").unlink(), "no checkpoint of the lab"),
    "metadata broken": (lambda p: (p / "labkit.json").write_text("{"), "cannot be read"),
    "another schema": (lambda p: (p / "labkit.json").write_text('{"schema": 99}'), "another schema"),
    "nan": (lambda p: (p / "norm.weight" / "0").write_bytes(b"\xff" * (p / "norm.weight" / "0").stat().st_size), "norm.weight is nan"),
    "another program's": (lambda p: rewrite_header(p / "norm.weight" / ".zarray", compressor={"id": "zstd"}), "another program wrote it"),
}


def rewrite_header(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(stored, tmp_path, name):
    damage, message = DAMAGES[name]
    path = copy_of(stored(True), tmp_path / "ckpt")
    restore(path)
    damage(path)
    with pytest.raises(InputError, match=message):
        restore(path)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(InputError, match="no such checkpoint"):
        restore(tmp_path / "nothing")


PROCESS = """
import sys, jax, numpy as np
from labkit.converters import restore
from labkit.converters.filling import state_arrays
path, shape = sys.argv[1], tuple(map(int, sys.argv[2].split(",")))
assert jax.device_count() == int(sys.argv[3]), jax.devices()
mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 4)
model, config, _ = restore(path, mesh=mesh)
arrays = state_arrays(model)
plain = state_arrays(restore(path)[0])
assert all(np.array_equal(np.asarray(arrays[p]), np.asarray(plain[p])) for p in plain)
split = [p for p, a in arrays.items() if a.addressable_shards[0].data.size < a.size]
assert all(len(a.sharding.device_set) == jax.device_count() for a in arrays.values())
print(len(split), "of", len(arrays), "sharded")
"""


def in_process(code, devices, *arguments):
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_a_process_with_eight_devices_restores_what_one_device_wrote(stored):
    split, _, total, _ = in_process(PROCESS, 8, stored(True), "2,2,2,1", 8)
    assert 0 < int(split) <= int(total)


WRITE = """
import sys, jax, ml_dtypes
from labkit.converters import convert
from labkit.hf import open_source
assert jax.device_count() == 8
convert(open_source(sys.argv[1]), sys.argv[2], scan=sys.argv[3] == "True", dtype=ml_dtypes.bfloat16)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_what_eight_devices_wrote_is_restored_by_one_two_and_another_mesh(tiny, tmp_path, scan):
    in_process(WRITE, 8, tiny("qwen3_moe").path, tmp_path / "ckpt", scan)
    restore(tmp_path / "ckpt", scan=scan)
    assert len(flat(ocp.StandardCheckpointer().restore(tmp_path / "ckpt"))) == len(CheckpointReader(tmp_path / "ckpt").headers)
    for devices, shape in ((1, "1,1,1,1"), (2, "1,1,2,1"), (2, "1,2,1,1"), (8, "1,4,2,1"), (8, "1,2,2,2")):
        split = int(in_process(PROCESS, devices, tmp_path / "ckpt", shape, devices)[0])
        assert (split > 0) == (devices > 1)


def test_abstract_models_hold_no_numbers(tiny):
    _, config, _ = load_model(tiny("llama"))
    abstract = abstract_model(get_family("llama"), config)
    assert all(isinstance(leaf.get_raw_value(), jax.ShapeDtypeStruct) for leaf in abstract.leaves.values()) and abstract.dtypes["norm.weight"] == jnp.float32
