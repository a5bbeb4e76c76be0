"""Array operations that translated slices need and jax.numpy has under no one name. Semantics are torch's, stated by each function."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from labkit.layers.precision import constant, widen


def identity(x):
    """`torch.nn.Identity`."""
    return x


def softmax(x, axis: int = -1):
    """In the dtype of `x`, computed in at least float32 and rounded once, as torch does it.

    Far below every score all are one value: XLA may round a masked score and the row's maximum differently where it fuses what came before, and a row that is
    masked throughout (a query of padding) would be 0 / 0."""
    wide = widen(x)
    return jax.nn.softmax(jnp.maximum(wide, jnp.finfo(wide.dtype).min * 2.0**-64), axis=axis).astype(x.dtype)


def softplus(x, beta=1.0, threshold=20.0):
    """log(1 + exp(beta x)) / beta, and x itself where beta x exceeds `threshold` (`torch.nn.functional.softplus`); rounded once, as torch does it."""
    wide = widen(x)
    scaled = wide * beta
    return jnp.where(scaled > threshold, wide, jnp.logaddexp(scaled, jnp.zeros_like(scaled)) / beta).astype(x.dtype)


def sigmoid(x):
    """1 / (1 + exp(-x)), rounded once: XLA on CPU rounds every step of it."""
    return jax.nn.sigmoid(widen(x)).astype(x.dtype)


def silu(x):
    """x sigmoid(x) (`torch.nn.functional.silu`), rounded once."""
    return jax.nn.silu(widen(x)).astype(x.dtype)


def gelu(x, approximate: bool = False):
    """x times the normal distribution's share below x, or its form by tanh (`torch.nn.functional.gelu`); rounded once."""
    return jax.nn.gelu(widen(x), approximate=approximate).astype(x.dtype)


def split(x, sizes, axis: int):
    """Pieces along an axis: of `sizes` each, the last one shorter (an int), or of the listed sizes (`torch.split`)."""
    length = x.shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"sizes {list(sizes)} do not add up to {length}, axis {axis} of {x.shape}")
    return jnp.split(x, np.cumsum(list(sizes))[:-1].tolist(), axis=axis)


def every(x, step: int, start: int = 0):
    """`x[..., start::step]`: every `step`-th element of the last axis.

    Where the axis divides it is one column of a reshape: the gradient of a strided slice pads between elements, and the TPU compiler does not get done with
    that on wide arrays (18 s against 78 s at 512 columns on v6e, not in minutes at 720).
    """
    if x.shape[-1] % step or not 0 <= start < step:
        return x[..., start::step]
    return x.reshape(*x.shape[:-1], x.shape[-1] // step, step)[..., start]


def pad(x, widths, value=0.0, mode="constant"):
    """Padding given from the last axis backwards, (before, after) for each; negative widths crop (`torch.nn.functional.pad`)."""
    if mode != "constant":
        raise ValueError(f"padding mode {mode!r}")
    pairs = [(0, 0)] * x.ndim
    for i in range(len(widths) // 2):
        pairs[x.ndim - 1 - i] = (widths[2 * i], widths[2 * i + 1])
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), [(before, after, 0) for before, after in pairs])


def expand(x, sizes):
    """`x` broadcast to `sizes`, -1 keeping an axis, new axes in front (`Tensor.expand`)."""
    lead = len(sizes) - x.ndim
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.broadcast_to(x, tuple(x.shape[i - lead] if size == -1 else size for i, size in enumerate(sizes)))


