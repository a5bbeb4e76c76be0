"""Published configurations without their weights, built abstractly: the published number of parameters, exactly the tensors of the checkpoint, the layers.

`published/*.json` hold facts: config.json as published, the number of parameters and where it was confirmed, layers as [repeats, letters of a cycle], some
tensors with their shapes. The expected names come from the reference on the meta device, under the names that it saves.
"""

import functools
import json
import math
import re
from pathlib import Path

import pytest
from flax import nnx

from labkit.converters.audit import audit_table
from labkit.converters.filling import abstract_model
from labkit.errors import InputError
from labkit.hf.config import HFConfig
from labkit.models import get_family, read_config

FOLDER = Path(__file__).parent / "published"
FACTS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
FAST = {"llama-3.1-405b", "qwen3-8b", "gemma-2-27b", "smollm2-135m", "gemma-2-9b", "llama-3.2-1b"}
NAMES = [
    pytest.param(family := facts["config"]["model_type"], name, id=f"{family}-{name}", marks=() if name in FAST else pytest.mark.slow)
    for name, facts in FACTS.items()
]


@functools.cache
def planned(name):
    """(family, config, abstract model) of a published configuration."""
    from labkit.port.slices import ensure_slice

    facts = FACTS[name]
    ensure_slice(facts["config"]["model_type"]).require()
    family = get_family(facts["config"]["model_type"])
    hf = HFConfig(facts["config"], FOLDER / name / "config.json")
    hf._check()
    config, _ = read_config(family, hf.effective, hf.defaults)
    return family, config, abstract_model(family, config)


@functools.cache
def saved(name):
    """tensor name -> shape as the reference saves it: parameters and persistent buffers on the meta device, a tied head once, under the names on disk."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(HFConfig(FACTS[name]["config"], FOLDER / name / "config.json").hf)
        model.tie_weights()
        once = {id(tensor): key for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
        kept = {key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if once[id(tensor)] == key}
        return {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(model, kept).items()}


def parameters(abstract) -> int:
    return sum(math.prod(leaf.get_raw_value().shape) for leaf in abstract.leaves.values() if isinstance(leaf, nnx.Param))


def letters(layers) -> str:
    """[[3, "A"], [2, "BC"]] -> "AAABC": repeats counts layers."""
    return "".join((cycle * count)[:count] for count, cycle in layers)


def test_there_are_enough_and_each_says_where_it_is_from():
    assert len(FACTS) >= 25
    for facts in FACTS.values():
        assert facts["confirmed"]["parameters"] and facts["confirmed"]["config"]
    wanted = ("DeepSeek-V3", "Llama-4-Scout", "gpt-oss-120b", "Qwen3-235B", "Qwen3-Next-80B", "gemma-3-27b", "SmolLM3")
    assert all(any(text in facts["name"] for facts in FACTS.values()) for text in wanted)
    assert any(facts["config"].get("vocab_size") == 49155 for facts in FACTS.values())


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_parameters_and_layers(family, name):
    facts = FACTS[name]
    _, config, abstract = planned(name)
    assert parameters(abstract) == facts["parameters"]
    shown = list(zip(config.plan.kinds, config.plan.variants))
    pattern = letters(facts["layers"])
    assert len(shown) == len(pattern)
    assert len(set(shown)) == len(set(pattern)) == len(set(zip(shown, pattern))), config.plan.describe()


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_rules_cover_exactly_the_tensors(family, name):
    facts, tensors = FACTS[name], saved(name)
    slice_, config, abstract = planned(name)
    assert {key: list(tensors.get(key, ())) for key in facts["tensors"]} == facts["tensors"]
    assert len(tensors) == facts.get("tensor_count", len(tensors))
    report = audit_table(slice_.rules(config), config.plan, abstract.shapes, tensors)
    assert report.passed, report.problems[:5]


ALSO = [
    pytest.param(family, name, id=f"{family}-{name}", marks=pytest.mark.slow) for family, name in (p.values for p in NAMES) if "also_on_disk" in FACTS[name]
]


@pytest.mark.parametrize(("family", "name"), ALSO)
def test_what_else_the_files_hold_is_left_unread(family, name):
    """Multi-token prediction modules and causal masks, which the reference does not load either; gpt2's names come without their first part."""
    slice_, config, abstract = planned(name)
    tensors = {key.removeprefix("transformer."): shape for key, shape in saved(name).items()} | FACTS[name]["also_on_disk"]
    report = audit_table(slice_.rules(config), config.plan, abstract.shapes, tensors)
    assert report.passed, report.problems[:5]
    assert set(FACTS[name]["also_on_disk"]) <= set(report.expansion.ignored)


def test_a_wrong_size_and_a_missing_tensor_are_noticed():
    """Controls: another number of experts or layers is another number of parameters; a tensor too few, too many, or of another shape is named."""
    family, config, abstract = planned("qwen3-8b")
    tensors = saved("qwen3-8b")
    gone = {key: shape for key, shape in tensors.items() if key != "model.layers.17.self_attn.q_norm.weight"}
    for wrong, text in (
        (gone, "model.layers.17.self_attn.q_norm.weight"),
        (tensors | {"model.layers.36.mlp.up_proj.weight": (12288, 4096)}, "model.layers.36.mlp.up_proj.weight"),
        (tensors | {"model.layers.3.self_attn.k_proj.weight": (512, 4096)}, "model.layers.3.self_attn.k_proj.weight"),
    ):
        report = audit_table(family.rules(config), config.plan, abstract.shapes, wrong)
        assert not report.passed and any(text in problem for problem in report.problems)
    hf = HFConfig({**FACTS["qwen3-8b"]["config"], "head_dim": 64}, FOLDER / "config.json")
    assert parameters(abstract_model(family, read_config(family, hf.effective, hf.defaults)[0])) != FACTS["qwen3-8b"]["parameters"]


def test_stated_keys_are_read_by_no_line_of_the_reference_and_bind():
    """`stated_keys.py`: the reference has no line for them; at another value than stated they are refused by name."""
    from labkit.hf import architectures
    from labkit.models.stated_keys import STATED_KEYS

    for model_type, keys in STATED_KEYS.items():
        text = architectures.modeling_file(model_type).read_text()
        for key in keys:
            assert not re.search(rf"config\.{key}\b|[\"']{key}[\"']", text), (model_type, key)
    facts = FACTS["gemma-2-9b"]["config"]
    for wrong in ({"sliding_window_size": 2048}, {"embedding_multiplier": 12.0}):
        hf = HFConfig({**facts, **wrong}, FOLDER / "config.json")
        with pytest.raises(InputError, match=next(iter(wrong))):
            read_config(get_family("gemma2"), hf.effective, hf.defaults)
