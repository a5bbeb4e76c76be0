"""Variables and constants of translated modules."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from flax import nnx


class Buffer(nnx.Variable):
    """A persistent buffer: in the state and in checkpoints, not among the parameters that are trained."""


def value(variable):
    """The array of a variable in the dtype the model computes in (its metadata `compute_dtype`), at least float32 for wide ones; of a `Constant` as it is.
    Arrays and None pass through."""
    if isinstance(variable, Constant):
        return jnp.asarray(variable.array)
    if not isinstance(variable, nnx.Variable):
        return variable
    array = variable[...]
    dtype = variable.get_metadata("compute_dtype", None)
    return array if dtype is None else array.astype(dtype)


class Constant:
    """A numpy array that the config determines: part of the graph definition, hashable by content, never of the state.

    Arithmetic, indexing and the methods of a jax array work on it as they are; a function of jax.numpy takes `value(constant)`.
    """

    def __init__(self, array, dtype=None):
        """dtype: what the numbers are rounded to, None as they come."""
        if isinstance(array, Constant):
            array = array.array
        self.array = np.array(array, dtype)
        self.array.setflags(write=False)

    @functools.cached_property
    def _key(self):
        return (self.array.shape, self.array.dtype.str, self.array.tobytes())

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, Constant) and self._key == other._key

    def __repr__(self):
        return f"Constant({self.array.dtype}{list(self.array.shape)})"

    def __jax_array__(self):
        return jnp.asarray(self.array)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)

    def __len__(self):
        return len(self.array)

    def __iter__(self):
        return iter(self.array)

    def __getitem__(self, index):
        return jnp.asarray(self.array)[index]

    def __getattr__(self, name):
        if name.startswith("__") or name == "array":
            raise AttributeError(name)
        return getattr(jnp.asarray(self.array), name)


class Table(dict):
    """A dictionary of plain values that a constructor fills: part of the graph definition, hashable by content."""

    def __hash__(self):
        return hash(repr(sorted(self.items(), key=repr)))


def _binary(function, swapped: bool):
    def apply(self, other):
        mine = jnp.asarray(self.array)
        other = jnp.asarray(other.array) if isinstance(other, Constant) else other
        return function(other, mine) if swapped else function(mine, other)

    return apply


def _unary(function):
    return lambda self: function(jnp.asarray(self.array))


for _function in (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.matmul):
    setattr(Constant, f"__{_function.__name__}__", _binary(_function, False))
    setattr(Constant, f"__r{_function.__name__}__", _binary(_function, True))
for _function in (operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Constant, f"__{_function.__name__}__", _binary(_function, False))
for _function in (operator.neg, operator.invert, operator.abs):
    setattr(Constant, f"__{_function.__name__}__", _unary(_function))
