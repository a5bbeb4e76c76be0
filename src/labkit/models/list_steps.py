"""The steps of rule tables that join arrays, part them, or treat each in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.models.steps import Step


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

    @property
    def unsized(self):
        return self.sizes is None

    def sized(self, shapes):
        return self if self.sizes is not None else Split(self.axis, tuple(s[self.axis] for s in shapes))

    def inverse(self, shapes):
        return Concat(self.axis, self.sizes)
