"""The rule table of a translated slice: from parameters and in-memory names to names on disk.

The translator knows which in-memory tensor makes which parameter; transformers' own table (hf/renames.py) knows how the in-memory tensors lie on disk. The
composition is a table for every config of the family: a rule applies where the model has its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from labkit.errors import InputError
from labkit.hf.renames import DiskNames, Fusion
from labkit.models.mapping import (
    Concat,
    Deinterleave,
    Each,
    Interleave,
    Layout,
    MergeAxis,
    Reorder,
    Rule,
    RuleTable,
    Split,
    SplitAxis,
    Stack,
    Step,
    Transpose,
    Unpad,
)
from labkit.models.name_patterns import fields_of
from labkit.port.rules_text import identifier, rules_module


@dataclass(frozen=True)
class Parameter:
    """A parameter of the slice and the in-memory tensor that makes it.

    path: `layers.<rest>` for one that is stacked over the main stack's layers, else its path; `{i}`, `{j}`, `{k}` for numbers that depend on the config.
    memory: the in-memory name, with `{layer}` where the path is stacked and the same `{i}`, `{j}`, `{k}`; with `{expert}` where one parameter stacks a list's
    tensors on axis 0. shape: of the in-memory tensor. steps: from memory to the parameter. kinds: the plan kinds that have it so, where another kind has a
    parameter of the same path made differently.
    """

    path: str
    memory: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    kinds: tuple[str, ...] | None = None


class ConfigValue(str):
    """A number that the emitted file reads from the config."""

    def __repr__(self):
        return f"config.{self}"


def memory_names(parameters: Iterable[Parameter], tied: Iterable[tuple[str, str]] = (), ignored: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The names to ask `hf.renames.disk_names` about."""
    names = [p.memory for p in parameters] + [name for pair in tied for name in pair] + [name for name, _ in ignored]
    return list(dict.fromkeys(names))


def write_rules(
    family: str,
    parameters: Sequence[Parameter],
    disk: DiskNames,
    *,
    tied: Iterable[tuple[str, str]] = (),
    ignored: Iterable[tuple[str, str]] = (),
    tie_key: str = "tie_word_embeddings",
) -> str:
    """The text of `checkpoint_mappings_<family>.py`.

    parameters: of all recorded configs together; equal ones count once. disk: `disk_names(model, memory_names(parameters, tied, ignored))`. tied: (in-memory
    name, the name it is tied to) where `config.<tie_key>` holds. ignored: (in-memory name or pattern, reason) of what the state dict holds and the slice does
    not. Raises InputError for an operation of transformers that no step says, for a path that two tensors make, and for names that `disk` lacks.
    """
    tied, ignored = list(dict.fromkeys(tied)), list(dict.fromkeys(ignored))
    by_name = {name: fusion for fusion in disk.fusions for name in fusion.memory}
    if lost := [name for name in memory_names(parameters, tied, ignored) if name not in by_name]:
        raise InputError(f"No name on disk is known for {', '.join(lost[:4])}", family, "Ask disk_names about memory_names(...)")
    heads = {name for name, _ in tied}
    rules, used = [], {source for fusion in disk.fusions for source in fusion.disk}
    for fusion, members in _grouped(family, parameters, by_name):
        layouts = [_layout(family, fusion, members)]
        for other in disk.others:
            if other.memory == fusion.memory and not set(other.disk) & used:
                layouts.append(_layout(family, other, members))
                used |= set(other.disk)
        rules.append(Rule([m.path for m in members], *layouts, kinds=members[0].kinds))
    head_rules = [rule for rule in rules if set(by_name_of(rule, parameters)) & heads]
    made = {name for rule in head_rules for name in by_name_of(rule, parameters)}
    head_rules += [_untied_head(family, name, by_name[name]) for name, _ in tied if name not in made and name.endswith(".weight")]
    return rules_module(
        family,
        [rule for rule in rules if rule not in head_rules],
        head=head_rules,
        tied=[(by_name[name].disk[0], by_name[to].disk[0]) for name, to in tied],
        ignored=[(source, reason, False) for name, reason in ignored for source in by_name[name].disk]
        + [(pattern, "transformers leaves it unread", True) for pattern in disk.ignored],
        prefixes=disk.prefixes,
        tie_key=tie_key,
    )


def live_rules(family: str, text: str) -> Callable[..., RuleTable]:
    """`<family>_rules` of an emitted text: config -> RuleTable."""
    namespace: dict = {"__name__": f"checkpoint_mappings_{identifier(family)}"}
    exec(compile(text, f"checkpoint_mappings_{family}.py", "exec"), namespace)
    return namespace[f"{identifier(family)}_rules"]


