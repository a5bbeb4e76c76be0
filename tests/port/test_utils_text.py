"""The emitted FLOPs and losses equal those that refined slices count by hand, and the reference's router loss."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.hf import open_source
from labkit.layers.flops import active_parameters, attending, attention_heads, attention_pairs, visible_pairs
from labkit.layers.loss import mixture_lm_loss, router_loss
from labkit.layers.plan import LayerPlan
from labkit.models import get_family, read_config
from labkit.port.utils_text import write_utils
from labkit.train.engine import TrainingEngine


def emitted(family, **values):
    namespace = {"__name__": f"labkit.models.{family}.utils", "__package__": f"labkit.models.{family}"}
    exec(compile(write_utils(family, **values), "utils", "exec"), namespace)
    return namespace


CASES = [
    ("llama", {}),
    ("llama?tie_word_embeddings=true", {}),
    ("gemma2", {}),
    ("qwen3_moe", {"experts_per_token": "num_experts_per_tok", "router_coefficient": "router_aux_loss_coef"}),
]


@pytest.mark.parametrize("model, values", CASES)
def test_operations_as_refined_slices_count_them(model, values):
    family = get_family(model.partition("?")[0])
    source = open_source(f"tiny:{model}")
    config, _ = read_config(family, source.config.effective, source.config.defaults)
    count = emitted(family.name, **values)[f"calculate_{family.name}_tflops_per_device"]
    ours, theirs = count(config, batch=3, length=70, log=False), family.tflops(config, batch=3, length=70, log=False)
    assert ours.weights == pytest.approx(theirs.weights, rel=1e-12) and ours.attention == pytest.approx(theirs.attention, rel=1e-12)
    if family.name == "qwen3_moe":
        every = emitted(family.name)["calculate_qwen3_moe_tflops_per_device"](config, batch=3, length=70, log=False)
        assert every.weights > ours.weights


def test_experts_in_a_list_count_as_those_in_one_array():
    plan = LayerPlan.from_kinds(["moe"] * 2)
    together = {"layers.mlp.experts.up": (2, 6, 8, 4), "layers.mlp.gate.kernel": (2, 4, 6), "layers.norm.weight": (2, 4), "embed_tokens.embedding": (30, 4)}
    listed = {f"layers.mlp.experts.{e}.up.kernel": (2, 4, 8) for e in range(6)} | {n: s for n, s in together.items() if "experts" not in n}
    listed |= {f"layers.mlp.experts.{e}.up.bias": (2, 8) for e in range(6)}
    wanted = 2 * (3 * 8 * 4 + 4 * 6)
    assert active_parameters(together, plan, experts_per_token=3) == active_parameters(listed, plan, experts_per_token=3) == wanted
    assert active_parameters(together, plan, experts_per_token=3, vocab_size=30) == wanted + 120


def test_windows_chunks_and_layers_without_attention():
    class Config:
        plan = LayerPlan.from_kinds(["a", "b", "c", "d"])
        layer_types = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
        sliding_window, attention_chunk_size = 4, 5
        num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 3, 8, 4, 6

    assert attention_pairs(Config, 12) == [visible_pairs(12), visible_pairs(12, 4), 2 * visible_pairs(5) + visible_pairs(2), 0]
    paths = ("0.0.self_attn.q", "0.1.linear_attn.q", "0.2.x", "0.3.attention.q")
    assert attending({f"layers.{path}": (1, 2) for path in paths}, Config.plan) == [True, False, False, True]
    Config.layer_types = None
    assert attention_pairs(Config, 12, [True, False, True, False]) == [visible_pairs(12, 4), 0] * 2
    assert attention_heads(Config) == (3, 9.0) and attention_heads(object()) == (0, 0)


def test_router_loss_is_the_references():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = np.random.default_rng(0).normal(size=(3, 20, 8))
    wanted = float(load_balancing_loss_func(tuple(torch.from_numpy(layer) for layer in logits), 8, 2))
    assert float(router_loss(jnp.asarray(logits), 2)) == pytest.approx(wanted, rel=1e-6)
    assert float(router_loss(jnp.asarray(logits), 3)) != pytest.approx(wanted, rel=1e-3)


def test_the_emitted_engine_adds_the_router_loss_with_the_configs_weight():
    class Config:
        coefficient, top = 0.25, 2

    class Model:
        config = Config()

        def __call__(self, tokens, positions, segments, return_aux=False):
            logits = jnp.ones((*tokens.shape, 7))
            return (logits, {"router_logits": jnp.arange(80.0).reshape(2, 5, 8) % 3}) if return_aux else logits

    batch = {"inputs": jnp.zeros((1, 5), int), "targets": jnp.zeros((1, 5), int)}
    text = emitted("qwen3_moe", experts_per_token="top", router_coefficient="coefficient")
    mixed, aux = text["configure_qwen3_moe_engine"](TrainingEngine()).loss_fn(Model(), batch)
    plain, _ = emitted("qwen3_moe")["configure_qwen3_moe_engine"](TrainingEngine()).loss_fn(Model(), batch)
    assert float(mixed - plain) == pytest.approx(0.25 * float(aux["moe_lb_loss"]), rel=1e-4) and float(aux["moe_lb_loss"]) > 0.5
    assert float(mixture_lm_loss(Model(), batch, coefficient=0.0, top_k=2)[0]) == pytest.approx(float(plain))
