"""Index, shards and headers are cross-checked; each disagreement is refused with file and tensor named."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from labkit.hf.tensors import read_table

from .conftest import write_config, write_index, write_shard

SHARD = "model-0000{}-of-00003.safetensors"
FIRST = "model.layers.0.mlp.up_proj.weight"


def weight_map(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_a_good_checkpoint(sharded):
    table = read_table(sharded)
    assert set(table) == set(weight_map(sharded)) and len(table) == 7
    assert table.nbytes == 7 * 48 and table.size == 7 * 12 and len(table.shards) == 3
    info = table[FIRST]
    assert (info.name, info.shard, info.dtype, info.shape, info.nbytes) == (FIRST, sharded / SHARD.format(1), "F32", (3, 4), 48)
    for shard in table.shards:
        for name, array in load_file(shard).items():
            assert np.array_equal(table.read(name), array)


def test_a_name_the_table_lacks(sharded, refused):
    refused(lambda: read_table(sharded).read("nope.weight"), "no tensor nope.weight")


def test_in_the_index_but_in_no_shard(sharded, refused):
    write_index(sharded, {**weight_map(sharded), "mtp.fc.weight": SHARD.format(2)})
    refused(lambda: read_table(sharded), "no shard holds", "mtp.fc.weight", SHARD.format(2), str(sharded))


def test_in_a_shard_but_not_in_the_index(sharded, refused):
    write_index(sharded, {name: shard for name, shard in weight_map(sharded).items() if name != FIRST})
    refused(lambda: read_table(sharded), "does not list", FIRST, str(sharded / SHARD.format(1)))


def test_in_two_shards(sharded, refused):
    write_shard(sharded / SHARD.format(2), [name for name, shard in weight_map(sharded).items() if shard == SHARD.format(2)] + [FIRST])
    refused(lambda: read_table(sharded), "in two shards", FIRST, SHARD.format(1), SHARD.format(2))


def test_the_index_points_at_the_wrong_shard(sharded, refused):
    write_index(sharded, {**weight_map(sharded), FIRST: SHARD.format(2)})
    refused(lambda: read_table(sharded), "wrong shard", FIRST, SHARD.format(1), SHARD.format(2))


def test_a_missing_shard(sharded, refused):
    (sharded / SHARD.format(2)).unlink()
    refused(lambda: read_table(sharded), "missing", SHARD.format(2), "tensor model.layers.1.mlp.up_proj.weight")


def test_a_truncated_shard(sharded, refused):
    path = sharded / SHARD.format(3)
    path.write_bytes(path.read_bytes()[:-10])
    refused(lambda: read_table(sharded), "truncated", str(path), "tensor ")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors", "", "config.json", "a\0.safetensors"])
def test_an_index_path_that_leaves_the_directory(sharded, refused, name):
    write_index(sharded, {**weight_map(sharded), "x.weight": name})
    refused(lambda: read_table(sharded), "outside the directory", "tensor x.weight")


def test_a_link_that_leaves_the_directory(sharded, tmp_path_factory, refused):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.safetensors"
    path = sharded / SHARD.format(1)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    refused(lambda: read_table(sharded), "leaves the directory", SHARD.format(1))


def test_a_link_in_a_single_file_checkpoint(tmp_path, tmp_path_factory, refused):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.safetensors"
    write_shard(elsewhere, ["lm_head.weight"])
    (tmp_path / "model.safetensors").symlink_to(elsewhere)
    refused(lambda: read_table(tmp_path), "leaves the directory", "model.safetensors")


def test_links_of_the_hub_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_shard(blobs / "0123", ["lm_head.weight"])
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert list(read_table(snapshot)) == ["lm_head.weight"]


def test_present_but_not_indexed(sharded, refused):
    write_shard(sharded / "model-mtp-of-00002.safetensors", ["mtp.fc.weight"])
    refused(lambda: read_table(sharded), "present and not indexed", "model-mtp-of-00002.safetensors", "mtp.fc.weight")


def test_several_files_without_an_index(sharded, refused):
    (sharded / "model.safetensors.index.json").unlink()
    refused(lambda: read_table(sharded), "3 weight files and no model.safetensors.index.json")


def test_one_shard_of_several(sharded, refused):
    for name in ("model.safetensors.index.json", SHARD.format(2), SHARD.format(3)):
        (sharded / name).unlink()
    refused(lambda: read_table(sharded), SHARD.format(1), "index")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}']
)
def test_a_broken_index(sharded, refused, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(lambda: read_table(sharded), "index")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_only(tmp_path, refused, name):
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"\x80\x04.")
    text = refused(lambda: read_table(tmp_path), "pickle", name)
    assert "save_pretrained" in text, "the way out"


def test_no_weights(tmp_path, refused):
    write_config(tmp_path)
    refused(lambda: read_table(tmp_path), "no weights", str(tmp_path))
