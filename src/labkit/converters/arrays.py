"""Moving numbers fast and exactly in numpy: blocked transposes, the finite check, dtype changes. Two-byte floats are handled as their bit patterns."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TILE = 128  # a tile of 128 x 128 two-byte elements stays in the first-level cache on both sides
_BLOCK = 1 << 17
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(array: np.ndarray) -> np.ndarray:
    """The same memory seen as unsigned integers: numpy's loops over ml_dtypes elements are slow, those over integers are not."""
    return array if array.dtype.itemsize not in _UNSIGNED else array.view(_UNSIGNED[array.dtype.itemsize])


def copy_into(out: np.ndarray, view: np.ndarray) -> None:
    """`out[...] = view` for equal shapes and dtypes, tile by tile where the view runs across memory (3 times as fast as numpy on a transpose)."""
    if out.shape != view.shape or out.dtype != view.dtype:
        raise ValueError(f"copy of {view.dtype}{view.shape} into {out.dtype}{out.shape}")
    if view.ndim >= 2 and view.size and not view.flags.c_contiguous and view.strides[-1] != view.dtype.itemsize:
        fast = int(np.argmin([abs(s) if n > 1 else np.iinfo(np.int64).max for s, n in zip(view.strides, view.shape)]))
        _copy_tiled(bits(out), bits(view), fast)
    else:
        np.copyto(bits(out), bits(view))


def _copy_tiled(out: np.ndarray, view: np.ndarray, fast: int) -> None:
    """Tiles over the view's fast axis and its last one; other axes are walked."""
    last = view.ndim - 1
    if fast == last:
        np.copyto(out, view)
        return
    outer = [a for a in range(view.ndim) if a not in (fast, last)]
    for index in np.ndindex(*(view.shape[a] for a in outer)):
        where: list = [slice(None)] * view.ndim
        for axis, i in zip(outer, index):
            where[axis] = i
        o, v = out[tuple(where)], view[tuple(where)]
        for i in range(0, v.shape[0], _TILE):
            for j in range(0, v.shape[1], _TILE):
                o[i : i + _TILE, j : j + _TILE] = v[i : i + _TILE, j : j + _TILE]


def contiguous(view: np.ndarray) -> np.ndarray:
    """The view itself when it is contiguous in C order, else a copy that is."""
    if view.flags.c_contiguous:
        return view
    out = np.empty(view.shape, view.dtype)
    copy_into(out, view)
    return out


def is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def first_non_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first NaN or infinity in C order, or None. Reads in blocks, so its memory stays small. Integers are finite."""
    if not is_float(array.dtype) or not array.size:
        return None
    flat = contiguous(array).reshape(-1)
    exponent = _exponent_mask(array.dtype)
    scratch = np.empty(min(_BLOCK, flat.size), _UNSIGNED[array.dtype.itemsize]) if exponent else None
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if exponent:
            masked = np.bitwise_and(bits(block), exponent, out=scratch[: block.size])
            if masked.max() != exponent:
                continue
            bad = masked == exponent
        else:
            bad = ~np.isfinite(block.astype(np.float32))
        if bad.any():
            return tuple(int(i) for i in np.unravel_index(start + int(bad.argmax()), array.shape))
    return None


def _exponent_mask(dtype) -> int | None:
    """The exponent bits, all ones in NaN and infinity, of the IEEE-like formats; None for the small floats, which spend that pattern otherwise."""
    return {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}.get(np.dtype(dtype).name)


def exact(old, new) -> bool:
    """Whether every value of dtype `old` is a value of dtype `new`."""
    old, new = np.dtype(old), np.dtype(new)
    if old == new:
        return True
    if not is_float(old) or not is_float(new):
        return np.can_cast(old, new, "safe") if not (is_float(old) or is_float(new)) else False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp


def common(dtypes) -> np.dtype:
    """The smallest dtype that holds every value of all of them exactly. ValueError when there is none."""
    dtypes = {np.dtype(d) for d in dtypes}
    for candidate in (*sorted(dtypes, key=lambda d: d.itemsize), np.dtype(np.float32), np.dtype(np.float64)):
        if all(exact(d, candidate) for d in dtypes):
            return candidate
    raise ValueError(f"no dtype holds {sorted(d.name for d in dtypes)} exactly")


def cast(array: np.ndarray, dtype) -> np.ndarray:
    """The array in another dtype, rounded to nearest even where it narrows. Itself when the dtype is the same."""
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if array.dtype == BFLOAT16 and is_float(dtype) and dtype.itemsize >= 4:
        wide = (bits(contiguous(array)).astype(np.uint32) << 16).view(np.float32)
        return wide.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(contiguous(a).reshape(-1).view(np.uint8), contiguous(b).reshape(-1).view(np.uint8))


def difference(a: np.ndarray, b: np.ndarray) -> str:
    """How two arrays differ, in words."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {a.shape} and {b.dtype} {b.shape}"
    unequal, largest = 0, 0.0
    x, y = contiguous(a).reshape(-1), contiguous(b).reshape(-1)
    for start in range(0, x.size, _BLOCK):
        p, q = x[start : start + _BLOCK], y[start : start + _BLOCK]
        unequal += int((bits(p) != bits(q)).sum())
        with np.errstate(invalid="ignore"):
            largest = max(largest, float(np.abs(p.astype(np.float64) - q.astype(np.float64)).max(initial=0)))
    return f"{unequal:,} of {x.size:,} values differ, by up to {largest:.3g}"
