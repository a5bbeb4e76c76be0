"""The steps of rule tables, each of which knows its inverse; here those that treat every array of the list alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


class Step:
    """An exact map from a list of arrays to a list of arrays.

    forward(arrays) and shapes(shapes) run it on values and on shapes alone; backward_shapes(shapes) goes from result to operand shapes; inverse(shapes) is
    the step that undoes it on operands of these shapes. Each raises ValueError where the shapes do not fit.
    """

    def forward(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise NotImplementedError

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        raise NotImplementedError

    def backward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        raise NotImplementedError

    def inverse(self, shapes: Sequence[Shape]) -> Step:
        raise NotImplementedError

    @property
    def unsized(self) -> bool:
        """True when a size is left to the shapes of the results; `sized(shapes)` fills it in."""
        return False

    def sized(self, shapes: Sequence[Shape]) -> Step:
        return self


class Elementwise(Step):
    """A step that treats each array of the list alone."""

    def one(self, array: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def one_shape(self, shape: Shape) -> Shape:
        raise NotImplementedError

    def one_backward_shape(self, shape: Shape) -> Shape:
        return self.inverse([shape]).shapes([shape])[0]

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return [self.one(a) for a in arrays]

    def shapes(self, shapes):
        return [self.one_shape(tuple(s)) for s in shapes]

    def backward_shapes(self, shapes):
        return [self.one_backward_shape(tuple(s)) for s in shapes]


@dataclass(frozen=True, init=False)
class Transpose(Elementwise):
    """Axes in a new order, as in numpy: `Transpose(1, 0)` turns torch's [out, in] into a kernel [in, out]."""

    axes: tuple[int, ...]

    def __init__(self, *axes: int):
        if sorted(axes) != list(range(len(axes))):
            raise ValueError(f"Transpose{axes} is not a permutation")
        object.__setattr__(self, "axes", axes)

    def one(self, array):
        return array.transpose(self.axes)

    def one_shape(self, shape):
        if len(shape) != len(self.axes):
            raise ValueError(f"Transpose{self.axes} meets shape {shape}")
        return tuple(shape[a] for a in self.axes)

    def inverse(self, shapes):
        return Transpose(*(self.axes.index(i) for i in range(len(self.axes))))


