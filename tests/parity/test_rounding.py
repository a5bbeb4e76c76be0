"""bfloat16, part by part: right ports pass, and each missing upcast is rejected and named. Neither float64 nor float32 sees them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.converters import load_model
from labkit.errors import GateError
from labkit.hf.reference import Reference
from labkit.hf.source import open_source
from labkit.layers import activations, attention, norms
from labkit.layers.precision import constant
from labkit.parity.rounding import RATIO_LIMIT, by_kind, compare_rounding, worst

TOKENS = np.random.default_rng(0).integers(3, 100, (2, 64))
MODELS = ("tiny:llama?num_hidden_layers=2", "tiny:llama?num_hidden_layers=2&attention_bias=true&mlp_bias=true", "tiny:gemma2", "tiny:qwen3_moe")


def rounding(model: str):
    source = open_source(model)
    ours, wide = (load_model(source, dtype=dtype)[0] for dtype in (jnp.bfloat16, jnp.float32))
    return compare_rounding(ours, wide, Reference.load(source, "bfloat16"), TOKENS)


@pytest.mark.parametrize("model", [pytest.param(model, marks=[pytest.mark.slow] * ("gemma2" in model)) for model in MODELS])
def test_a_right_port_rounds_where_the_reference_rounds(model):
    found = rounding(model)
    assert all(part.passed for part in found), worst(found)
    assert {kind for kind, *_ in by_kind(found)} >= {"attention", "mlp", "norms", "final norm", "head"}
    assert all(part.unequal <= 0.01 for part in found if part.kind in ("norms", "final norm", "embedding"))


def narrow_norm(monkeypatch):
    def rms_normalize(x, eps):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + constant(eps, x.dtype))

    monkeypatch.setattr(norms, "rms_normalize", rms_normalize)


def narrow_softmax(monkeypatch):
    monkeypatch.setattr(attention, "widen", lambda x: x)


def narrow_activation(monkeypatch):
    monkeypatch.setitem(activations.ACTIVATIONS, "silu", lambda x: x / (1 + jnp.exp(-x)))


@pytest.mark.parametrize(
    "plant, kind, place", [(narrow_norm, "norms", "input_layernorm"), (narrow_softmax, "attention", ".attn"), (narrow_activation, "mlp", "down_proj")]
)
def test_a_missing_upcast_is_rejected_and_named(monkeypatch, plant, kind, place):
    plant(monkeypatch)
    found = rounding(MODELS[0])
    wrong = [part for part in found if not part.passed]
    assert wrong and all(part.ratio > RATIO_LIMIT for part in wrong)
    assert any(part.kind == kind and place in part.place and part.reference and part.cited for part in wrong), wrong
    assert {part.kind for part in wrong} <= {kind, "final norm"}


def test_only_a_reference_in_bfloat16_will_do():
    source = open_source(MODELS[0])
    model = load_model(source, dtype=jnp.float32)[0]
    with pytest.raises(GateError, match="bfloat16"):
        compare_rounding(model, model, Reference.load(source, "float32"), TOKENS)