def by_name_of(rule: Rule, parameters: Sequence[Parameter]) -> list[str]:
    """The in-memory names of a rule's targets."""
    return [p.memory for p in parameters if p.path in rule.targets]


def _grouped(family: str, parameters: Sequence[Parameter], by_name: dict[str, Fusion]) -> list[tuple[Fusion, list[Parameter]]]:
    """Parameters that are made together, in the order of their first."""
    made: dict[tuple, Parameter] = {}
    for p in parameters:
        other = made.setdefault((p.path, p.kinds), p)
        if (other.memory, other.steps) != (p.memory, p.steps):
            raise InputError(f"The parameter {p.path} is made from {other.memory} and from {p.memory}", family, "Name the kinds of layer that have each")
    groups: dict[tuple, list[Parameter]] = {}
    for p in made.values():
        groups.setdefault((by_name[p.memory].memory, p.kinds), []).append(p)
    out = []
    for (memory, _), members in groups.items():
        fusion = by_name[memory[0]]
        members = sorted(members, key=lambda p: memory.index(p.memory))
        if [m.memory for m in members] != list(memory):
            gone = [name for name in memory if name not in {m.memory for m in members}]
            raise InputError(f"{', '.join(fusion.disk)} makes {', '.join(memory)}, and no parameter takes {', '.join(gone)}", family, "Add a parameter for it")
        out.append((fusion, members))
    return out


def _layout(family: str, fusion: Fusion, members: Sequence[Parameter]) -> Layout:
    """Disk to memory to parameters."""
    stacked = ["expert" in fields_of(s) for s in fusion.disk]
    operations, sources, steps = list(fusion.operations), fusion.disk, []
    if operations[:1] == [("first",)]:
        operations, sources = operations[1:], fusion.disk[:1]
    for operation in operations:
        steps += _steps(family, operation, fusion, members, any(stacked))
    own = {m.steps for m in members}
    steps += own.pop() if len(own) == 1 else [Each(*(m.steps for m in members))]
    return Layout(sources, *_merged(steps))


def _steps(family: str, operation: tuple, fusion: Fusion, members: Sequence[Parameter], experts: bool) -> list[Step]:
    name, *values = operation
    rank = len(members[0].shape)
    if name == "concat":
        (axis,) = values
        count = len(fusion.disk)
        return [] if count == 1 else [Stack(axis), MergeAxis(axis, count)] if experts else [Concat(axis)]
    if name in ("chunk", "split"):
        return [Split(values[0])]
    if name == "swap":
        axes = list(range(rank))
        axes[values[0]], axes[values[1]] = axes[values[1]], axes[values[0]]
        return [Transpose(*axes)]
    if name in ("deinterleave", "interleave"):
        return [(Deinterleave if name == "deinterleave" else Interleave)(values[0])]
    if name == "unpad":
        return [Unpad(values[0])]
    if name == "split_axis":
        return [SplitAxis(*values)]
    if name == "reorder":
        return [Reorder(*values)]
    if name == "each":
        pipeline = tuple(step for operation in values[0] for step in _steps(family, operation, fusion, members, experts))
        return [Each(*[pipeline] * len(fusion.disk))]
    if name == "rope":
        chosen, direction, key = values
        heads = ConfigValue(key)
        pipeline = (SplitAxis(0, heads), (Deinterleave if direction == "to_halves" else Interleave)(1), MergeAxis(0, heads))
        if set(chosen) == set(range(len(fusion.disk))):
            return list(pipeline)
        return [Each(*(pipeline if i in chosen else () for i in range(len(fusion.disk))))]
    made = f"{', '.join(fusion.disk)} becomes {', '.join(fusion.memory)} by {values[0]} of transformers"
    raise InputError(f"{made}, which no exact step says", family, "Write this rule by hand")


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Without pairs that cancel."""
    out: list[Step] = []
    for step in steps:
        if out and isinstance(step, SplitAxis) and isinstance(out[-1], MergeAxis) and (out[-1].axis, out[-1].n) == (step.axis, step.n):
            out.pop()
        else:
            out.append(step)
    return out


def _untied_head(family: str, name: str, fusion: Fusion) -> Rule:
    """The head of configs that do not tie it, where every recorded config does: a linear layer's kernel."""
    module = fusion.memory[fusion.memory.index(name)].removesuffix(".weight")
    return Rule(f"{module}.kernel", Layout(fusion.disk, Transpose(1, 0)))