@dataclass(frozen=True)
class SplitAxis(Elementwise):
    """Axis `axis` becomes two: (n, rest)."""

    axis: int
    n: int

    def one(self, array):
        return array.reshape(self.one_shape(array.shape))

    def one_shape(self, shape):
        if len(shape) <= self.axis or self.n < 1 or shape[self.axis] % self.n:
            raise ValueError(f"{self} meets shape {shape}")
        return (*shape[: self.axis], self.n, shape[self.axis] // self.n, *shape[self.axis + 1 :])

    def inverse(self, shapes):
        return MergeAxis(self.axis, self.n)

    def one_backward_shape(self, shape):
        return MergeAxis(self.axis, self.n).one_shape(shape)


@dataclass(frozen=True)
class MergeAxis(Elementwise):
    """Axes `axis` and `axis` + 1 become one. `n`, the size of the first, is needed only where operand shapes must be told from results."""

    axis: int
    n: int | None = None

    def one(self, array):
        return array.reshape(self.one_shape(array.shape))

    def one_shape(self, shape):
        if len(shape) <= self.axis + 1 or self.n not in (None, shape[self.axis]):
            raise ValueError(f"{self} meets shape {shape}")
        return (*shape[: self.axis], shape[self.axis] * shape[self.axis + 1], *shape[self.axis + 2 :])

    def inverse(self, shapes):
        sizes = {self.n} if self.n is not None else {s[self.axis] for s in shapes}
        if len(sizes) != 1:
            raise ValueError(f"{self} has no one inverse for shapes {list(shapes)}")
        return SplitAxis(self.axis, sizes.pop())

    def one_backward_shape(self, shape):
        if self.n is None:
            raise ValueError(f"{self} does not tell its operand's shape from {shape}; give n")
        return SplitAxis(self.axis, self.n).one_shape(shape)


@dataclass(frozen=True)
class Reverse(Elementwise):
    """Elements along `axis` in reverse order."""

    axis: int

    def one(self, array):
        return np.flip(array, self.axis)

    def one_shape(self, shape):
        if len(shape) <= self.axis:
            raise ValueError(f"{self} meets shape {shape}")
        return shape

    def inverse(self, shapes):
        return self


@dataclass(frozen=True)
class Deinterleave(Elementwise):
    """Along `axis`, elements 0, n, 2n, ... first, then 1, n + 1, ...: what a rotation by pairs needs to become one by halves, and gates lying between ups."""

    axis: int
    n: int = 2

    def one(self, array):
        shape = self.one_shape(array.shape)
        parts = (*shape[: self.axis], shape[self.axis] // self.n, self.n, *shape[self.axis + 1 :])
        return array.reshape(parts).swapaxes(self.axis, self.axis + 1).reshape(shape)

    def one_shape(self, shape):
        if len(shape) <= self.axis or shape[self.axis] % self.n:
            raise ValueError(f"{self} meets shape {shape}")
        return shape

    def inverse(self, shapes):
        return Interleave(self.axis, self.n)


@dataclass(frozen=True)
class Interleave(Elementwise):
    """The `n` equal parts along `axis`, element by element in turn: undoes `Deinterleave`."""

    axis: int
    n: int = 2

    def one(self, array):
        shape = self.one_shape(array.shape)
        parts = (*shape[: self.axis], self.n, shape[self.axis] // self.n, *shape[self.axis + 1 :])
        return array.reshape(parts).swapaxes(self.axis, self.axis + 1).reshape(shape)

    def one_shape(self, shape):
        return Deinterleave(self.axis, self.n).one_shape(shape)

    def inverse(self, shapes):
        return Deinterleave(self.axis, self.n)


@dataclass(frozen=True)
class Reorder(Elementwise):
    """Entries along `axis` in a new order: entry i of the result is entry `order[i]`."""

    axis: int
    order: tuple[int, ...]

    def one(self, array):
        self.one_shape(array.shape)
        return np.take(array, self.order, self.axis)

    def one_shape(self, shape):
        if len(shape) <= self.axis or sorted(self.order) != list(range(shape[self.axis])):
            raise ValueError(f"{self} meets shape {shape}")
        return shape

    def inverse(self, shapes):
        return Reorder(self.axis, tuple(self.order.index(i) for i in range(len(self.order))))


@dataclass(frozen=True)
class Unpad(Elementwise):
    """The first `size` entries along `axis`, as many as the parameter has when that is left out. The rest is padding that the model never reads: on the way
    back it is zero, so a checkpoint with other numbers there comes back with zeros."""

    axis: int
    size: int | None = None

    def one(self, array):
        self.one_shape(array.shape)
        return array[(slice(None),) * self.axis + (slice(self.size),)]

    def one_shape(self, shape):
        if self.size is None or len(shape) <= self.axis or shape[self.axis] < self.size:
            raise ValueError(f"{self} meets shape {shape}")
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def one_backward_shape(self, shape):
        raise ValueError(f"{self} does not tell its operand's shape from {shape}")

    @property
    def unsized(self):
        return self.size is None

    def sized(self, shapes):
        return self if self.size is not None else Unpad(self.axis, shapes[0][self.axis])

    def inverse(self, shapes):
        return Pad(self.axis, shapes[0][self.axis])


@dataclass(frozen=True)
class Pad(Elementwise):
    """Zeros at the end of `axis` up to `size`: undoes `Unpad`."""

    axis: int
    size: int

    def one(self, array):
        self.one_shape(array.shape)
        out = np.zeros((*array.shape[: self.axis], self.size, *array.shape[self.axis + 1 :]), array.dtype)
        out[(slice(None),) * self.axis + (slice(array.shape[self.axis]),)] = array
        return out

    def one_shape(self, shape):
        if len(shape) <= self.axis or shape[self.axis] > self.size:
            raise ValueError(f"{self} meets shape {shape}")
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def inverse(self, shapes):
        return Unpad(self.axis, shapes[0][self.axis])
