"""Logical axes of parameters: the reference's plan decides where sizes cannot."""

import pytest

from labkit.hf.parallel_plan import tensor_parallel_plan
from labkit.port.shard_axes import axes_for

H, V, E = 48, 301, 6
CASES = [
    ("model.embed_tokens.weight", (V, H), None, ("vocab", "embed")),
    ("lm_head.kernel", (H, V), None, ("embed", "vocab")),
    ("model.layers.3.self_attn.q_proj.weight", (H, 72), None, ("embed", "heads")),
    ("layers.self_attn.q_proj.kernel", (H, H), None, ("embed", "heads")),
    ("layers.self_attn.o_proj.kernel", (H, H), None, ("heads", "embed")),
    ("layers.self_attn.o_proj.weight", (H, H), False, ("embed", "heads")),
    ("layers.self_attn.k_proj.bias", (24,), None, ("kv_heads",)),
    ("layers.self_attn.v_proj.kernel", (H, 24), None, ("embed", "kv_heads")),
    ("layers.self_attn.kv_b_proj.kernel", (24, 40), None, ("embed", "heads")),
    ("layers.self_attn.q_norm.weight", (12,), None, ("norm",)),
    ("layers.input_layernorm", (H,), None, ("norm",)),
    ("layers.mlp.gate.kernel", (H, E), None, ("embed", "mlp")),
    ("layers.mlp.down_proj", (40, H), None, ("mlp", "embed")),
    ("layers.mlp.experts.gate_up_proj", (E, 80, H), None, ("experts", "mlp", "embed")),
    ("layers.mlp.experts.down_proj", (E, H, H), None, ("experts", "embed", "mlp")),
    ("layers.mlp.experts.gate_up_proj", (E, H, H), None, ("experts", "mlp", "embed")),
    ("layers.mlp.experts.gate_up_proj_bias", (E, 80), None, ("experts", "mlp")),
    ("layers.conv1d.weight", (96, 1, 4), None, ("mlp", None, None)),
    ("layers.scale", (), None, ()),
]


@pytest.fixture(scope="module")
def plan():
    return tensor_parallel_plan("qwen3_moe")


@pytest.mark.parametrize("path, shape, linear, axes", CASES)
def test_axes(plan, path, shape, linear, axes):
    assert axes_for(path, shape, H, V, plan, linear=linear) == axes


def test_the_plan_decides_where_sizes_cannot(plan):
    assert plan["layers.*.self_attn.o_proj"] == "rowwise" and plan["lm_head"] == "colwise_gather_output"
    turned = plan | {"layers.*.self_attn.o_proj": "colwise", "layers.*.self_attn.q_proj": "rowwise"}
    assert axes_for("layers.self_attn.o_proj", (H, H), H, V, turned) == ("embed", "heads")
    assert axes_for("layers.self_attn.q_proj", (H, H), H, V, turned) == ("heads", "embed")
    assert tensor_parallel_plan("gpt2") == {} and axes_for("layers.mlp.c_proj", (H, H), H, V) == ("mlp", "embed")
    assert axes_for("layers.attn.c_attn", (H, H), H, V) == ("embed", "heads")
