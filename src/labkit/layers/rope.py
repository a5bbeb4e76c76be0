"""Rotary position embeddings: inverse frequencies of the rope types of transformers, tables, and their application.

Frequencies follow `modeling_rope_utils.py` of transformers 5; everything is computed here, in at least float32, from plain numbers.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from labkit.layers.precision import wide_dtype


@dataclasses.dataclass(frozen=True)
class Rope:
    """What decides the rotation of one kind of layer.

    rope_type: default, linear, dynamic, yarn, longrope, llama3, proportional. dim: rotated channels per head. parameters: the other numbers of
    `rope_parameters`, as sorted pairs so that the object can be hashed; `max_position_embeddings` comes from the config.
    """

    rope_type: str
    rope_theta: float
    dim: int
    max_position_embeddings: int
    parameters: tuple[tuple[str, object], ...] = ()

    @classmethod
    def from_parameters(cls, parameters: Mapping, *, head_dim: int, max_position_embeddings: int, partial: bool = False) -> "Rope":
        """From a `rope_parameters` mapping as transformers 5 standardises it.

        partial: the family rotates only the first `partial_rotary_factor` of each head. Raises ValueError for an unknown rope type or number, and for a partial
        factor in a family that rotates whole heads.
        """
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in _FREQUENCIES:
            raise ValueError(f"rope_parameters: rope type {rope_type!r} is not one of {', '.join(sorted(_FREQUENCIES))}")
        unknown = sorted(set(parameters) - _KNOWN_PARAMETERS)
        if unknown:
            raise ValueError(f"rope_parameters: nothing here reads {', '.join(unknown)}")
        # "proportional" turns whole heads; the factor is the share of frequencies that are not zero.
        factor = 1.0 if rope_type == "proportional" else parameters.get("partial_rotary_factor") or 1.0
        if factor != 1.0 and not partial:
            raise ValueError(f"rope_parameters: partial_rotary_factor is {factor}, and this family rotates whole heads")
        frozen = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in parameters.items() if k not in ("rope_type", "type", "rope_theta")}
        dim = int(head_dim * factor)
        return cls(rope_type, float(parameters["rope_theta"]), dim, max_position_embeddings, tuple(sorted(frozen.items())))

    def thresholds(self) -> list[int]:
        """Lengths at which the rotation changes its frequencies; tests probe beyond each."""
        original = dict(self.parameters).get("original_max_position_embeddings")
        return {"dynamic": [self.max_position_embeddings], "longrope": [original], "yarn": [original], "llama3": [original]}.get(self.rope_type, [])


def _plain(rope: Rope, wide, theta=None):
    exponent = np.arange(0, rope.dim, 2, dtype=wide) / np.asarray(rope.dim, wide)
    return 1.0 / np.power(np.asarray(rope.rope_theta if theta is None else theta, wide), exponent)


def _default(rope, wide, length):
    return _plain(rope, wide), 1.0


def _linear(rope, wide, length):
    return _plain(rope, wide) / np.asarray(dict(rope.parameters)["factor"], wide), 1.0


def _dynamic(rope, wide, length):
    """NTK: the base grows with the length of the call once it exceeds `max_position_embeddings`."""
    factor, longest = dict(rope.parameters)["factor"], rope.max_position_embeddings
    seq_len = jnp.maximum(length, longest).astype(wide)
    growth = (factor * seq_len / longest - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    theta = jnp.asarray(rope.rope_theta, wide) * growth
    return 1.0 / theta ** (jnp.arange(0, rope.dim, 2, dtype=wide) / rope.dim), 1.0


def _mscale(scale, mscale=1.0):
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope, wide, length):
    """YaRN (arXiv 2309.00071): a ramp between interpolated and extrapolated frequencies, and a factor on cos and sin."""
    given, dim, base = dict(rope.parameters), rope.dim, rope.rope_theta
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or rope.max_position_embeddings / original
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)

    def correction(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(given.get("beta_fast") or 32), correction(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    kept = 1 - np.clip((np.arange(dim // 2, dtype=wide) - np.asarray(low, wide)) / np.asarray(high - low, wide), 0, 1)
    plain = _plain(rope, wide)
    return plain / np.asarray(factor, wide) * (1 - kept) + plain * kept, attention_factor


def _longrope(rope, wide, length):
    """LongRoPE: one divisor per frequency, short or long by the length of the call."""
    given = dict(rope.parameters)
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or rope.max_position_embeddings / original
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = 1.0 / _plain(rope, wide)
    short, long = (1.0 / (np.asarray(given[k], wide) * plain) for k in ("short_factor", "long_factor"))
    return jnp.where(length > original, long, short), attention_factor


def _llama3(rope, wide, length):
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a smooth blend between."""
    given = dict(rope.parameters)
    original, factor = given["original_max_position_embeddings"], given["factor"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    plain = _plain(rope, wide)
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > original / low, plain / factor, plain)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(medium, blended, scaled).astype(wide), 1.0


def _proportional(rope, wide, length):
    """The first `partial_rotary_factor` of the pairs turn, at frequencies spread over the whole head; the others stand still."""
    given = dict(rope.parameters)
    partial = given.get("partial_rotary_factor")
    angles = int((1.0 if partial is None else partial) * rope.dim // 2)
    turned = _plain(rope, wide)[:angles]
    return np.concatenate([turned, np.zeros(rope.dim // 2 - angles, wide)]) / np.asarray(given.get("factor") or 1.0, wide), 1.0


_FREQUENCIES = {
    **{"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope, "llama3": _llama3},
    "proportional": _proportional,
}


_KNOWN_PARAMETERS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
}


def inverse_frequencies(rope: Rope, dtype, length=None):
    """(inv_freq [dim / 2] in at least float32, factor on cos and sin). `length`: highest position of the call plus one, for the types that look at it."""
    return _FREQUENCIES[rope.rope_type](rope, np.dtype(wide_dtype(dtype)), jnp.asarray(0) if length is None else length)


def rope_table(positions_bt, rope: Rope, dtype):
    """cos and sin, each [batch, length, dim] in `dtype`, halves repeated (split-half pairing); angles are taken in at least float32."""
    inv_freq, factor = inverse_frequencies(rope, dtype, jnp.max(positions_bt) + 1)
    wide = wide_dtype(dtype)
    angles = positions_bt[..., None].astype(wide) * jnp.asarray(inv_freq, wide)
    angles = jnp.concatenate([angles, angles], -1)
    factor = jnp.asarray(factor, wide)
    return (jnp.cos(angles) * factor).astype(dtype), (jnp.sin(angles) * factor).astype(dtype)


def rotate_half(x):
    """The second half of the last axis, negated, before the first half."""
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1)


def apply_rope(x_bthd, cos_btd, sin_btd):
    """Rotate the pairs (i, i + dim / 2) of [batch, length, heads, dim]; channels beyond the table's width pass through untouched."""
    dim = cos_btd.shape[-1]
    turned, passed = x_bthd[..., :dim], x_bthd[..., dim:]
    turned = turned * cos_btd[:, :, None] + rotate_half(turned) * sin_btd[:, :, None]
    return jnp.concatenate([turned, passed], -1) if passed.shape[-1] else turned


__all__ = ["Rope", "apply_rope", "inverse_frequencies", "rope_table", "rotate_half"]