def flatten(x, start: int = 0, end: int = -1):
    """Axes `start` to `end`, both included, as one."""
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def unflatten(x, axis: int, sizes):
    """Axis `axis` as several of `sizes`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def unbind(x, axis: int = 0):
    """The slices along an axis, without it."""
    return tuple(jnp.moveaxis(x, axis, 0))


def unfold(x, axis: int, size: int, step: int):
    """Windows of `size` every `step` along an axis, as a new last axis (`Tensor.unfold`)."""
    axis %= x.ndim
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis + 1, -1)


def _along(x, axis: int, index):
    axis %= x.ndim
    grid = list(jnp.meshgrid(*(jnp.arange(n, dtype=index.dtype) for n in index.shape), indexing="ij", sparse=True))
    grid[axis] = index
    return tuple(grid)


def gather(x, axis: int, index):
    """The elements of `x` at `index` along an axis; the other axes as far as `index` goes, which never broadcasts (`Tensor.gather`)."""
    axis %= x.ndim
    return jnp.take_along_axis(x[tuple(slice(None) if a == axis else slice(n) for a, n in enumerate(index.shape))], index, axis=axis)


def scatter(x, axis: int, index, source):
    """`x` with `source` (an array at least as large as `index`, or a number) at `index` along an axis (`Tensor.scatter`)."""
    return x.at[_along(x, axis, index)].set(source[tuple(slice(n) for n in index.shape)] if jnp.ndim(source) else source)


def scatter_add(x, axis: int, index, source):
    """`x` plus `source` at `index` along an axis (`Tensor.scatter_add`)."""
    return x.at[_along(x, axis, index)].add(source[tuple(slice(n) for n in index.shape)])


def index_add(x, axis: int, index, source):
    """`x` with slices of `source` added at the positions `index` of an axis (`Tensor.index_add`)."""
    at = (slice(None),) * (axis % x.ndim)
    return x.at[(*at, index)].add(source)


def index_copy(x, axis: int, index, source):
    """`x` with slices of `source` at the positions `index` of an axis (`Tensor.index_copy`)."""
    at = (slice(None),) * (axis % x.ndim)
    return x.at[(*at, index)].set(source)


def view_as_complex(x):
    """[..., 2] real -> [...] complex."""
    return jax.lax.complex(x[..., 0], x[..., 1])


def view_as_real(x):
    """[...] complex -> [..., 2] real."""
    return jnp.stack([x.real, x.imag], -1)


def normalize(x, p=2.0, axis: int = 1, eps=1e-12):
    """x over its p-norm along an axis, the norm at least `eps` (`torch.nn.functional.normalize`)."""
    norm = jnp.linalg.norm(x, ord=p, axis=axis, keepdims=True)
    return x / jnp.maximum(norm, constant(eps, norm.dtype))


def solve_triangular(a, b, *, upper: bool, unitriangular: bool = False):
    """x with a x = b for triangular `a`, batched (`torch.linalg.solve_triangular`): a [..., n, n], b [..., n, m] of the same leading axes.

    On several CPU devices one matrix after the other: LAPACK's batched kernel of jaxlib 0.10.2 holds a thread of the pool that all devices share while it waits
    for others to take its batch, and where every device does so at once, none is left and the program stands still.
    """
    solve = lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=not upper, unit_diagonal=unitriangular)
    if a.ndim < 3 or a.shape[:-2] != b.shape[:-2] or jax.default_backend() != "cpu" or jax.device_count() == 1:
        return solve(a, b)

    def in_turn(a, b):
        flat = lambda x: x.reshape(-1, *x.shape[-2:])
        return jax.lax.map(lambda pair: solve(*pair), (flat(a), flat(b))).reshape(b.shape)

    return jax.lax.platform_dependent(a, b, cpu=in_turn, default=solve)


@dataclasses.dataclass(frozen=True)
class Normal:
    """`torch.distributions.Normal`, as far as models use it."""

    loc: float
    scale: float

    def icdf(self, value):
        """The quantile function."""
        return self.loc + self.scale * jax.lax.erf_inv(2 * value - 1) * math.sqrt(2)


class Partial:
    """`functools.partial` of keywords alone, as part of a graph definition: two of the same function and equal keywords are equal."""

    def __init__(self, function, **keywords):
        self.function, self.keywords = function, keywords

    def __call__(self, *args, **more):
        return self.function(*args, **self.keywords, **more)

    def _key(self):
        return self.function, tuple(sorted(self.keywords.items()))

    def __eq__(self, other):
        return isinstance(other, Partial) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())
