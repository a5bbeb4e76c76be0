"""Tiny checkpoints: reproducible, ordinary, without coincidences or neutral values, and refused with a hint where a name is wrong."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from labkit.hf import open_source
from labkit.hf.architectures import causal_lm_classes, config_classes, modeling_file

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2")


def parameters(model):
    source = open_source(model)
    return {name: source.tensors.read(name) for name in source.tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_in_transformers_with_every_key(family):
    import torch
    from transformers import AutoModelForCausalLM

    source = open_source(f"tiny:{family}")
    assert (source.origin, source.config.model_type, source.slug) == ("tiny", family, f"tiny-{family}")
    network, info = AutoModelForCausalLM.from_pretrained(source.path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = network(torch.arange(3, 40)[None]).logits
    assert torch.isfinite(logits).all() and 0.05 < float(logits.std()) < 5


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_have_no_coincidences(family):
    config = open_source(f"tiny:{family}").config.effective
    hidden, heads, kv, head_dim = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    sizes = [
        hidden,
        heads,
        kv,
        head_dim,
        config["intermediate_size"],
        config["vocab_size"],
        config["num_hidden_layers"],
        hidden // heads,
        heads * head_dim,
        kv * head_dim,
    ]
    sizes += [config[key] for key in ("num_local_experts", "moe_intermediate_size", "num_experts_per_tok", "query_pre_attn_scalar") if key in config]
    sizes += [config["sliding_window"]] if config.get("sliding_window") else []
    assert len(set(sizes)) == len(sizes), sizes
    assert heads // kv != kv and head_dim != hidden // heads and config["num_hidden_layers"] % 2 == 1 and config["vocab_size"] % 2 == 1
    assert config["rope_parameters"]["rope_theta"] != open_source(f"tiny:{family}").config.defaults["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_is_neutral(family):
    for name, array in parameters(f"tiny:{family}").items():
        assert np.isfinite(array).all() and array.std() > 0.01, name
        if array.ndim == 1:
            assert not np.isin(array, (0.0, 1.0)).any(), name
            assert len(np.unique(array)) > 0.9 * array.size, name


def test_softcaps_and_windows_bite():
    config = open_source("tiny:gemma2").config.effective
    assert config["attn_logit_softcapping"] == 1.0 and config["final_logit_softcapping"] == 2.0 and config["sliding_window"] == 7
    assert config["query_pre_attn_scalar"] not in (config["head_dim"], config["hidden_size"] // config["num_attention_heads"])
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]


def test_the_seed_decides(tmp_path):
    """Equal text gives equal bytes in another folder; another seed gives other bytes everywhere."""
    import torch

    torch.manual_seed(12345)  # the caller's random state neither decides nor changes
    state = torch.get_rng_state()
    assert open_source("tiny:qwen3_moe?seed=1", scratch=tmp_path).fingerprint == open_source("tiny:qwen3_moe?seed=1").fingerprint
    assert torch.equal(state, torch.get_rng_state())
    zero, one = parameters("tiny:qwen3_moe"), parameters("tiny:qwen3_moe?seed=1")
    assert zero.keys() == one.keys() and not any(np.array_equal(zero[name], one[name]) for name in zero)


def test_overrides(tmp_path):
    source = open_source(
        'tiny:gemma2?num_hidden_layers=2&layer_types=["full_attention","sliding_attention"]&attention_bias=true&hidden_activation=silu', scratch=tmp_path
    )
    config = source.config.effective
    assert config["layer_types"] == ["full_attention", "sliding_attention"] and config["hidden_activation"] == "silu"
    assert "model.layers.1.self_attn.q_proj.bias" in source.tensors and "model.layers.2.self_attn.q_proj.weight" not in source.tensors
    assert set(source.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


def test_aliased_and_legacy_keys(tmp_path):
    assert open_source("tiny:qwen3_moe?num_experts=4", scratch=tmp_path).config.effective["num_local_experts"] == 4
    rope = open_source('tiny:llama?rope_theta=500&rope_scaling={"type":"linear","factor":4.0}', scratch=tmp_path).config.effective["rope_parameters"]
    assert rope == {"rope_theta": 500, "rope_type": "linear", "factor": 4.0}


REFUSED = {
    "tiny:lama": ("'lama' is no causal LM", "Did you mean llama"),
    "tiny:": ("no causal LM",),
    "tiny:vit": ("no causal LM",),
    "tiny:llama?hiden_size=3": ("no key 'hiden_size'", "Did you mean hidden_size"),
    "tiny:llama?hidden_size": ("not key=value",),
    "tiny:llama?hidden_size=36&hidden_size=48": ("given twice",),
    "tiny:llama?hidden_size=nope": ("LlamaConfig refuses", "hidden_size"),
    "tiny:llama?num_attention_heads=0": ("LlamaConfig refuses",),
    "tiny:llama?num_key_value_heads=4": ("cannot run",),
    "tiny:llama?hidden_size=36000&num_hidden_layers=60": ("not tiny",),
    "tiny:llama?seed=-1": ("seed",),
    "tiny:llama?seed=true": ("seed",),
    "tiny:../../x": ("no causal LM",),
}


@pytest.mark.parametrize("model, parts", REFUSED.items())
def test_refused(tmp_path, refused, model, parts):
    refused(lambda: open_source(model, scratch=tmp_path), *parts)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"], "nothing half-written"


def test_the_cache_is_used_and_survives_a_half_written_neighbour(tmp_path):
    first = open_source("tiny:llama", scratch=tmp_path)
    date = (first.path / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "tiny" / f".{first.path.name}.99").mkdir()
    again = open_source("tiny:llama", scratch=tmp_path)
    assert again.path == first.path and (again.path / "model.safetensors").stat().st_mtime_ns == date


def test_files_are_ordinary_safetensors():
    source = open_source("tiny:qwen3_moe")
    arrays = load_file(source.path / "model.safetensors")
    assert arrays.keys() == source.tensors.keys() and json.loads((source.path / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    assert all(np.array_equal(source.tensors.read(name), array) for name, array in arrays.items())


def test_what_transformers_knows_is_read_without_importing_it():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_lm_classes() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert config_classes() == dict(CONFIG_MAPPING_NAMES)
    assert (
        modeling_file("qwen3_moe").name == "modeling_qwen3_moe.py"
        and modeling_file("gemma3_text").name == "modeling_gemma3.py"
        and modeling_file("nope") is None
    )


OTHERS = (
    "mistral",
    "mixtral",
    "qwen2_moe",
    "gemma3_text",
    "deepseek_v3",
    "cohere2",
    "gpt_oss",
    "gpt_neox",
    "mamba2",
    "glm4_moe",
    "olmo2",
    "phi3",
    "smollm3",
    "granite",
)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_by_the_same_rules(family):
    source = open_source(f"tiny:{family}")
    assert source.config.model_type == family and source.config.effective["hidden_size"] == 72 and source.tensors.size < 2_000_000


@pytest.mark.slow
def test_nearly_every_decoder_type_has_a_tiny_checkpoint(tmp_path):
    from labkit.errors import InputError

    failed = []
    for family in sorted(set(causal_lm_classes()) & set(config_classes())):
        try:
            open_source(f"tiny:{family}", scratch=tmp_path)
        except InputError as error:
            failed.append((family, error.what))
    assert len(failed) <= 35, failed
