"""Norms in the reference's rounding order. `nnx.RMSNorm` multiplies by the weight before it rounds to the input dtype, Hugging Face's after."""

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.precision import constant, widen


def rms_normalize(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, in at least float32 (the result is not rounded back)."""
    wide = widen(x)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + constant(eps, wide.dtype))


class RMSNorm(nnx.Module):
    """Root mean square norm: normalise in at least float32, round to the input dtype, then multiply by `weight` (`LlamaRMSNorm.forward` of transformers)."""

    def __init__(self, dim: int, *, eps: float, param_dtype, metadata):
        self.weight = nnx.Param(jnp.ones(dim, param_dtype), **metadata)
        self.eps = eps

    def __call__(self, x):
        return self.weight[...].astype(x.dtype) * rms_normalize(x, self.eps).astype(x.dtype)


class UnitOffsetRMSNorm(nnx.Module):
    """Root mean square norm whose factor is 1 + `weight`, multiplied before rounding (`Gemma2RMSNorm.forward` of transformers)."""

    def __init__(self, dim: int, *, eps: float, param_dtype, metadata):
        self.weight = nnx.Param(jnp.zeros(dim, param_dtype), **metadata)
        self.eps = eps

    def __call__(self, x):
        return (rms_normalize(x, self.eps) * (1 + widen(self.weight[...]))).astype(x.dtype)
