"""The one place where values are widened."""

import jax
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
    """`x` times a Python number (or a traced scalar) that is not rounded to a narrow dtype first: torch multiplies bfloat16 by the number in float32 and rounds
    once."""
    wide = widen(x)
    return (wide * _in(number, wide.dtype)).astype(x.dtype)


def divided(x, number):
    """`x` by a Python number, rounded once, as `scaled`."""
    wide = widen(x)
    return (wide / _in(number, wide.dtype)).astype(x.dtype)


def _in(number, dtype):
    return number.astype(dtype) if isinstance(number, jax.Array) else constant(number, dtype)


def dtype_named(name: str, dtype):
    """The dtype that a config names ("bfloat16", "float32"), at least float32 for the wide ones where the model computes in `dtype`. Raises ValueError for
    another name."""
    if name in ("float32", "float64"):
        return np.dtype(wide_dtype(dtype))
    if name in ("bfloat16", "float16"):
        return np.dtype(getattr(jnp, name))
    raise ValueError(f"no dtype of floats is called {name!r}")
