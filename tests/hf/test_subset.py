"""A subset loads in transformers with nothing missing and nothing left over, and computes what the first layers of the whole compute."""

import json

import numpy as np
import pytest

from labkit.hf import open_source, write_subset
from labkit.hf.decoder_pattern import decoder_pattern
from labkit.hf.layer_names import is_mtp, layer_index

from .conftest import write_config, write_shard

CASES = [
    ("tiny:llama", 2),
    ("tiny:qwen3", 3),
    ("tiny:qwen3_moe", 2),
    ("tiny:gemma2", 3),
    ("smollm2-135m", 2),
    ("tiny:qwen3_moe?mlp_only_layers=[0,4]", 3),
    ("tiny:qwen3?use_sliding_window=true&sliding_window=5&max_window_layers=2", 4),
    ("tiny:smollm3", 4),
]


@pytest.mark.parametrize("model, layers", CASES)
def test_a_subset_loads_and_computes_the_same(tmp_path, model, layers):
    import torch
    from transformers import AutoModelForCausalLM

    source = open_source(model)
    out = write_subset(source, layers, tmp_path / "subset")
    subset = open_source(out)
    assert subset.config.effective["num_hidden_layers"] == layers
    for name in subset.tensors:
        assert subset.tensors.read(name).tobytes() == source.tensors.read(name).tobytes()
    network, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    whole = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    del whole.model.layers[layers:]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 100, (1, 24)))
    with torch.no_grad():
        assert torch.equal(network(tokens, use_cache=False).logits, whole(tokens, use_cache=False).logits)


MORE = [("jamba", 5), ("bamba", 2), ("nemotron_h", 3), ("gemma3_text", 2), ("deepseek_v3", 2), ("qwen3_next", 4), ("gpt2", 2), ("gpt_oss", 3)]


@pytest.mark.parametrize("family, layers", MORE)
def test_subsets_of_other_families_keep_their_kinds(tmp_path, family, layers):
    from transformers import AutoModelForCausalLM

    source = open_source(f"tiny:{family}")
    out = write_subset(source, layers, tmp_path / "subset")
    assert decoder_pattern(open_source(out)).kinds == decoder_pattern(source).kinds[:layers]
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info


def test_companions_come_along(tmp_path):
    source = open_source("smollm2-135m")
    names = {path.name for path in write_subset(source, 1, tmp_path / "s").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors"} <= names
    assert not any(name.startswith(".") for name in names)


def test_per_layer_lists_are_cut(tmp_path):
    source = open_source("tiny:gemma2")
    config = json.loads((write_subset(source, 2, tmp_path / "s") / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] and config["num_hidden_layers"] == 2
    moe = open_source("tiny:qwen3_moe?mlp_only_layers=[0,4]")
    assert json.loads((write_subset(moe, 3, tmp_path / "m") / "config.json").read_text())["mlp_only_layers"] == [0]


def test_a_list_as_long_as_the_stack_that_is_no_per_layer_list(tmp_path):
    names = ["model.embed_tokens.weight", "lm_head.weight"] + [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    write_shard(write_config(tmp_path, eos_token_id=[7, 8, 9]) / "model.safetensors", names)
    config = json.loads((write_subset(open_source(tmp_path), 1, tmp_path / "s") / "config.json").read_text())
    assert config["eos_token_id"] == [7, 8, 9] and config["architectures"] == ["LlamaForCausalLM"]


def test_mtp_layers_are_dropped_and_listed(tmp_path):
    names = ["model.embed_tokens.weight", "lm_head.weight", "mtp.fc.weight"] + [f"model.layers.{i}.mlp.up_proj.weight" for i in range(5)]
    write_shard(write_config(tmp_path, num_nextn_predict_layers=2) / "model.safetensors", names)
    out = write_subset(open_source(tmp_path), 2, tmp_path / "s")
    manifest = json.loads((out / "labkit_subset.json").read_text())
    assert manifest["dropped_layers"] == [2]
    assert manifest["dropped_mtp"] == ["model.layers.3.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight", "mtp.fc.weight"]
    assert set(open_source(out).tensors) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    }
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("layers", [0, -1, 6, 1.5, None, True])
def test_an_impossible_number_of_layers(tmp_path, refused, layers):
    refused(lambda: write_subset(open_source("tiny:llama"), layers, tmp_path / "s"), "subset of", "has 5")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path, refused):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "precious").write_text("x")
    refused(lambda: write_subset(open_source("tiny:llama"), 1, tmp_path / "s"), "exists already", str(tmp_path / "s"))
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "precious"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, refused):
    import collections
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: collections.namedtuple("usage", "total used free")(100, 90, 10))
    refused(lambda: write_subset(open_source("tiny:llama"), 1, tmp_path / "s"), "10 are free", "bytes are needed")
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch, refused):
    source = open_source("tiny:llama")
    read, calls = source.tensors.read, []

    def fail(name):
        calls.append(name)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return read(name)

    monkeypatch.setattr(source.tensors, "read", fail)
    refused(lambda: write_subset(source, 1, tmp_path / "s"), "No space left on device")
    assert not list(tmp_path.iterdir())


LAYERS_IN_NAMES = {
    "model.layers.12.self_attn.q_proj.weight": 12,
    "transformer.h.3.attn.c_attn.weight": 3,
    "gpt_neox.layers.0.mlp.dense_h_to_4h.bias": 0,
    "backbone.layers.7.mixer.A_log": 7,
    "model.layers.2.mlp.experts.31.up_proj.weight": 2,
    "model.embed_tokens.weight": None,
    "lm_head.weight": None,
    "model.vision_tower.encoder.layers.4.mlp.fc1.weight": None,
    "transformer.blocks.5.norm.weight": 5,
}


@pytest.mark.parametrize("name, layer", LAYERS_IN_NAMES.items())
def test_layer_indices(name, layer):
    assert layer_index(name) == layer


@pytest.mark.parametrize(
    "name, mtp",
    [("model.layers.61.mlp.gate.weight", True), ("model.layers.60.mlp.gate.weight", False), ("mtp.layers.0.norm.weight", True), ("model.empty.weight", False)],
)
def test_mtp_names(name, mtp):
    assert is_mtp(name, 61) is mtp
