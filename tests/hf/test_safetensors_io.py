"""Headers that lie, dtypes bit for bit, and the streaming writer against the safetensors library."""

import gc
import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from labkit.errors import InputError
from labkit.hf.safetensors_io import DTYPES, Slot, read_header, read_tensor, write_safetensors


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


LIES = {
    "too short": (b"", None, "too short"),
    "absurd length": (b"{}", 1 << 60, "claims a length"),
    "longer than the file": (b"{}", 500, "truncated"),
    "not JSON": (b"{nope", None, "not valid JSON"),
    "not UTF-8": (b"\xff\xfe{}", None, "not valid JSON"),
    "NaN": (b'{"a": NaN}', None, "not valid JSON"),
    "a list": (b"[]", None, "not a JSON object"),
    "deep": (b"[" * 200_000, None, "not valid JSON"),
}


@pytest.mark.parametrize("header, length, message", LIES.values(), ids=LIES.keys())
def test_broken_header(tmp_path, refused, header, length, message):
    path = tmp_path / "model.safetensors"
    if message == "too short":
        path.write_bytes(b"1234")
    else:
        raw_file(path, header, length=length)
    refused(lambda: read_header(path), str(path), message)


LYING_TENSORS = {
    "wrong size": ({"w": entry(0, 4)}, 4, "lies about a size"),
    "overlap": ({"a": entry(0, 8), "w": entry(4, 12)}, 12, "overlaps a"),
    "gap": ({"a": entry(0, 8), "w": entry(12, 20)}, 20, "belong to no tensor"),
    "beyond the end": ({"w": entry(0, 8)}, 4, "truncated"),
    "reversed": ({"w": entry(8, 0)}, 8, "not [begin, end]"),
    "negative size": ({"w": entry(0, 8, (-2,))}, 8, "not a list of sizes"),
    "boolean size": ({"w": entry(0, 4, (True,))}, 4, "not a list of sizes"),
    "unknown dtype": ({"w": entry(0, 8, dtype="F7")}, 8, "dtype 'F7'"),
    "extra key": ({"w": {**entry(0, 8), "x": 1}}, 8, "nothing else"),
    "not an object": ({"w": 3}, 0, "nothing else"),
    "starts late": ({"w": entry(4, 12)}, 12, "belong to no tensor"),
}


@pytest.mark.parametrize("header, size, message", LYING_TENSORS.values(), ids=LYING_TENSORS.keys())
def test_lying_tensor_is_named(tmp_path, refused, header, size, message):
    path = raw_file(tmp_path / "model.safetensors", header, bytes(size))
    refused(lambda: read_header(path), str(path), "tensor w", message)


def test_bytes_after_the_last_tensor(tmp_path, refused):
    path = raw_file(tmp_path / "model.safetensors", {"w": entry(0, 8)}, bytes(9))
    refused(lambda: read_header(path), str(path), "1 bytes after its last tensor (w)")


def test_a_name_listed_twice(tmp_path, refused):
    text = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = raw_file(tmp_path / "model.safetensors", text, bytes(8))
    refused(lambda: read_header(path), str(path), "'w' twice")


def samples():
    generator = np.random.default_rng(0)
    for name, dtype in DTYPES.items():
        bits = generator.integers(0, 256, 24 * dtype.itemsize, np.uint8)
        yield name, (bits & 1 if name == "BOOL" else bits).view(dtype).reshape(2, 3, 4)


def test_every_dtype_bit_for_bit_both_ways(tmp_path):
    arrays = dict(samples())
    write_safetensors(tmp_path, [Slot(name, name, array.shape) for name, array in arrays.items()], arrays.values())
    infos, metadata = read_header(tmp_path / "model.safetensors")
    assert metadata == {"format": "pt"}
    for name, array in arrays.items():
        back = read_tensor(infos[name])
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()
        with pytest.raises(ValueError):
            back[...] = 0


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3.5, np.float16),
        "empty": np.empty((0, 4), np.int64),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    infos, _ = read_header(tmp_path / "model.safetensors")
    assert {name: read_tensor(info).tobytes() for name, info in infos.items()} == {name: array.tobytes() for name, array in arrays.items()}
    assert {name: read_tensor(info).shape for name, info in infos.items()} == {name: array.shape for name, array in arrays.items()}


def test_the_library_reads_what_the_writer_writes(tmp_path):
    arrays = {f"layer.{i}": np.random.default_rng(i).standard_normal((4, 8)).astype(np.float32) for i in range(5)}
    files = write_safetensors(tmp_path, [Slot(n, "F32", a.shape) for n, a in arrays.items()], iter(arrays.values()), max_shard_size=300)
    assert [file.name for file in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 128
    loaded = {}
    for file in files:
        part = load_file(file)
        assert {index["weight_map"][name] for name in part} == {file.name}
        loaded.update(part)
    assert loaded.keys() == arrays.keys() and all(np.array_equal(loaded[name], arrays[name]) for name in arrays)


WRONG_ARRAYS = {
    "dtype": (lambda: [np.zeros(2, np.float64), np.zeros(2, np.float32)], "float64"),
    "shape": (lambda: [np.zeros(3, np.float32), np.zeros(2, np.float32)], "(3,)"),
    "too few": (lambda: [np.zeros(2, np.float32)], "Fewer arrays"),
    "too many": (lambda: [np.zeros(2, np.float32)] * 3, "More arrays"),
}


@pytest.mark.parametrize("make, message", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS.keys())
def test_a_failed_write_leaves_nothing(tmp_path, refused, make, message):
    slots = [Slot("a", "F32", (2,)), Slot("b", "F32", (2,))]
    refused(lambda: write_safetensors(tmp_path, slots, iter(make()), max_shard_size=8), message)
    assert list(tmp_path.iterdir()) == []


def test_a_name_written_twice(tmp_path, refused):
    refused(lambda: write_safetensors(tmp_path, [Slot("a", "F32", (2,))] * 2, []), "written twice: a")


def test_an_exception_in_the_stream_leaves_nothing(tmp_path):
    def stream():
        yield np.zeros(2, np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path, [Slot("a", "F32", (2,)), Slot("b", "F32", (2,))], stream(), max_shard_size=8)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_holds_one_tensor(tmp_path):
    slots = [Slot(f"t{i}", "F32", (1 << 20,)) for i in range(8)]
    gc.collect()
    tracemalloc.start()
    write_safetensors(tmp_path, slots, (np.full(slot.shape, i, np.float32) for i, slot in enumerate(slots)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * slots[0].nbytes, f"{peak:,}"


def test_a_file_that_shrinks_after_opening(tmp_path, refused):
    path = raw_file(tmp_path / "model.safetensors", {"w": entry(0, 8)}, bytes(8))
    info = read_header(path)[0]["w"]
    path.write_bytes(path.read_bytes()[:-4])
    refused(lambda: read_tensor(info), "became shorter", "tensor w")


def test_read_only_folder(tmp_path):
    target = tmp_path / "missing"
    with pytest.raises(InputError, match="Writing failed"):
        write_safetensors(target, [Slot("a", "F32", (2,))], [np.zeros(2, np.float32)])
