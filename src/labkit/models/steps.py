"""The steps of rule tables: exact maps from a list of arrays to a list of arrays, each of which knows its inverse."""

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


class _Elementwise(Step):
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
class Transpose(_Elementwise):
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
class SplitAxis(_Elementwise):
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
class MergeAxis(_Elementwise):
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
class Reverse(_Elementwise):
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
class Deinterleave(_Elementwise):
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
class Interleave(_Elementwise):
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


@dataclass(frozen=True, init=False)
class Each(Step):
    """Steps of its own for every array of the list, each of them one array to one: `Each((Transpose(1, 0),), ())`."""

    pipelines: tuple[tuple[Step, ...], ...]

    def __init__(self, *pipelines: Sequence[Step]):
        object.__setattr__(self, "pipelines", tuple(tuple(steps) for steps in pipelines))

    def __repr__(self):
        return f"Each({', '.join(map(repr, self.pipelines))})"

    def _through(self, operands, apply, reverse=False):
        if len(operands) != len(self.pipelines):
            raise ValueError(f"{self} meets {len(operands)} arrays")
        out = []
        for operand, steps in zip(operands, self.pipelines):
            for step in reversed(steps) if reverse else steps:
                (operand,) = apply(step, [operand])
            out.append(operand)
        return out

    def forward(self, arrays):
        return self._through(arrays, lambda step, operand: step.forward(operand))

    def shapes(self, shapes):
        return self._through(shapes, lambda step, operand: step.shapes(operand))

    def backward_shapes(self, shapes):
        return self._through(shapes, lambda step, operand: step.backward_shapes(operand), reverse=True)

    def inverse(self, shapes):
        pipelines = []
        for shape, steps in zip(shapes, self.pipelines):
            undone = []
            for step in steps:
                undone.insert(0, step.inverse([shape]))
                (shape,) = step.shapes([shape])
            pipelines.append(undone)
        return Each(*pipelines)


@dataclass(frozen=True)
class Stack(Step):
    """All arrays, equal in shape, become one along a new axis `axis`. `count` is needed only where the shapes must be told from results."""

    axis: int
    count: int | None = None

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return [np.stack(arrays, self.axis)]

    def shapes(self, shapes):
        shapes = [tuple(s) for s in shapes]
        if len(set(shapes)) != 1 or self.axis > len(shapes[0]) or self.count not in (None, len(shapes)):
            raise ValueError(f"{self} meets shapes {shapes}")
        return [(*shapes[0][: self.axis], len(shapes), *shapes[0][self.axis :])]

    def backward_shapes(self, shapes):
        return Unstack(self.axis).shapes(shapes)

    def inverse(self, shapes):
        return Unstack(self.axis)


@dataclass(frozen=True)
class Unstack(Step):
    """One array becomes as many as axis `axis` is long, without that axis."""

    axis: int

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return [arrays[0][(slice(None),) * self.axis + (i,)] for i in range(arrays[0].shape[self.axis])]

    def shapes(self, shapes):
        if len(shapes) != 1 or len(shapes[0]) <= self.axis:
            raise ValueError(f"{self} meets shapes {list(shapes)}")
        shape = tuple(shapes[0])
        return [shape[: self.axis] + shape[self.axis + 1 :]] * shape[self.axis]

    def backward_shapes(self, shapes):
        return Stack(self.axis).shapes(shapes)

    def inverse(self, shapes):
        return Stack(self.axis)


@dataclass(frozen=True)
class Concat(Step):
    """All arrays, of `sizes` along `axis`, become one. Sizes are needed only where the shapes must be told from the result."""

    axis: int
    sizes: tuple[int, ...] | None = None

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return [np.concatenate(arrays, self.axis)]

    def shapes(self, shapes):
        shapes = [tuple(s) for s in shapes]
        others = {s[: self.axis] + s[self.axis + 1 :] for s in shapes}
        if len(others) != 1 or any(len(s) <= self.axis for s in shapes) or self.sizes not in (None, tuple(s[self.axis] for s in shapes)):
            raise ValueError(f"{self} meets shapes {shapes}")
        return [(*shapes[0][: self.axis], sum(s[self.axis] for s in shapes), *shapes[0][self.axis + 1 :])]

    def backward_shapes(self, shapes):
        if self.sizes is None:
            raise ValueError(f"{self} does not tell its operands' shapes from {list(shapes)}; give sizes")
        return Split(self.axis, self.sizes).shapes(shapes)

    def inverse(self, shapes):
        return Split(self.axis, tuple(s[self.axis] for s in shapes))


@dataclass(frozen=True)
class Split(Step):
    """One array becomes several, of `sizes` along `axis`; without sizes, of those that the parameters have (`Layout.sized` fills them in)."""

    axis: int
    sizes: tuple[int, ...] | None = None

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return np.split(arrays[0], np.cumsum(self.sizes)[:-1].tolist(), self.axis)

    def shapes(self, shapes):
        if self.sizes is None or len(shapes) != 1 or len(shapes[0]) <= self.axis or shapes[0][self.axis] != sum(self.sizes):
            raise ValueError(f"{self} meets shapes {list(shapes)}")
        shape = tuple(shapes[0])
        return [(*shape[: self.axis], n, *shape[self.axis + 1 :]) for n in self.sizes]

    def backward_shapes(self, shapes):
        return Concat(self.axis, self.sizes).shapes(shapes)

    def sized(self, shapes: Sequence[Shape]) -> Split:
        """The same with the sizes of these results."""
        return self if self.sizes is not None else Split(self.axis, tuple(s[self.axis] for s in shapes))

    def inverse(self, shapes):
        return Concat(self.axis, self.sizes)
