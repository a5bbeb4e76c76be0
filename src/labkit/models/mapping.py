"""The vocabulary of rule tables: which tensors on disk make which parameter, and by which invertible steps.

A table is data. One layout is a pipeline over the arrays of one layer: the sources are read in order (a source with `{expert}` becomes one array, stacked
over experts on axis 0), then each step maps a list of arrays to a list of arrays, and what is left goes to the rule's targets in order. Every step moves
elements and computes nothing, so it is exact in any dtype, and every step gives its own inverse, so the way back to disk is never written twice.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
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
    """All arrays, of `sizes` along `axis`, become one."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return [np.concatenate(arrays, self.axis)]

    def shapes(self, shapes):
        shapes = [tuple(s) for s in shapes]
        others = {s[: self.axis] + s[self.axis + 1 :] for s in shapes}
        if len(others) != 1 or any(len(s) <= self.axis for s in shapes) or tuple(s[self.axis] for s in shapes) != tuple(self.sizes):
            raise ValueError(f"{self} meets shapes {shapes}")
        return [(*shapes[0][: self.axis], sum(self.sizes), *shapes[0][self.axis + 1 :])]

    def backward_shapes(self, shapes):
        return Split(self.axis, self.sizes).shapes(shapes)

    def inverse(self, shapes):
        return Split(self.axis, self.sizes)


