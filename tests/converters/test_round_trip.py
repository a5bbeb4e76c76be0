"""Hugging Face -> Orbax -> Hugging Face, bit for bit, for every family and both layouts on disk; and what must not survive it unnoticed."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from labkit.converters import compare_safetensors, convert, export, load_model, read_metadata, restore
from labkit.converters.filling import state_arrays
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.hf.tensors import read_table

from .conftest import rewritten
from .test_loading import embedding_as_head, fused

SPECS = ["llama", "llama?num_hidden_layers=11&attention_bias=true&mlp_bias=true", "qwen3", "qwen3_moe", "gemma2"]


def same_models(one, two):
    a, b = state_arrays(one), state_arrays(two)
    return a.keys() == b.keys() and all(a[p].dtype == b[p].dtype and np.array_equal(a[p], b[p]) for p in a)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_is_bit_exact(tiny, tmp_path, spec, scan):
    source = tiny(spec)
    conversion = convert(source, tmp_path / "ckpt", scan=scan)
    result = export(tmp_path / "ckpt", tmp_path / "back")
    assert compare_safetensors(source.path, tmp_path / "back") == []
    assert conversion.nbytes == source.tensors.nbytes == result.nbytes and not conversion.narrowed and not result.notes
    for path in source.path.iterdir():
        if path.suffix == ".json":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    model, config, metadata = restore(tmp_path / "ckpt", scan=scan, dtype=jnp.float32, source=source)
    loaded, loaded_config, _ = load_model(source)
    assert same_models(model, loaded) and config == loaded_config and metadata["fingerprint"] == source.fingerprint


@pytest.mark.parametrize("scan", [True, False])
def test_fused_experts_come_back_fused(tiny, tmp_path, scan):
    source = rewritten(tiny("qwen3_moe"), tmp_path / "fused", fused)
    convert(source, tmp_path / "ckpt", scan=scan)
    export(tmp_path / "ckpt", tmp_path / "back")
    assert compare_safetensors(source.path, tmp_path / "back") == []
    assert any(name.endswith("experts.gate_up_proj") for name in read_table(tmp_path / "back"))
    published, _, _ = load_model(tiny("qwen3_moe"))
    assert same_models(restore(tmp_path / "ckpt", dtype=jnp.float32)[0], published)


def test_shards_and_index_come_back_as_they_were(tiny, tmp_path):
    source = rewritten(tiny("qwen3"), tmp_path / "sharded", max_shard_size=60_000)
    assert len(source.tensors.shards) > 2
    convert(source, tmp_path / "ckpt")
    result = export(tmp_path / "ckpt", tmp_path / "back")
    back = read_table(tmp_path / "back")
    assert [s.name for s in back.shards] == [s.name for s in source.tensors.shards] == result.shards
    assert {n: (i.shard.name, i.begin, i.dtype) for n, i in back.items()} == {n: (i.shard.name, i.begin, i.dtype) for n, i in source.tensors.items()}
    weight_map = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    in_headers = {}
    for shard in back.shards:
        with safe_open(shard, "np") as file:
            in_headers |= dict.fromkeys(file.keys(), shard.name)
    assert weight_map == in_headers


def test_an_equal_tied_head_on_disk_is_a_finding_and_is_not_written(tiny, tmp_path):
    source = rewritten(tiny("gemma2"), tmp_path / "m", embedding_as_head(1), max_shard_size=60_000)
    conversion = convert(source, tmp_path / "ckpt")
    assert [f["cause"] for f in conversion.findings] == ["a tied tensor is on disk as well"]
    result = export(tmp_path / "ckpt", tmp_path / "back")
    assert result.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight"} and "lm_head.weight is not written" in result.notes[0]
    assert compare_safetensors(source.path, tmp_path / "back") == ["lm_head.weight is only in the first"]
    assert compare_safetensors(source.path, tmp_path / "back", ignore=result.dropped) == []
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"] and open_source(tmp_path / "back").tensors.keys() == index["weight_map"].keys()


def test_a_tied_head_that_differs_survives_the_round_trip(tiny, tmp_path):
    source = rewritten(tiny("gemma2"), tmp_path / "m", embedding_as_head(2))
    conversion = convert(source, tmp_path / "ckpt")
    assert [f["cause"] for f in conversion.findings] == ["the tied head on disk differs"]
    model, config, _ = restore(tmp_path / "ckpt")
    assert not config.tie_word_embeddings and "lm_head.kernel" in state_arrays(model)
    assert export(tmp_path / "ckpt", tmp_path / "back").dropped == {} and compare_safetensors(source.path, tmp_path / "back") == []


def test_ignored_buffers_are_recorded(tiny, tmp_path):
    def buffer(arrays):
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    conversion = convert(rewritten(tiny("llama"), tmp_path / "m", buffer), tmp_path / "ckpt")
    assert conversion.findings[0]["component"] == "model.layers.0.self_attn.rotary_emb.inv_freq" and "16 bytes" in conversion.findings[0]["evidence"]
    assert read_metadata(tmp_path / "ckpt")["dropped"]["model.layers.0.self_attn.rotary_emb.inv_freq"]["nbytes"] == 16


def stray(arrays):
    """A float32 norm and one float32 layer among bfloat16, with values that bfloat16 lacks; a float16 layer."""
    for name in arrays:
        arrays[name] = arrays[name].astype(ml_dtypes.bfloat16)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32) + np.float32(1e-6)
    arrays["model.layers.1.mlp.up_proj.weight"] = arrays["model.layers.1.mlp.up_proj.weight"].astype(np.float32) + np.float32(1e-6)
    arrays["model.layers.2.mlp.up_proj.weight"] = arrays["model.layers.2.mlp.up_proj.weight"].astype(np.float16)


@pytest.mark.parametrize("scan", [True, False])
def test_a_mix_of_dtypes_comes_back_bit_for_bit(tiny, tmp_path, scan):
    source = rewritten(tiny("llama"), tmp_path / "m", stray)
    convert(source, tmp_path / "ckpt", scan=scan)
    export(tmp_path / "ckpt", tmp_path / "back")
    assert {i.dtype for i in source.tensors.values()} == {"BF16", "F16", "F32"} and compare_safetensors(source.path, tmp_path / "back") == []
    model, config, _ = restore(tmp_path / "ckpt")
    assert config.dtype == jnp.bfloat16 and state_arrays(model)["layers.mlp.up_proj.kernel"].dtype == jnp.float32


def test_narrowing_is_recorded_and_never_undone_in_silence(tiny, tmp_path):
    source = rewritten(tiny("llama"), tmp_path / "m", lambda arrays: arrays.update({n: a.astype(np.float32) + np.float32(1e-6) for n, a in arrays.items()}))
    conversion = convert(source, tmp_path / "ckpt", dtype=jnp.bfloat16)
    assert (
        conversion.narrowed.keys() == source.tensors.keys()
        and conversion.narrowed["model.norm.weight"] == ("F32", "BF16")
        and "cannot be undone" in str(conversion)
    )
    result = export(tmp_path / "ckpt", tmp_path / "back")
    back = open_source(tmp_path / "back")
    assert any("narrowed" in note for note in result.notes) and {i.dtype for i in back.tensors.values()} == {"BF16"}
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert raw.get("dtype", raw.get("torch_dtype")) == "bfloat16"
    assert len(compare_safetensors(source.path, tmp_path / "back")) == len(source.tensors)


def test_widening_is_exact_both_ways(tiny, tmp_path):
    source = rewritten(tiny("qwen3"), tmp_path / "m", lambda arrays: arrays.update({n: a.astype(ml_dtypes.bfloat16) for n, a in arrays.items()}))
    conversion = convert(source, tmp_path / "ckpt", dtype=np.float32)
    assert conversion.nbytes == 2 * source.tensors.nbytes and not conversion.narrowed
    export(tmp_path / "ckpt", tmp_path / "back")
    assert compare_safetensors(source.path, tmp_path / "back") == []
    chunk = tmp_path / "ckpt" / "norm.weight" / "0"
    values = np.fromfile(chunk, np.float32)
    values[0] += np.float32(1e-6)
    values.tofile(chunk)
    with pytest.raises(InputError, match="model.norm.weight holds float32 values that BF16"):
        export(tmp_path / "ckpt", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_overflow_is_refused_and_leaves_nothing(tiny, tmp_path):
    source = rewritten(
        tiny("llama"), tmp_path / "m", lambda arrays: arrays.update({"model.norm.weight": np.full(arrays["model.norm.weight"].shape, 1e6, np.float32)})
    )
    with pytest.raises(InputError, match="model.norm.weight overflows float16"):
        convert(source, tmp_path / "ckpt", dtype=np.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_exported_model_loads_in_transformers_with_equal_logits(tiny, tmp_path):
    from labkit.hf.reference import Reference

    source = tiny("qwen3")
    convert(source, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "back")
    tokens = np.arange(3, 50)[None]
    assert np.array_equal(Reference.load(source.path, "float32").logits(tokens), Reference.load(tmp_path / "back", "float32").logits(tokens))


@pytest.mark.parametrize("damage", ["bit", "dtype", "missing", "extra"])
def test_control_the_comparison_sees_every_difference(tiny, tmp_path, damage):
    source, name = tiny("llama"), "model.layers.1.mlp.up_proj.weight"

    def change(arrays):
        if damage == "bit":
            arrays[name].reshape(-1).view(np.uint8)[5] ^= 1
        elif damage == "dtype":
            arrays[name] = arrays[name].astype(np.float64)
        elif damage == "missing":
            del arrays[name]
        else:
            arrays["stray"] = np.zeros(3, np.float32)

    (found,) = compare_safetensors(source.path, rewritten(source, tmp_path / "m", change).path)
    assert {"bit": f"{name}: 1 of ", "dtype": "float64", "missing": "only in the first", "extra": "stray is only in the second"}[damage] in found


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_smollm2_round_trip(tmp_path, scan):
    source = open_source("smollm2-135m")
    convert(source, tmp_path / "ckpt", scan=scan)
    result = export(tmp_path / "ckpt", tmp_path / "back")
    assert compare_safetensors(source.path, tmp_path / "back", ignore=result.dropped) == []
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source.path / "tokenizer.json").read_bytes()
