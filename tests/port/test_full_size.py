"""Published configurations at full size: translated, planned and constructed abstractly, with the published number of parameters."""

import math
import os
import time

import pytest

from labkit.converters.filling import abstract_model
from labkit.hf.config import HFConfig
from labkit.models.config import read_config
from labkit.models.registry import get_family

ROPE = {"rope_type": "default"}
PUBLISHED = {
    # model card and technical report: 235B parameters, 94 layers, 128 experts, 8 of them active
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        dict(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
            max_position_embeddings=40960, rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
        235_093_634_560,
    ),
    # technical report (arXiv 2412.19437): 671B parameters without the multi-token prediction module
    "DeepSeek-V3": (
        "deepseek_v3",
        dict(
            vocab_size=129280, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
            num_key_value_heads=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=2.5,
            max_position_embeddings=163840, rope_parameters=ROPE | {"rope_theta": 10000.0}, tie_word_embeddings=False,
        ),
        671_026_404_352,
    ),
    # model card: 117B parameters (116.83B)
    "gpt-oss-120b": (
        "gpt_oss",
        dict(
            vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
            num_local_experts=128, num_experts_per_tok=4, tie_word_embeddings=False, rope_parameters=ROPE | {"rope_theta": 150000.0},
        ),
        116_829_156_672,
    ),
    # model card: 70.6B parameters
    "Llama-3-70B": (
        "llama",
        dict(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
            tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters=ROPE | {"rope_theta": 500000.0},
        ),
        70_553_706_496,
    ),
}  # fmt: skip


def parameter_count(model) -> int:
    """Trainable numbers: buffers such as a router's correction bias are not among them."""
    from flax import nnx

    return sum(math.prod(leaf.get_raw_value().shape) for leaf in model.leaves.values() if isinstance(leaf, nnx.Param))


def described(model_type: str, values: dict, folder) -> tuple[dict, dict]:
    """(the config as the installed class sees it, its defaults)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING[model_type](**values).save_pretrained(folder)
    config = HFConfig.read(folder)
    return config.described, config.defaults


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_size(name, monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "LABKIT_PREFER", "translated")
    from labkit.port.slices import ensure_slice

    model_type, values, published = PUBLISHED[name]
    ensure_slice(model_type).require()
    effective, defaults = described(model_type, values, tmp_path)
    family = get_family(model_type)
    assert family.source == "translated"
    start = time.perf_counter()
    config, _ = read_config(family, effective, defaults)
    plan = config.plan
    count = parameter_count(abstract_model(family, config))
    seconds = time.perf_counter() - start
    print(f"{name}: {plan.describe()}; {count:,} parameters; planned and constructed in {seconds:.1f} s")
    assert count == published
    assert seconds < 20
    assert plan.num_layers == values["num_hidden_layers"]