@dataclass(frozen=True)
class Split(Step):
    """One array becomes several, of `sizes` along `axis`."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, arrays):
        self.shapes([a.shape for a in arrays])
        return np.split(arrays[0], np.cumsum(self.sizes)[:-1].tolist(), self.axis)

    def shapes(self, shapes):
        if len(shapes) != 1 or len(shapes[0]) <= self.axis or shapes[0][self.axis] != sum(self.sizes):
            raise ValueError(f"{self} meets shapes {list(shapes)}")
        shape = tuple(shapes[0])
        return [(*shape[: self.axis], n, *shape[self.axis + 1 :]) for n in self.sizes]

    def backward_shapes(self, shapes):
        return Concat(self.axis, self.sizes).shapes(shapes)

    def inverse(self, shapes):
        return Concat(self.axis, self.sizes)


def fields_of(pattern: str) -> tuple[str, ...]:
    """The placeholders of a name pattern, `layer` and `expert` among them."""
    return tuple(field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None)


@dataclass(frozen=True, init=False)
class Layout:
    """One way in which tensors on disk make a rule's targets: source name patterns and the steps between."""

    sources: tuple[str, ...]
    steps: tuple[Step, ...]

    def __init__(self, sources: str | Sequence[str], *steps: Step):
        sources = (sources,) if isinstance(sources, str) else tuple(sources)
        for pattern in sources:
            if set(fields_of(pattern)) - {"layer", "expert"}:
                raise ValueError(f"{pattern}: only {{layer}} and {{expert}} may stand in a name pattern")
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "steps", steps)

    @property
    def per_layer(self) -> bool:
        return any("layer" in fields_of(s) for s in self.sources)

    @property
    def per_expert(self) -> tuple[bool, ...]:
        """For each source, whether it is one tensor per expert."""
        return tuple("expert" in fields_of(s) for s in self.sources)

    def forward(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One array per source (those with `{expert}` stacked on axis 0) -> one array per target. Views where that is possible."""
        arrays = list(arrays)
        for step in self.steps:
            arrays = step.forward(arrays)
        return arrays

    def trace(self, shapes: Sequence[Shape]) -> list[list[Shape]]:
        """The shapes before the first step and after each."""
        trail = [[tuple(s) for s in shapes]]
        for step in self.steps:
            trail.append(step.shapes(trail[-1]))
        return trail

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Target shapes from source shapes. ValueError where they do not fit."""
        return self.trace(shapes)[-1]

    def backward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Source shapes from target shapes. ValueError where they do not fit or are not told by them."""
        for step in reversed(self.steps):
            shapes = step.backward_shapes(shapes)
        return list(shapes)

    def inverse(self, shapes: Sequence[Shape]) -> list[Step]:
        """The steps that lead from targets back to sources of these shapes."""
        trail = self.trace(shapes)
        return [step.inverse(before) for step, before in zip(reversed(self.steps), reversed(trail[:-1]))]

    def backward(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """One array per target -> one per source; `shapes` are the sources'. Views where that is possible."""
        arrays = list(arrays)
        for step in self.inverse(shapes):
            arrays = step.forward(arrays)
        return arrays


@dataclass(frozen=True, init=False)
class Rule:
    """Target parameter (or several, one per array that a layout leaves) and the layouts in which checkpoints hold it; the first is the default of export.

    A target that starts with `layers.` is stacked over the layers of each plan position, of the given `kinds` only when they are given.
    """

    targets: tuple[str, ...]
    layouts: tuple[Layout, ...]
    kinds: tuple[str, ...] | None

    def __init__(self, target: str | Sequence[str], *layouts: Layout | str, kinds: str | Sequence[str] | None = None):
        targets = (target,) if isinstance(target, str) else tuple(target)
        layouts = tuple(layout if isinstance(layout, Layout) else Layout(layout) for layout in layouts)
        if not targets or not layouts:
            raise ValueError(f"a rule needs a target and a layout: {targets}, {layouts}")
        stacked = {t.startswith("layers.") for t in targets}
        for layout in layouts:
            if len(stacked) != 1 or layout.per_layer not in stacked:
                raise ValueError(f"{', '.join(targets)}: {{layer}} must stand in the sources exactly when every target starts with 'layers.': {layout.sources}")
        if kinds is not None and stacked != {True}:
            raise ValueError(f"{targets[0]}: kinds are for targets that start with 'layers.'")
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "layouts", layouts)
        object.__setattr__(self, "kinds", (kinds,) if isinstance(kinds, str) else None if kinds is None else tuple(kinds))

    @property
    def stacked(self) -> bool:
        return self.targets[0].startswith("layers.")

    def applies_to(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


@dataclass(frozen=True)
class Tied:
    """A tensor that the model shares with another: accepted when absent or equal, a finding when it differs, never a parameter of its own."""

    name: str
    to: str


@dataclass(frozen=True)
class Ignored:
    """A tensor on disk that makes no parameter, and why."""

    pattern: str
    reason: str


class RuleTable:
    """The rules of one family, in order. ValueError when two rules share a target or a source that both would reach."""

    def __init__(self, *entries: Rule | Tied | Ignored | Iterable):
        self.entries = tuple(_flatten(entries))
        self.rules = tuple(e for e in self.entries if isinstance(e, Rule))
        self.tied = tuple(e for e in self.entries if isinstance(e, Tied))
        self.ignored = tuple(e for e in self.entries if isinstance(e, Ignored))
        seen: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for key in {*rule.targets, *(s for layout in rule.layouts for s in layout.sources)}:
                for other in seen.setdefault(key, []):
                    if rule.kinds is None or other.kinds is None or set(rule.kinds) & set(other.kinds):
                        raise ValueError(f"two rules name {key}")
                seen[key].append(rule)
        names = [e.name for e in self.tied] + [e.pattern for e in self.ignored]
        if clash := {n for n in names if n in seen or names.count(n) > 1}:
            raise ValueError(f"named by a rule and as tied or ignored, or twice: {sorted(clash)}")

    def __iter__(self) -> Iterator[Rule | Tied | Ignored]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def without(self, target: str) -> RuleTable:
        """The table less the rule for `target`: a control for the audits."""
        return RuleTable(e for e in self.entries if not (isinstance(e, Rule) and target in e.targets))


def _flatten(entries) -> Iterator:
    for entry in entries:
        if isinstance(entry, Rule | Tied | Ignored):
            yield entry
        else:
            yield from _flatten(entry)
