"""The vocabulary of rule tables: which tensors on disk make which parameter, and by which invertible steps.

A table is data. One layout is a pipeline over the arrays of one layer: the sources are read in order (a source with `{expert}` becomes one array, stacked
over experts on axis 0), then each step maps a list of arrays to a list of arrays, and what is left goes to the rule's targets in order. Every step moves
elements and computes nothing, so it is exact in any dtype, and every step gives its own inverse, so the way back to disk is never written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.models.list_steps import Concat, Each, Split, Stack, Unstack
from labkit.models.name_patterns import NUMBERS, fields_of
from labkit.models.steps import Deinterleave, Interleave, MergeAxis, Pad, Reorder, Reverse, Shape, SplitAxis, Step, Transpose, Unpad

__all__ = [
    "Concat",
    "Deinterleave",
    "Each",
    "Ignored",
    "Interleave",
    "Layout",
    "MergeAxis",
    "Pad",
    "Reorder",
    "Reverse",
    "Rule",
    "RuleTable",
    "Shape",
    "Split",
    "SplitAxis",
    "Stack",
    "Step",
    "Tied",
    "Transpose",
    "Unpad",
    "Unstack",
]


@dataclass(frozen=True, init=False)
class Layout:
    """One way in which tensors on disk make a rule's targets: source name patterns and the steps between."""

    sources: tuple[str, ...]
    steps: tuple[Step, ...]

    def __init__(self, sources: str | Sequence[str], *steps: Step):
        sources = (sources,) if isinstance(sources, str) else tuple(sources)
        for pattern in sources:
            fields_of(pattern)
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

    def sized(self, shapes: Sequence[Shape]) -> Layout:
        """The layout with the sizes that its steps leave to the targets' shapes. ValueError where a later step does not tell them."""
        if not any(step.unsized for step in self.steps):
            return self
        steps = list(self.steps)
        for position in reversed(range(len(steps))):
            steps[position] = steps[position].sized(shapes)
            if any(step.unsized for step in steps[:position]):
                shapes = steps[position].backward_shapes(shapes)
        return Layout(self.sources, *steps)

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

    Where `{layer}` stands in the sources, every target starts with `layers.` and is stacked over the layers of each plan position, of the given `kinds` only
    when they are given. A target with `{i}`, `{j}` or `{k}` stands for every parameter of the model whose path has numbers there.
    """

    targets: tuple[str, ...]
    layouts: tuple[Layout, ...]
    kinds: tuple[str, ...] | None

    def __init__(self, target: str | Sequence[str], *layouts: Layout | str, kinds: str | Sequence[str] | None = None):
        targets = (target,) if isinstance(target, str) else tuple(target)
        layouts = tuple(layout if isinstance(layout, Layout) else Layout(layout) for layout in layouts)
        if not targets or not layouts:
            raise ValueError(f"a rule needs a target and a layout: {targets}, {layouts}")
        numbers = {frozenset(fields_of(t)) for t in targets}
        if len(numbers) != 1 or (numbers := set(*numbers)) - set(NUMBERS):
            raise ValueError(f"{', '.join(targets)}: only {{i}}, {{j}} and {{k}} may stand in a target, the same ones in each")
        stacked = layouts[0].per_layer
        for layout in layouts:
            if layout.per_layer != stacked or any(t.startswith("layers.") != stacked and not t.startswith("layers.{") for t in targets):
                raise ValueError(f"{', '.join(targets)}: {{layer}} must stand in the sources exactly when every target starts with 'layers.': {layout.sources}")
            if any(numbers != set(fields_of(s)) - {"layer", "expert"} for s in layout.sources):
                raise ValueError(f"{', '.join(targets)}: {{i}}, {{j}} and {{k}} must stand in every source as in the targets: {layout.sources}")
        if kinds is not None and not stacked:
            raise ValueError(f"{targets[0]}: kinds are for targets that start with 'layers.'")
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "layouts", layouts)
        object.__setattr__(self, "kinds", (kinds,) if isinstance(kinds, str) else None if kinds is None else tuple(kinds))

    @property
    def stacked(self) -> bool:
        return self.layouts[0].per_layer

    def applies_to(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


@dataclass(frozen=True)
class Tied:
    """A tensor that the model shares with another: accepted when absent or equal, a finding when it differs, never a parameter of its own."""

    name: str
    to: str


@dataclass(frozen=True)
class Ignored:
    """A tensor on disk that makes no parameter, and why. With `regex` the pattern is a regular expression found anywhere in a name that no rule reads."""

    pattern: str
    reason: str
    regex: bool = False


class RuleTable:
    """The rules of one family, in order. ValueError when two rules share a target or a source that both would reach.

    optional: a rule applies where the model has its targets and nowhere else, so that one table serves every config of a family (what no rule fills or reads
    is found by the audit all the same). prefixes: what the leading part `prefixes[0]` of a name may be on disk; the longest that some name there starts with
    holds for all. "" is a checkpoint of the model without its head.
    """

    def __init__(self, *entries: Rule | Tied | Ignored | Iterable, optional: bool = False, prefixes: Sequence[str] = ()):
        self.optional, self.prefixes = optional, tuple(prefixes)
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
        return self._like(e for e in self.entries if not (isinstance(e, Rule) and target in e.targets))

    def _like(self, entries: Iterable) -> RuleTable:
        return RuleTable(entries, optional=self.optional, prefixes=self.prefixes)

    def spoken(self, names: Iterable[str]) -> RuleTable:
        """The table in the names of this checkpoint: its own prefix in place of the first of `prefixes`."""
        names = tuple(names)
        if not self.prefixes or not names:
            return self
        own, found = self.prefixes[0], max((p for p in self.prefixes if any(n.startswith(p) for n in names)), key=len, default=self.prefixes[0])
        if own == found:
            return self

        def respelled(name: str) -> str:
            return found + name.removeprefix(own) if name.startswith(own) else name

        def entry(e):
            if isinstance(e, Rule):
                return Rule(e.targets, *(Layout([respelled(s) for s in layout.sources], *layout.steps) for layout in e.layouts), kinds=e.kinds)
            if isinstance(e, Tied):
                return Tied(respelled(e.name), respelled(e.to))
            return e if e.regex else Ignored(respelled(e.pattern), e.reason)

        return self._like(map(entry, self.entries))


def _flatten(entries) -> Iterator:
    for entry in entries:
        if isinstance(entry, Rule | Tied | Ignored):
            yield entry
        else:
            yield from _flatten(entry)
