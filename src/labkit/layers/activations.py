"""Activations by the names that Hugging Face configs use (`transformers.activations.ACT2FN`)."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.precision import widen
from labkit.layers.variables import value


def _once(function):
    """`function` rounded once: what torch runs as one kernel computes in float32 and rounds its result alone."""
    return lambda x: function(widen(x)).astype(x.dtype)


def _softplus(x):
    """log(1 + e^x), and x itself above 20, as torch has it."""
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20))))


def _tanh_gelu(inner):
    return lambda x: 0.5 * x * (1.0 + jnp.tanh(inner(x)))


_gelu = _once(functools.partial(jax.nn.gelu, approximate=False))
_silu = _once(jax.nn.silu)

ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_10": lambda x: jnp.clip(_gelu(x), -10, 10),
    "gelu_accurate": _tanh_gelu(lambda x: math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_fast": _tanh_gelu(lambda x: x * 0.7978845608 * (1.0 + 0.044715 * x * x)),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_python": lambda x: x * 0.5 * (1.0 + jax.lax.erf(x / math.sqrt(2.0))),
    "gelu_python_tanh": _tanh_gelu(lambda x: math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_pytorch_tanh": _once(functools.partial(jax.nn.gelu, approximate=True)),
    "hardswish": _once(lambda x: x * jnp.clip(x + 3, 0, 6) / 6),
    "laplace": lambda x: 0.5 * (1.0 + jax.lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "leaky_relu": lambda x: jnp.where(x > 0, x, 0.01 * x),
    "linear": lambda x: x,
    "mish": _once(lambda x: x * jnp.tanh(_softplus(x))),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": lambda x: jnp.clip(x, 0, 6),
    "sigmoid": _once(jax.nn.sigmoid),
    "silu": _silu,
    "sqrtsoftplus": lambda x: jnp.sqrt(_softplus(x)),
    "swish": _silu,
    "tanh": _once(jnp.tanh),
}
"""Functions of one array, by name."""


class PReLU(nnx.Module):
    """`torch.nn.PReLU`: x where positive, else `weight` [1] times x."""

    def __init__(self, *, build, name: str = "act_fn"):
        self.weight = build.param(0.25, (1,), None, f"{name}.weight")

    def __call__(self, x):
        return jnp.where(x > 0, x, value(self.weight) * x)


class XIELU(nnx.Module):
    """xIELU (arXiv 2411.13010; `XIELUActivation` of transformers). `alpha_p`, `alpha_n` [1], kept as inverse softplus; buffers `beta`, `eps`."""

    def __init__(self, *, build, name: str = "act_fn", alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5):
        inverse_softplus = lambda alpha: math.log(math.expm1(alpha))
        self.alpha_p = build.param(inverse_softplus(alpha_p_init), (1,), None, f"{name}.alpha_p")
        self.alpha_n = build.param(inverse_softplus(alpha_n_init - beta), (1,), None, f"{name}.alpha_n")
        self.beta, self.eps = build.buffer((), f"{name}.beta", init=beta), build.buffer((), f"{name}.eps", init=-1e-6)

    def __call__(self, x):
        beta, eps = value(self.beta), value(self.eps)
        alpha_p = _softplus(value(self.alpha_p))
        alpha_n = beta + _softplus(value(self.alpha_n))
        return jnp.where(x > 0, alpha_p * x * x + beta * x, (jnp.expm1(jnp.minimum(x, eps)) - x) * alpha_n + beta * x)


WITH_PARAMETERS = {"prelu": PReLU, "xielu": XIELU}
"""Activations that hold parameters: modules, made with a `Build`."""


def activation(name: str, build=None, **options):
    """What a config's `hidden_act` names: a function of one array, or, for those with parameters, a module made with `build` (options go to its class).

    Raises ValueError with the known names for any other, and for a module without a `build`.
    """
    if name in WITH_PARAMETERS:
        if build is None:
            raise ValueError(f"activation {name!r} holds parameters: give a build")
        return WITH_PARAMETERS[name](build=build, **options)
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(sorted({*ACTIVATIONS, *WITH_PARAMETERS}))}")
    return ACTIVATIONS[name]
