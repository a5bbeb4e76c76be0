"""Activations by the names that Hugging Face configs use (`transformers.activations.ACT2FN`)."""

import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation(name: str):
    """The function that a config's `hidden_act` names. Raises ValueError with the known names for any other."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
