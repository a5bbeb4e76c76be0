"""Check 1 rejects what would not be trained: another variable type, a gradient cut off, a foreign module."""

import jax
import numpy as np
import pytest
from flax import nnx

from labkit.models.llama import modeling_llama
from labkit.models.qwen3_moe import modeling_qwen3_moe
from labkit.parity.conformance import trainable
from labkit.parity.conformance.subject import Subject


@pytest.mark.slow
def test_a_right_slice_passes_and_says_how_small_its_smallest_gradient_is(llama):
    found = trainable.check(llama)
    assert not found.problems and not found.notes and 1e-12 < found.value < 1


def test_a_param_made_a_plain_variable_is_named(llama, monkeypatch):
    right = modeling_llama.RMSNorm.__init__

    def plain(self, *arguments, **keywords):
        right(self, *arguments, **keywords)
        self.weight = nnx.Variable(self.weight.get_raw_value(), **self.weight.get_metadata())

    monkeypatch.setattr(modeling_llama.RMSNorm, "__init__", plain)
    problems = trainable.untrained(llama)
    assert len(problems) == 3 and "layers.input_layernorm.weight is a flax.nnx" in " ".join(problems) and "neither nnx.Param nor a Buffer" in problems[0]


def test_a_weight_kept_as_a_buffer_is_named(llama, monkeypatch):
    from labkit.layers.variables import Buffer

    right = modeling_llama.RMSNorm.__init__

    def frozen(self, *arguments, **keywords):
        right(self, *arguments, **keywords)
        self.weight = Buffer(self.weight.get_raw_value(), **self.weight.get_metadata())

    monkeypatch.setattr(modeling_llama.RMSNorm, "__init__", frozen)
    assert any("norm.weight is a Buffer, and the reference trains model.norm.weight" in problem for problem in trainable.untrained(llama))


def test_a_gradient_cut_off_is_named_by_parameter_and_layer(llama, monkeypatch):
    right = modeling_llama.LlamaMLP.__call__

    def cut(self, x):
        self.up_proj.kernel = jax.tree.map(jax.lax.stop_gradient, self.up_proj.kernel)
        return right(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", cut)
    found = trainable.check(llama)
    assert [p.split(" is ")[0] for p in found.problems] == [f"the gradient of layers.mlp.up_proj.kernel, layer {n}" for n in (0, 1)]


@pytest.mark.slow
def test_one_expert_without_a_gradient_is_named(mixture, monkeypatch):
    right = modeling_qwen3_moe.apply_experts

    def cut(x, indices, weights, gate_up_proj, down_proj, *more):
        read = down_proj[...] if isinstance(down_proj, nnx.Variable) else down_proj
        held = read.at[3].set(jax.lax.stop_gradient(read[3]))
        return right(x, indices, weights, gate_up_proj, down_proj.replace(held) if isinstance(down_proj, nnx.Variable) else held, *more)

    monkeypatch.setattr(modeling_qwen3_moe, "apply_experts", cut)
    found = trainable.check(mixture)
    assert [p.split(" is ")[0] for p in found.problems] == [f"the gradient of layers.mlp.experts.down_proj, layer {n}, expert 3" for n in (0, 1)]


@pytest.mark.slow
def test_a_single_renormalised_expert_is_declared_with_its_reason(subject):
    found = trainable.check(subject("tiny:qwen3_moe?num_hidden_layers=2&mlp_only_layers=[]&num_experts_per_tok=1&norm_topk_prob=true&router_aux_loss_coef=0.0"))
    assert not found.problems and len(found.notes) == 1
    assert "layers.mlp.gate.kernel" in found.notes[0] and "renormalised to 1" in found.notes[0]


def test_a_key_bias_is_declared_and_a_query_bias_is_not():
    assert "softmax takes no notice" in trainable.reason_for("layers.self_attn.k_proj.bias", {})
    assert "the reference's own" in trainable.reason_for("layers.self_attn.q_proj.bias", {})


def test_rows_are_told_apart_by_layer_and_expert():
    from types import SimpleNamespace

    gradients = {"layers.mlp.experts.w": np.ones((2, 4, 3, 5)), "norm.weight": np.full(6, 2.0), "layers.mlp.shared_expert.w": np.ones((2, 4, 3))}
    gradients["layers.mlp.experts.w"][1, 2] = 0
    placed = {path: SimpleNamespace(layers=(0, 1) if path.startswith("layers") else ()) for path in gradients}
    rows = trainable.relative_rows(gradients, placed, 4)
    assert [row for row, value in rows.items() if value == 0] == [("layers.mlp.experts.w", 1, 2)]
    assert rows["norm.weight", None, None] == 1.0 and rows["layers.mlp.shared_expert.w", 0, None] == 0.5


def test_linen_and_bridges_are_found_in_the_graph_and_in_the_imports(tmp_path):
    import flax.linen as linen

    class Model(nnx.Module):
        def __init__(self):
            self.inner = nnx.bridge.ToNNX(linen.Dense(2), rngs=nnx.Rngs(0))

    assert any("inner is a ToNNX of flax.nnx.bridge" in problem for problem in trainable.foreign_modules(Model()))
    (tmp_path / "modeling_x.py").write_text("from flax import nnx\nfrom flax import linen as nn\n")
    assert trainable.foreign_imports(tmp_path) == ["modeling_x.py:2 imports flax.linen"]
    assert trainable.foreign_modules(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) == []


def test_the_batch_is_the_same_for_the_same_seed():
    a, b = (Subject("tiny:llama?num_hidden_layers=2", seed=seed).drawn(7) for seed in (0, 1))
    assert (a == b).all()
