"""Configs in every spelling that checkpoints use give the same effective record, that of the installed class."""

import json

import pytest
from transformers import AutoConfig

from labkit.hf.config import HFConfig

from .conftest import write_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

# (what old checkpoints write, what new ones write)
SPELLINGS = {
    "absent": ({"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_type": "default"}),
    "null": ({"rope_theta": 500.0, "rope_scaling": None}, {"rope_theta": 500.0, "rope_type": "default"}),
    "default by type": ({"rope_theta": 500.0, "rope_scaling": {"type": "default"}}, {"rope_theta": 500.0, "rope_type": "default"}),
    "llama3 by rope_type": ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_theta": 500.0, "rope_type": "llama3", **LLAMA3}),
    "llama3 by type": ({"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, {"rope_theta": 500.0, "rope_type": "llama3", **LLAMA3}),
    "llama3 by both": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500.0, "rope_type": "llama3", **LLAMA3},
    ),
    "linear": ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}),
    "dynamic": ({"rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}),
    "yarn": ({"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **YARN}}, {"rope_theta": 500.0, "rope_type": "yarn", **YARN}),
    "both old and new": (
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
        },
        {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
    ),
    "theta in the new place only": ({"rope_parameters": {"rope_theta": 500.0}}, {"rope_theta": 500.0, "rope_type": "default"}),
    "theta beside a new table without it": (
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
    ),
}


@pytest.mark.parametrize("old, new", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_rope_spellings_agree(tmp_path, old, new):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    ours = HFConfig.read(write_config(tmp_path / "old", **old)).effective
    assert ours["rope_parameters"] == new
    assert ours == HFConfig.read(write_config(tmp_path / "new", rope_parameters=new)).effective
    reference = AutoConfig.from_pretrained(tmp_path / "old").rope_parameters
    assert {key: value for key, value in reference.items() if key != "type"} == new, "the installed class reads the same"


def test_the_table_can_tell_spellings_apart(tmp_path):
    """The control of the test above: another base, or a scaling that is dropped, is another record."""
    records = [
        HFConfig.read(write_config(tmp_path, **old)).effective["rope_parameters"]
        for old in ({"rope_theta": 500.0}, {"rope_theta": 10000.0}, {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    ]
    assert len({json.dumps(record, sort_keys=True) for record in records}) == 3


CONTRADICTIONS = {
    "type and rope_type": (
        {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
        "rope_scaling says type 'linear' and rope_type 'dynamic'",
    ),
    "inside a nested table": ({"rope_parameters": {"full_attention": {"type": "linear", "rope_type": "yarn"}}}, "rope_parameters.full_attention"),
    "two bases": ({"rope_theta": 500.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "rope_theta is 500.0"),
    "two factors": ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "factor 2.0"),
    "not an object": ({"rope_scaling": "linear"}, "not an object or null"),
}


@pytest.mark.parametrize("changes, message", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradicting_spellings(tmp_path, refused, changes, message):
    refused(lambda: HFConfig.read(write_config(tmp_path, **changes)), message, "config.json")


def test_rope_nested_by_layer_type(tmp_path):
    nested = {"full_attention": {"rope_theta": 1e6, "type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}}
    config = HFConfig.read(write_config(tmp_path, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], num_hidden_layers=6, rope_parameters=nested))
    assert config.effective["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    }


def test_nulls_are_filled_by_the_class(tmp_path):
    changes = {"head_dim": None, "rope_scaling": None, "sliding_window": None}
    config = HFConfig.read(write_config(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], **changes))
    assert (config.effective["head_dim"], config.effective["sliding_window"]) == (4, None)
    assert HFConfig.read(write_config(tmp_path, num_key_value_heads=None)).effective["num_key_value_heads"] == 3


def test_a_null_that_the_class_refuses_is_named(tmp_path, refused):
    config = HFConfig.read(write_config(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], num_key_value_heads=None))
    refused(lambda: config.effective, "num_key_value_heads", "config.json")


def test_raw_effective_defaults(tmp_path):
    config = HFConfig.read(write_config(tmp_path, an_unknown_key=7))
    assert config.raw["an_unknown_key"] == 7 and config.effective["an_unknown_key"] == 7 and "an_unknown_key" not in config.defaults
    assert config.defaults["hidden_size"] == 4096 and config.effective["hidden_size"] == 12 and "rms_norm_eps" not in config.raw
    assert config.effective["rms_norm_eps"] == config.defaults["rms_norm_eps"]
    assert (config.class_name, config.architectures) == ("LlamaConfig", ["LlamaForCausalLM"])


def test_reading_does_not_change_raw(tmp_path):
    text = json.loads((write_config(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}) / "config.json").read_text())
    config = HFConfig.read(tmp_path)
    config.effective["hidden_size"] = 1
    assert config.raw == text


def test_names_that_the_class_maps(tmp_path):
    config = HFConfig.read(write_config(tmp_path, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=5))
    assert config.aliases["num_experts"] == "num_local_experts" and config.effective["num_local_experts"] == 5


def test_a_wrapper_resolves_to_its_text_tower(tmp_path):
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 24,
        "num_hidden_layers": 7,
        "intermediate_size": 20,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma3",
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": text,
                "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
            }
        )
    )
    config = HFConfig.read(tmp_path)
    assert config.model_type == "gemma3_text" and config.class_name == "Gemma3TextConfig"
    assert config.effective["hidden_size"] == 24 and config.effective["num_hidden_layers"] == 7 and "vision_config" not in config.effective
    assert config.defaults["hidden_size"] == 2304


def test_remote_code_stays_asleep(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "configuration_x.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PretrainedConfig\nclass XConfig(PretrainedConfig):\n    model_type = 'x'\n"
    )
    changes = {"model_type": "x", "architectures": ["XForCausalLM"], "auto_map": {"AutoConfig": "configuration_x.XConfig"}}
    config = HFConfig.read(write_config(tmp_path, **changes))
    assert config.effective == config.raw and config.defaults == {} and not (tmp_path / "ran").exists()
    trusted = HFConfig.read(tmp_path, trust_remote_code=True)
    assert trusted.effective["hidden_size"] == 12 and (tmp_path / "ran").exists()
