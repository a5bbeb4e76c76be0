"""The checklist: green for the right port, red in one place for one fault."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.errors import InputError
from labkit.layers import rope as rope_layer
from labkit.models.llama import modeling_llama
from labkit.parity.capture import capture
from labkit.parity.citation import cite
from labkit.parity.compare import kl_per_position, relative_error
from labkit.parity.components import KINDS, compare_components
from labkit.parity.controls import rebuild, with_wrong_eps


def test_a_family_without_an_eps_has_a_wrong_weight(both, x64):
    from labkit.parity.controls import has_eps, with_wrong_weight

    assert has_eps(both.config) and not has_eps(dataclasses.make_dataclass("Config", ["rms_norm_eps"])(None))
    wrong, name, right, value = with_wrong_weight(both.model)
    table = compare_components(capture(wrong, both.tokens), capture(wrong, both.tokens, inject=both.captured), both.captured)
    assert not table.passed and (right, value) == (1.0, 1.001) and name.startswith("layers.")
    assert relative_error(both.free["logits"], both.captured.outputs["logits"]) < 1e-12


def table_of(both, model=None, inject=None):
    model = model or both.model
    return compare_components(capture(model, both.tokens), capture(model, both.tokens, inject=both.captured), both.captured)


def test_the_right_port_is_green_everywhere(both):
    table = compare_components(both.free, both.isolated, both.captured)
    assert table.passed and not table.isolated_faults and table.first_divergence is None and not table.missing and not table.extra
    assert {row.kind for row in table.rows} == set(KINDS) - {"router", "experts"}
    assert all(row.isolated <= 1e-14 and row.free <= 1e-13 and row.compared for row in table.rows)


def test_every_module_and_point_of_the_reference_is_compared(both):
    assert both.captured.weighted <= set(both.free)
    assert {f"layers.1.self_attn.{point}" for point in ("q_rope", "k_rope", "attn")} <= set(both.free) & set(both.captured.outputs)


def test_a_module_that_another_ones_method_calls_has_its_whole_path():
    from flax import nnx

    class Inner(nnx.Module):
        def __init__(self):
            self.router = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def predict(self, x):
            return self.router(x)

    class Layer(nnx.Module):
        def __init__(self):
            self.inner, self.several = Inner(), nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(1))])

        def __call__(self, x):
            return self.several[0](self.inner.predict(x))

    class Model(nnx.Module):
        def __init__(self):
            self.layer = Layer()

        def __call__(self, tokens, scan):
            return self.layer(jax.nn.one_hot(tokens, 3))

    assert set(capture(Model(), np.array([[0, 1, 2]]))) == {"layer", "layer.inner.router", "layer.several.0", "logits"}


def test_rows_cite_both_sources(both):
    for row in compare_components(both.free, both.isolated, both.captured).rows:
        assert row.reference.startswith("transformers/models/llama/modeling_llama.py:") and int(row.reference.rpartition(":")[2]) > 0
        assert row.ours.startswith(("labkit/", "flax/nnx/nn/")) and int(row.ours.rpartition(":")[2]) > 0
    assert cite(modeling_llama.LlamaMLP, "__call__").startswith("labkit/models/llama/modeling_llama.py:")
    assert cite(int) == ""


def test_wrong_eps_is_red_at_norms_and_nowhere_else(both, x64):
    config, key, right, wrong = with_wrong_eps(both.config)
    assert key == "rms_norm_eps" and right != wrong
    table = table_of(both, rebuild(both.model, "llama", config))
    assert {fault.kind for fault in table.isolated_faults} == {"norms", "final norm"} and not table.passed
    assert table.first_divergence.place == "layers.0.input_layernorm"
    assert max(table.free_errors.values()) > 1e-5


def interleaved(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    half = cos.shape[-1] // 2
    c, s = cos[:, :, None, :half], sin[:, :, None, :half]
    return jnp.stack([first * c - second * s, second * c + first * s], -1).reshape(x.shape)


def swapped_mlp(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def without_residual(self, x, *, tokens, rope, cache):
    attended, cache = self.self_attn(self.input_layernorm(x), tokens=tokens, rope=rope, cache=cache)
    return attended + self.mlp(self.post_attention_layernorm(x + attended)), cache, {}


FAULTS = {
    "rope pairs neighbours": ("apply_rope", interleaved, {"rope"}),
    "scale": ("attend", lambda *a, scale, **k: modeling_attend(*a, scale=scale * 1.01, **k), {"attention"}),
    "grouping": ("attend", lambda q, k, v, mask, **kw: modeling_attend(q, jnp.roll(k, 1, 2), jnp.roll(v, 1, 2), mask, **kw), {"attention"}),
    "mask": ("causal_mask", lambda tokens: jnp.ones((2, 12, 12), bool), {"attention"}),
    "gate and up": ("LlamaMLP.__call__", swapped_mlp, {"mlp"}),
    "residual": ("LlamaDecoderLayer.__call__", without_residual, {"block"}),
}
modeling_attend = modeling_llama.attend


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_red_in_one_component(both, x64, monkeypatch, name):
    target, replacement, kinds = FAULTS[name]
    owner, _, attribute = target.rpartition(".")
    monkeypatch.setattr(getattr(modeling_llama, owner) if owner else modeling_llama, attribute, replacement)
    table = table_of(both)
    assert {fault.kind for fault in table.isolated_faults} == kinds, [f.place for f in table.isolated_faults]
    assert not table.passed and table.first_divergence is not None


def test_a_wrong_theta_is_rope(both, x64, monkeypatch):
    monkeypatch.setattr(
        modeling_llama, "rope_table", lambda p, rope, dtype: rope_layer.rope_table(p, type(rope)(rope.rope_type, rope.rope_theta * 1.01, rope.dim, 320), dtype)
    )
    table = table_of(both)
    assert {fault.kind for fault in table.isolated_faults} == {"rope"}


def test_a_module_that_never_runs_is_missing(both):
    less = {n: v for n, v in both.free.items() if n != "layers.1.mlp"}
    isolated = copy.copy(both.isolated)
    del isolated["layers.1.mlp.up_proj"]
    table = compare_components(less, isolated, both.captured)
    assert table.missing == ("layers.1.mlp.up_proj",) and not table.passed


def test_capture_leaves_no_trace(both, x64):
    before = {cls: vars(cls).get("__call__") for cls in (modeling_llama.LlamaMLP, modeling_llama.LlamaAttention)}
    with pytest.raises((TypeError, ValueError)):
        capture(both.model, np.zeros((2, 2, 2), int))
    assert before == {cls: vars(cls).get("__call__") for cls in before}
    assert not any(hasattr(call, "_labkit_original") for call in before.values())


def test_the_control_passes_loose_limits(both, x64):
    """Why the exact verdict exists: the same wrong model under a KL limit."""
    config, *_ = with_wrong_eps(both.config)
    wrong = capture(rebuild(both.model, "llama", config), both.tokens)["logits"]
    assert relative_error(wrong, both.captured.outputs["logits"]) > 1e-6
    assert kl_per_position(wrong, both.captured.outputs["logits"]).max() < 1e-4


def test_rebuild_refuses_other_shapes(both, x64):
    import dataclasses

    with pytest.raises(InputError, match="different parameters"):
        rebuild(both.model, "llama", dataclasses.replace(both.config, intermediate_size=both.config.intermediate_size + 2))
    assert jax.config.jax_enable_x64
