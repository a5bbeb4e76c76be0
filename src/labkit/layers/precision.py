"""The one place where values are widened."""

import jax.numpy as jnp
import numpy as np


def wide_dtype(dtype):
    """At least float32: bfloat16 and float32 give float32, float64 stays float64."""
    return np.dtype(jnp.float32) if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)


def widen(x):
    """`x` in at least float32. The reference's `.float()` and `dtype=torch.float32` become this, so one code path serves bfloat16, float32 and float64."""
    return x.astype(wide_dtype(x.dtype))


def constant(value, dtype):
    """A Python number as a scalar of `dtype`, rounded once: constants never pull a computation to another precision."""
    return jnp.asarray(np.float64(value).astype(dtype))


def scaled(x, number):
    """`x` times a Python number that is not rounded to a narrow dtype first: torch multiplies bfloat16 by the number in float32 and rounds once."""
    wide = widen(x)
    return (wide * constant(number, wide.dtype)).astype(x.dtype)
