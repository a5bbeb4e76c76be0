"""The audit: every tensor on disk is consumed once, every parameter is filled once, every shape fits. Names and shapes only; no weight is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.converters.rules import Assignment, Expansion, expand
from labkit.errors import InputError
from labkit.layers.plan import LayerPlan
from labkit.models.mapping import RuleTable, Shape

SHOWN = 4
NEXT = "Check that config.json belongs to these weights; if it does, the family's rule table lacks a rule or has one too many"


@dataclass(frozen=True)
class Audit:
    """What a table does with a checkpoint. The lists hold one sentence per problem; `passed` means that all are empty."""

    expansion: Expansion
    tensors: int
    parameters: int
    unread: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.mixed, *self.missing, *self.unread, *self.doubled, *self.unfilled, *self.mismatched]

    @property
    def passed(self) -> bool:
        return not self.problems

    def require(self, where) -> None:
        """Raises InputError with the first problems of each kind."""
        if not self.passed:
            raise InputError(f"The checkpoint and the model do not fit: {self.first()}", where, NEXT)

    def first(self) -> str:
        """The first problems and the count of the rest; of an audit that passed, what it counted."""
        if self.passed:
            return str(self)
        return "; ".join(self.problems[:SHOWN]) + (f"; and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else "")

    def __str__(self):
        if self.passed:
            return f"{self.tensors} tensors on disk fill {self.parameters} parameters, each once" + (
                f"; {len(self.expansion.tied)} tied and {len(self.expansion.ignored)} ignored" if self.expansion.tied or self.expansion.ignored else ""
            )
        return "; ".join(self.problems)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(str(self))}</p>"


def audit_table(table: RuleTable, plan: LayerPlan, targets: Mapping[str, Shape], tensors: Mapping[str, Shape]) -> Audit:
    """The audit from shapes alone. targets: path -> shape of every parameter. tensors: name -> shape of every tensor on disk."""
    expansion = expand(table, plan, targets, tensors)
    used = Counter(name for a in expansion.assignments for name in a.names)
    reached = defaultdict(list)
    for assignment in expansion.assignments:
        for target in assignment.targets:
            reached[target.path].append((target.index, assignment))
    missing = [f"no tensor {name} for {a.describe()}" for a in expansion.assignments for name in a.names if name not in tensors]
    unread = [
        f"{name} {tuple(tensors[name])} is read by no rule"
        for name in tensors
        if name not in used and name not in expansion.tied and name not in expansion.ignored
    ]
    doubled = [f"{name} is read {count} times" for name, count in used.items() if count > 1]
    doubled += [
        f"{name} is both read and {word}" for word, group in (("tied", expansion.tied), ("ignored", expansion.ignored)) for name in group if name in used
    ]
    unfilled, mismatched = [], []
    for path, entries in reached.items():
        if path not in targets:
            unfilled.append(f"the model has no parameter {path}, the target of {entries[0][1].describe()}")
            continue
        times = Counter(index for index, _ in entries)
        doubled += [f"{path}{'' if index is None else f' layer {index}'} is filled {count} times" for index, count in times.items() if count > 1]
        if None not in times:
            gone = sorted(set(range(targets[path][0])) - set(times))
            extra = sorted(set(times) - set(range(targets[path][0])))
            unfilled += [f"{path} {tuple(targets[path])}: no rule fills stacked layer {', '.join(map(str, gone))}"] if gone else []
            mismatched += [f"{path} {tuple(targets[path])} has no stacked layer {', '.join(map(str, extra))}"] if extra else []
    unfilled += [f"{path} {tuple(shape)} is filled by no rule" for path, shape in targets.items() if path not in reached]
    for assignment in expansion.assignments:
        if all(name in tensors for name in assignment.names) and all(t.path in targets for t in assignment.targets):
            mismatched += _shape_problems(assignment, targets, tensors)
    return Audit(expansion, len(tensors), len(targets), unread, missing, unfilled, doubled, mismatched, list(expansion.problems))


def _shape_problems(assignment: Assignment, targets: Mapping[str, Shape], tensors: Mapping[str, Shape]) -> list[str]:
    """Both shapes, and the rule that led from one to the other."""
    found = " and ".join(f"{group[0]} {tuple(tensors[group[0]])}" for group in assignment.sources)
    wanted = [tuple(targets[t.path][t.index is not None :]) for t in assignment.targets]
    asked = ", ".join(f"{t.path}{'' if t.index is None else f'[{t.index}]'} {shape}" for t, shape in zip(assignment.targets, wanted))
    try:
        made = assignment.layout.shapes(assignment.source_shapes(tensors.__getitem__))
    except ValueError as error:
        return [f"{found} does not become {asked}: {error}, in {assignment.describe()}"]
    return [] if made == wanted else [f"{found} becomes {made[0] if len(made) == 1 else made}, but {asked} is needed, in {assignment.describe()}"]
