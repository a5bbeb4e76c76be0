"""From a rule table to a list of assignments: for every parameter and every layer of it, which tensors on disk, by which layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from labkit.layers.plan import LayerPlan
from labkit.models.mapping import Ignored, Layout, Rule, RuleTable, Shape, Tied
from labkit.models.name_patterns import fields_of, fill, pattern_regex


@dataclass(frozen=True)
class Target:
    """A parameter, or one layer of a stacked one: its path in the model's state and the row on axis 0 (None when it is not stacked)."""

    path: str
    index: int | None

    def unscanned(self, layer: int | None) -> str:
        """The key of this entry in the unscanned layout on disk: `layers.<HF layer>.<rest>`."""
        return self.path if layer is None else f"layers.{layer}.{self.suffix}"

    @property
    def suffix(self) -> str:
        return re.sub(r"^layers\.(\d+\.\d+\.)?", "", self.path)


@dataclass(frozen=True)
class Assignment:
    """One application of a rule: tensors -> targets, for one Hugging Face layer where the rule is per layer.

    sources: one tuple of tensor names per source of the layout, with one name, or one per expert in order.
    """

    rule: Rule
    layout: Layout
    layer: int | None
    sources: tuple[tuple[str, ...], ...]
    targets: tuple[Target, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.sources for name in group)

    def source_shapes(self, shape_of: Callable[[str], Shape]) -> list[Shape]:
        """The shape of each source as the steps see it, experts stacked on axis 0. ValueError when experts differ."""
        shapes = []
        for group, stacked in zip(self.sources, self.layout.per_expert):
            each = [tuple(shape_of(name)) for name in group]
            if len(set(each)) != 1:
                odd = next(i for i, shape in enumerate(each) if shape != each[0])
                raise ValueError(f"{group[0]} is {each[0]} and {group[odd]} is {each[odd]}")
            shapes.append((len(group), *each[0]) if stacked else each[0])
        return shapes

    def forward(self, read: Callable[[str], np.ndarray]) -> list[np.ndarray]:
        """Reads each source once; one array per target, views where that is possible."""
        arrays = []
        for group, stacked in zip(self.sources, self.layout.per_expert):
            arrays.append(np.stack([read(name) for name in group]) if stacked else read(group[0]))
        return self.layout.forward(arrays)

    def backward(self, arrays: list[np.ndarray], shape_of: Callable[[str], Shape]) -> dict[str, np.ndarray]:
        """Tensor name -> array from one array per target, views where that is possible."""
        out = {}
        for group, stacked, array in zip(self.sources, self.layout.per_expert, self.layout.backward(arrays, self.source_shapes(shape_of))):
            out.update({name: array[i] for i, name in enumerate(group)} if stacked else {group[0]: array})
        return out

    def describe(self) -> str:
        """The rule as a reader finds it in the table."""
        steps = ", ".join(map(str, self.layout.steps))
        return f"{', '.join(self.rule.targets)} <- {', '.join(self.layout.sources)}{' by ' + steps if steps else ''}"


@dataclass(frozen=True)
class Expansion:
    """assignments in table order, then by layer; tied and ignored: the tensors on disk that make no parameter; problems: what keeps the table from applying."""

    assignments: tuple[Assignment, ...]
    tied: dict[str, Tied]
    ignored: dict[str, Ignored]
    problems: tuple[str, ...]


def expand(table: RuleTable, plan: LayerPlan, targets: Mapping[str, Shape], names: Iterable[str]) -> Expansion:
    """Applies a table to a model and a checkpoint.

    targets: path -> shape of every parameter (stacked ones with their layer axis). names: the tensors on disk. Per rule the layout is the one that they show.
    """
    on_disk, problems, assignments = set(names), [], []
    table, paths = table.spoken(on_disk), _Paths(targets)
    for rule in table.rules:
        places = [place for place in _places(rule, plan, paths) if not table.optional or any(t.path in targets for t in place.targets)]
        candidates = [_assign(rule, layout, places, targets, on_disk) for layout in rule.layouts]
        chosen, problem = _choose(rule, candidates, on_disk)
        problems.extend([problem] if problem else [])
        assignments.extend(candidates[chosen])
    read = {name for a in assignments for name in a.names}
    ignored = {name: e for e in table.ignored if not e.regex for name in on_disk if pattern_regex(e.pattern).fullmatch(name)}
    for entry in table.ignored:
        if entry.regex:
            ignored.update({name: entry for name in on_disk if name not in read and name not in ignored and re.search(entry.pattern, name)})
    tied = {e.name: e for e in table.tied if e.name in on_disk}
    return Expansion(tuple(assignments), tied, {name: e for name, e in ignored.items() if name not in tied or not e.regex}, tuple(problems))


