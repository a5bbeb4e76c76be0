"""Phase 1's facts: what each layer is, what each component weighs, what is used, and what stands in the way."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from labkit.hf import open_source
from labkit.hf.components import classify
from labkit.hf.config import HFConfig
from labkit.hf.decoder_pattern import pattern_of
from labkit.hf.facts import config_table, decoder_pattern, parameters_by_component, walls

from .conftest import write_config, write_shard

FULL, SLIDING = "full_attention", "sliding_attention"

WINDOWS = {
    "switched off": ({"use_sliding_window": False}, [None] * 4),
    "on, and no layer reached": ({"use_sliding_window": True, "max_window_layers": 28}, [None] * 4),
    "on from layer 2": ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 3, 3]),
}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("changes, windows", WINDOWS.values(), ids=WINDOWS.keys())
def test_the_window_in_effect(tmp_path, kind, changes, windows):
    config = HFConfig.read(write_config(tmp_path, model_type=kind, architectures=..., num_hidden_layers=4, sliding_window=3, **changes))
    assert list(pattern_of(config.effective).windows) == windows


@pytest.mark.parametrize(
    "kind, changes, window",
    [("mistral", {}, 3), ("mistral", {"sliding_window": None}, None), ("qwen3_moe", {}, None), ("qwen3_moe", {"use_sliding_window": True}, 3)],
)
def test_windows_without_layer_types(tmp_path, kind, changes, window):
    config = HFConfig.read(write_config(tmp_path, **{"model_type": kind, "architectures": ..., "sliding_window": 3, **changes}))
    pattern = pattern_of(config.effective)
    assert set(pattern.windows) == {window} and pattern.homogeneous


PATTERNS = {
    "homogeneous": ({"num_hidden_layers": 5}, [FULL] * 5, (0, 1, 5, 0)),
    "alternating with a remainder": (
        {"num_hidden_layers": 5, "layer_types": [SLIDING, FULL] * 2 + [SLIDING], "sliding_window": 7},
        [SLIDING, FULL] * 2 + [SLIDING],
        (0, 2, 2, 1),
    ),
    "five to one": (
        {"num_hidden_layers": 8, "layer_types": ([SLIDING] * 2 + [FULL]) * 2 + [SLIDING] * 2},
        ([SLIDING] * 2 + [FULL]) * 2 + [SLIDING] * 2,
        (0, 3, 2, 2),
    ),
    "first dense": ({"num_hidden_layers": 4, "n_routed_experts": 8, "first_k_dense_replace": 1}, [f"{FULL}+dense"] + [f"{FULL}+sparse"] * 3, (1, 1, 3, 0)),
    "every second sparse": (
        {"num_hidden_layers": 4, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": []},
        [f"{FULL}+dense", f"{FULL}+sparse"] * 2,
        (0, 2, 2, 0),
    ),
    "one dense by list": (
        {"num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": [1]},
        [f"{FULL}+sparse", f"{FULL}+dense"] + [f"{FULL}+sparse"] * 2,
        (2, 1, 2, 0),
    ),
    "frequency as a list": (
        {"num_hidden_layers": 3, "n_routed_experts": 8, "moe_layer_freq": [0, 1, 1]},
        [f"{FULL}+dense"] + [f"{FULL}+sparse"] * 2,
        (1, 1, 2, 0),
    ),
    "period and offset": (
        {"num_hidden_layers": 4, "num_experts": 8, "expert_layer_period": 2, "expert_layer_offset": 1},
        [f"{FULL}+dense", f"{FULL}+sparse"] * 2,
        (0, 2, 2, 0),
    ),
    "no rope in every fourth": ({"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, [FULL] * 3 + [f"{FULL}+nope", FULL], (0, 4, 1, 1)),
    "no repeat": ({"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}, [SLIDING, FULL, FULL], (1, 1, 2, 0)),
}


@pytest.mark.parametrize("config, kinds, numbers", PATTERNS.values(), ids=PATTERNS.keys())
def test_patterns(config, kinds, numbers):
    pattern = pattern_of(config)
    assert list(pattern.kinds) == kinds
    assert (pattern.start, pattern.cycle, pattern.repeats, pattern.remainder) == numbers
    assert pattern.homogeneous is (len(set(kinds)) == 1)


def test_no_rope_layers_of_smollm3_hold_1_for_layers_that_rotate(tmp_path):
    config = HFConfig.read(write_config(tmp_path, model_type="smollm3", architectures=..., num_hidden_layers=4, no_rope_layer_interval=4, pad_token_id=0))
    assert [kind.endswith("nope") for kind in pattern_of(config.effective).kinds] == [False, False, False, True]


def test_a_per_layer_list_of_another_length(refused):
    refused(lambda: pattern_of({"num_hidden_layers": 3, "layer_types": [FULL]}, "config.json"), "layer_types has 1 entries", "3 layers")


def test_layers_that_differ_in_the_window_alone_are_not_homogeneous():
    assert not pattern_of({"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 3}).homogeneous


def test_rows_of_the_tiny_families():
    assert decoder_pattern(open_source("tiny:gemma2")).rows()[0] == {"layers": "0", "kind": SLIDING, "window": 7}
    assert [row["layers"] for row in decoder_pattern(open_source("tiny:qwen3_moe")).rows()] == ["0", "1", "2-4"]
    assert str(decoder_pattern(open_source("tiny:llama"))) == "5 equal layers (full_attention)"


NAMES = {
    "model.embed_tokens.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "gpt_neox.embed_in.weight": "embedding",
    "lm_head.weight": "head",
    "embed_out.weight": "head",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.q_norm.weight": "norm",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.norm.weight": "norm",
    "transformer.ln_f.bias": "norm",
    "transformer.h.0.attn.c_attn.weight": "attention",
    "transformer.h.1.mlp.c_fc.weight": "mlp",
    "model.layers.0.mlp.gate_proj.weight": "mlp",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.mlp.gate.e_score_correction_bias": "router",
    "model.layers.0.block_sparse_moe.gate.weight": "router",
    "model.layers.0.mlp.experts.3.gate_proj.weight": "experts",
    "model.layers.0.mlp.experts.gate_up_proj": "experts",
    "model.layers.0.mlp.shared_expert.up_proj.weight": "experts",
    "model.layers.0.mlp.shared_expert_gate.weight": "router",
    "model.layers.3.mlp.up_proj.weight": "MTP",
    "mtp.fc.weight": "MTP",
    "backbone.layers.0.mixer.A_log": "recurrence",
    "model.layers.0.linear_attn.conv1d.weight": "recurrence",
    "model.vision_tower.blocks.0.attn.qkv.weight": "other",
    "model.layers.0.self_attn.sinks": "attention",
}


@pytest.mark.parametrize("name, component", NAMES.items())
def test_components_by_name(name, component):
    assert classify(name, 3) == component


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:qwen3_moe", "tiny:gemma2"])
def test_components_add_up_to_the_reference(model):
    from transformers import AutoModelForCausalLM

    source = open_source(model)
    rows = parameters_by_component(source)
    assert sum(row.parameters for row in rows) == sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(source.path).parameters())
    assert sum(row.bytes for row in rows) == source.tensors.nbytes and sum(row.tensors for row in rows) == len(source.tensors)
    assert not any(row.component == "other" for row in rows) and {row.dtypes for row in rows} == {("F32",)}


def test_config_table(tmp_path):
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, write_config(tmp_path, rope_theta=5.0) / "model.safetensors")
    source = open_source(tmp_path)
    rows = {
        row.key: row
        for row in config_table(source, {"hidden_size": ("read", ""), "use_cache": ("irrelevant", "caches are explicit"), "mlp_bias": ("default", "")})
    }
    assert (rows["hidden_size"].value, rows["hidden_size"].default, rows["hidden_size"].use) == (12, 4096, "read")
    assert rows["use_cache"].use == "irrelevant: caches are explicit" and rows["mlp_bias"].use == "default" and rows["vocab_size"].use == "unread"
    assert rows["rope_theta"].use == "spelled rope_parameters"
    assert {row.use for row in config_table(source)} == {"", "spelled rope_parameters"}


def test_no_walls():
    assert walls(open_source("tiny:qwen3_moe")) == [] and walls(open_source("smollm2-135m")) == []


WALLS = {
    "unknown": ({"model_type": "lamma", "architectures": ["XForCausalLM"]}, "lamma is unknown", "llama"),
    "remote code": ({"model_type": "x", "architectures": ["XForCausalLM"], "auto_map": {"AutoConfig": "a.B"}}, "code of its own", "trust_remote_code"),
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq)", "original checkpoint"),
    "encoder-decoder": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal language model", "decoder-only"),
}


@pytest.mark.parametrize("changes, what, advice", WALLS.values(), ids=WALLS.keys())
def test_walls(tmp_path, changes, what, advice):
    write_shard(write_config(tmp_path, **changes) / "model.safetensors", ["lm_head.weight"])
    found = walls(open_source(tmp_path))
    assert what in found[0].what and advice in found[0].next and "config.json" in found[0].why


@pytest.mark.parametrize("scale", ["weight_scale_inv", "scale", None])
def test_narrow_floats_are_a_wall_with_or_without_scales(tmp_path, scale):
    name = "model.layers.0.mlp.up_proj"
    arrays = {f"{name}.weight": np.zeros((3, 4), ml_dtypes.float8_e4m3fn), "lm_head.weight": np.zeros((2, 2), np.float32)}
    if scale:
        arrays[f"{name}.{scale}"] = np.ones((1, 1), np.float32)
    write_config(tmp_path)
    from labkit.hf.safetensors_io import NAMES as DTYPE_NAMES
    from labkit.hf.safetensors_io import Slot, write_safetensors

    write_safetensors(tmp_path, [Slot(key, DTYPE_NAMES[array.dtype], array.shape) for key, array in arrays.items()], arrays.values())
    (wall,) = walls(open_source(tmp_path))
    assert f"{name}.weight is F8_E4M3" in wall.why and (f"{name}.{scale}" in wall.why if scale else "no scales" in wall.why)


def test_packed_integers_are_a_wall_and_other_integers_are_not(tmp_path):
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32), "model.layers.0.attn.position_ids": np.arange(3)}, write_config(tmp_path) / "model.safetensors")
    assert walls(open_source(tmp_path)) == []
    save_file(
        {"lm_head.weight": np.zeros((2, 2), np.float32), "model.layers.0.mlp.up_proj.qweight": np.zeros((2, 2), np.int32)}, tmp_path / "model.safetensors"
    )
    assert "qweight is I32" in walls(open_source(tmp_path))[0].why


def test_a_config_of_a_wrapper_is_read_at_its_text_tower(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 5}})
    )
    assert [row["layers"] for row in pattern_of(HFConfig.read(tmp_path).effective).rows()] == ["0-4", "5", "6"]
