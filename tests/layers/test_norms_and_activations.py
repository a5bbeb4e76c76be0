"""Norms to the bit in their dtype, and activations, against the installed transformers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labkit.hf.exact import exact_mode
from labkit.layers.activations import ACTIVATIONS, WITH_PARAMETERS, activation
from labkit.layers.building import Build
from labkit.layers.norms import RMSNorm, UnitOffsetRMSNorm
from labkit.layers.sharding import Sharding, construction, default_mesh

PAIRS = [(RMSNorm, LlamaRMSNorm), (UnitOffsetRMSNorm, Gemma2RMSNorm)]


def run(ours, reference, dtype, eps=1e-5, reference_eps=1e-5):
    """(ours, reference) in float64 on random rows of width 40, computed in `dtype`."""
    random = np.random.RandomState(0)
    x, weight = random.randn(64, 40) * 0.02, random.randn(40) * 0.3 + 0.7
    torch_dtype = {np.float64: torch.float64, np.float32: torch.float32, ml_dtypes.bfloat16: torch.bfloat16}[dtype]
    module = reference(40, eps=reference_eps).to(torch_dtype)
    module.weight.data = torch.from_numpy(weight).to(torch_dtype)
    with torch.no_grad():
        given = torch.from_numpy(x).to(torch_dtype)
        if dtype is np.float64:
            with exact_mode():
                want = module(given)
        else:
            want = module(given)
    with jax.enable_x64(dtype is np.float64):
        norm = ours(40, eps=eps, param_dtype=dtype, metadata={})
        norm.weight[...] = jnp.asarray(weight.astype(dtype))
        return np.asarray(norm(jnp.asarray(x.astype(dtype)))).astype(np.float64), want.double().numpy()


@pytest.mark.parametrize("ours, reference", PAIRS)
def test_exact(ours, reference):
    a, b = run(ours, reference, np.float64)
    np.testing.assert_allclose(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("ours, reference", PAIRS)
def test_another_epsilon_is_noticed(ours, reference):
    a, b = run(ours, reference, np.float64, eps=1e-6)
    assert np.abs(a - b).max() / np.abs(b).max() > 1e-3


@pytest.mark.parametrize("ours, reference", PAIRS)
def test_rounding_order_in_bfloat16(ours, reference):
    a, b = run(ours, reference, ml_dtypes.bfloat16)
    assert np.mean(a == b) > 0.995


def test_why_nnx_rms_norm_does_not_serve():
    """It multiplies before it rounds: other values in bfloat16, which is why the lab has its own."""

    class Norm(nnx.Module):
        def __init__(self, dim, *, eps, param_dtype, metadata):
            self.norm = nnx.RMSNorm(dim, epsilon=eps, dtype=param_dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
            self.weight = self.norm.scale

        def __call__(self, x):
            return self.norm(x)

    a, b = run(Norm, LlamaRMSNorm, ml_dtypes.bfloat16)
    assert np.mean(a == b) < 0.9


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_the_reference(name):
    x = np.linspace(-6, 6, 501)
    with jax.enable_x64(True):
        ours = np.asarray(activation(name)(jnp.asarray(x)))
    np.testing.assert_allclose(ours, ACT2FN[name](torch.from_numpy(x)).numpy(), rtol=0, atol=1e-14)


def test_every_name_of_the_reference_is_known():
    assert {*ACTIVATIONS, *WITH_PARAMETERS} == set(ACT2FN)


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_activation_with_parameters_equals_the_reference(name):
    x, reference = np.linspace(-6, 6, 501), ACT2FN[name].double()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), construction(default_mesh()):
        module = activation(name, Build(nnx.Rngs(0), Sharding(), jnp.float64, jnp.float64))
        state = reference.state_dict()
        assert {path[0] for path, _ in nnx.to_flat_state(nnx.state(module))} == set(state)
        for key, tensor in state.items():
            variable = getattr(module, key)
            assert variable.shape == tuple(tensor.shape) and abs(float(variable[...].sum()) - float(tensor.sum())) < 0.02
            variable[...] = jnp.asarray(tensor.numpy() * 1.1)
            tensor.mul_(1.1)
        ours = np.asarray(module(jnp.asarray(x)))
    np.testing.assert_allclose(ours, reference(torch.from_numpy(x)).detach().numpy(), rtol=0, atol=1e-13)


def test_an_activation_with_parameters_needs_a_build():
    with pytest.raises(ValueError, match="'xielu' holds parameters"):
        activation("xielu")


def test_the_two_gelus_are_told_apart():
    x = jnp.linspace(-3, 3, 50)
    assert float(jnp.abs(activation("gelu")(x) - activation("gelu_pytorch_tanh")(x)).max()) > 1e-4


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'gelu_fast_and_loose' is not one of gelu"):
        activation("gelu_fast_and_loose")