@dataclass(frozen=True)
class _Place:
    """One application of a rule: the Hugging Face layer, if it is per layer, the numbers of its placeholders, and where it lands."""

    layer: int | None
    numbers: dict[str, int]
    targets: tuple[Target, ...]


class _Paths:
    """The numbers for which a target with placeholders is a parameter of the model."""

    def __init__(self, targets: Mapping[str, Shape]):
        self.targets, self._found = targets, {}

    def numbers(self, path: str) -> list[dict[str, int]]:
        if not fields_of(path):
            return [{}]
        if path not in self._found:
            matches = map(pattern_regex(path).fullmatch, self.targets)
            self._found[path] = sorted(({name: int(n) for name, n in match.groupdict().items()} for match in matches if match), key=lambda d: sorted(d.items()))
        return self._found[path]


def _places(rule: Rule, plan: LayerPlan, paths: _Paths) -> list[_Place]:
    """Every application of the rule, in Hugging Face's order."""
    if not rule.stacked:
        return [_Place(None, numbers, tuple(Target(fill(t, numbers), None) for t in rule.targets)) for numbers in paths.numbers(rule.targets[0])]
    places = []
    for layer, kind in enumerate(plan.kinds):
        if rule.applies_to(kind):
            segment, position, index = plan.locate(layer)
            reached = [plan.parameter_path(segment, position) + t.removeprefix("layers") for t in rule.targets]
            places += [_Place(layer, numbers, tuple(Target(fill(t, numbers), index) for t in reached)) for numbers in paths.numbers(reached[0])]
    return places


def _assign(rule: Rule, layout: Layout, places: list[_Place], targets: Mapping[str, Shape], on_disk: set[str]) -> list[Assignment]:
    out = []
    for place in places:
        own = _sized(layout, place, targets)
        patterns = [fill(pattern, {"layer": place.layer, **place.numbers}) for pattern in layout.sources]
        experts = _num_experts(own, patterns, place, targets, on_disk)
        groups = tuple(
            tuple(fill(pattern, {"expert": e}) for e in range(experts)) if stacked else (pattern,) for pattern, stacked in zip(patterns, layout.per_expert)
        )
        out.append(Assignment(rule, own, place.layer, groups, place.targets))
    return out


def _rows(place: _Place, targets: Mapping[str, Shape]) -> list[Shape]:
    return [tuple(targets[t.path])[t.index is not None :] for t in place.targets]


def _sized(layout: Layout, place: _Place, targets: Mapping[str, Shape]) -> Layout:
    try:
        return layout.sized(_rows(place, targets))
    except (KeyError, ValueError, IndexError):
        return layout


def _num_experts(layout: Layout, patterns: list[str], place: _Place, targets: Mapping[str, Shape], on_disk: set[str]) -> int:
    """How many tensors an `{expert}` pattern stands for: told by the parameter's shape, or, where the steps do not tell it, by the names on disk."""
    if not any(layout.per_expert):
        return 0
    try:
        shapes = layout.backward_shapes(_rows(place, targets))
        return next(shape[0] for shape, stacked in zip(shapes, layout.per_expert) if stacked)
    except (KeyError, ValueError, IndexError):
        regex = pattern_regex(next(p for p, stacked in zip(patterns, layout.per_expert) if stacked))
        return max((int(match["expert"]) + 1 for match in map(regex.fullmatch, on_disk) if match), default=1)


def _choose(rule: Rule, candidates: list[list[Assignment]], on_disk: set[str]) -> tuple[int, str | None]:
    """The layout that the names on disk show, the first when they show none; and what is wrong when they show two."""
    wanted = [{name for a in candidate for name in a.names} for candidate in candidates]
    own = [(names - set().union(*(wanted[:i] + wanted[i + 1 :]))) & on_disk for i, names in enumerate(wanted)]
    shown = [i for i, names in enumerate(own) if names]
    if len(shown) > 1:
        first, second = (min(own[i]) for i in shown[:2])
        return shown[0], f"the checkpoint mixes two layouts of {', '.join(rule.targets)}: it holds {first} and {second}"
    if shown:
        return shown[0], None
    complete = [i for i, names in enumerate(wanted) if names <= on_disk]
    return (complete or [0])[0], None
