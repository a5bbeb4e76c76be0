"""Modules of `torch.nn` whose parameters keep Hugging Face's names and orientation, in torch's rounding order."""

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.precision import constant, widen
from labkit.layers.variables import value

MAX_SHIFTS = 8
"""Depthwise kernels up to this size are sums of shifted products: XLA's grouped convolution is far slower on CPU."""


def conv1d(x, weight, bias=None, *, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1):
    """`torch.nn.functional.conv1d`: x [batch, in, length], weight [out, in / groups, kernel], bias [out] -> [batch, out, length']. Accumulates in at least
    float32 and rounds once."""
    dtype, (out_channels, per_group, kernel) = x.dtype, weight.shape
    x, weight = widen(x), widen(weight)
    if per_group == 1 and groups == x.shape[1] == out_channels and kernel <= MAX_SHIFTS:
        x = jnp.pad(x, ((0, 0), (0, 0), (padding, padding)))
        length = (x.shape[-1] - dilation * (kernel - 1) - 1) // stride + 1
        reach = (length - 1) * stride + 1
        out = sum(x[..., k * dilation : k * dilation + reach : stride] * weight[:, 0, k, None] for k in range(kernel))
    else:
        out = jax.lax.conv_general_dilated(
            x, weight, (stride,), [(padding, padding)], rhs_dilation=(dilation,), feature_group_count=groups, dimension_numbers=("NCH", "OIH", "NCH")
        )
    if bias is not None:
        out = out + widen(bias)[:, None]
    return out.astype(dtype)


class Conv1d(nnx.Module):
    """`torch.nn.Conv1d`. [batch, in, length] -> [batch, out, length']."""

    def __init__(self, in_channels, out_channels, kernel_size, *, groups, padding, stride, dilation, bias, name, build):
        self.weight = build.param("normal", (out_channels, in_channels // groups, kernel_size), None, f"{name}.weight")
        self.bias = build.param(jnp.zeros, (out_channels,), None, f"{name}.bias") if bias else None
        self.groups, self.padding, self.stride, self.dilation = groups, padding, stride, dilation
        self.kernel_size, self.in_channels, self.out_channels = (kernel_size,), in_channels, out_channels

    def __call__(self, x):
        return conv1d(x, value(self.weight), value(self.bias), stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups)


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    """`torch.nn.functional.layer_norm` over the last len(shape) axes: computed in at least float32, rounded once."""
    axes = tuple(range(-len(shape), 0))
    wide = widen(x)
    centred = wide - jnp.mean(wide, axes, keepdims=True)
    out = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axes, keepdims=True) + constant(eps, wide.dtype))
    if weight is not None:
        out = out * widen(weight).astype(out.dtype)
    if bias is not None:
        out = out + widen(bias).astype(out.dtype)
    return out.astype(x.dtype)


def rms_norm(x, shape, weight=None, eps=None):
    """`torch.nn.functional.rms_norm`: computed in at least float32, multiplied by `weight` and rounded once. eps None: the machine epsilon of x's dtype."""
    axes = tuple(range(-len(shape), 0))
    wide = widen(x)
    out = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + constant(jnp.finfo(x.dtype).eps if eps is None else eps, wide.dtype))
    return (out if weight is None else out * widen(weight).astype(out.dtype)).astype(x.dtype)


def _shape(shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


class LayerNorm(nnx.Module):
    """`torch.nn.LayerNorm`."""

    def __init__(self, shape, *, eps, elementwise_affine, bias, name, build):
        self.normalized_shape, self.eps = _shape(shape), eps
        self.weight = build.param(jnp.ones, self.normalized_shape, None, f"{name}.weight") if elementwise_affine else None
        self.bias = build.param(jnp.zeros, self.normalized_shape, None, f"{name}.bias") if elementwise_affine and bias else None

    def __call__(self, x):
        return layer_norm(x, self.normalized_shape, value(self.weight), value(self.bias), self.eps)


class TorchRMSNorm(nnx.Module):
    """`torch.nn.RMSNorm`."""

    def __init__(self, shape, *, eps, elementwise_affine, name, build):
        self.normalized_shape, self.eps = _shape(shape), eps
        self.weight = build.param(jnp.ones, self.normalized_shape, None, f"{name}.weight") if elementwise_affine else None

    def __call__(self, x):
        return rms_norm(x, self.normalized_shape, value(self.weight), self.eps)


class Sequential(nnx.List):
    """`torch.nn.Sequential`: one after the other; parameters are named by the place in it."""

    def __call__(self, x):
        for module in self:
            x = module(x)
        return x


class HeadBias(nnx.Module):
    """What is left of a linear head whose weight is the embedding's: `bias` [features], or nothing."""

    def __init__(self, features: int, *, bias, name, build):
        self.bias = build.param(jnp.zeros, (features,), ("vocab",), f"{name}.bias") if bias else None

    def __call__(self, logits):
        return logits if self.bias is None else logits + value(self.bias)
