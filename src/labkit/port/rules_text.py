"""A rule table as the text of a slice's file: rules that differ in a name alone are written once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from labkit.models.mapping import Each, Layout, Rule, Step, Transpose

WIDTH = 160
_MARK = "\0"


def rules_module(family: str, rules: Sequence[Rule], *, head=(), tied=(), ignored=(), prefixes=(), tie_key: str) -> str:
    """The module's text.

    head: rules that hold where `config.<tie_key>` does not; tied: (name, to) where it does. ignored: (pattern, reason, is a regular expression).
    """
    names = {"RuleTable"}
    main = _sequence([_group_text(group, names) for group in _groups(rules)])
    parts = [("HEAD", _sequence([_rule_text(rule, names) for rule in head])) if head else None]
    parts += [("TIED", _sequence([_call("Tied", [_literal(name), f"to={_literal(to)}"], names) for name, to in tied])) if tied else None]
    parts += [
        (
            "IGNORED",
            _sequence(
                [
                    _call("Ignored", [("r" if regex else "") + f'"{p}"', f"reason={_literal(why)}"] + (["regex=True"] if regex else []), names)
                    for p, why, regex in ignored
                ]
            ),
        )
        if ignored
        else None
    ]
    reads_config = "config." in main
    arguments = ["*rules_of(config)" if reads_config else "*RULES"]
    if head and tied:
        arguments.append(f"*(TIED if config.{tie_key} else HEAD)")
    else:
        arguments += ["*HEAD"] if head else ["*TIED"] if tied else []
    arguments += ["*IGNORED"] if ignored else []
    arguments += ["optional=True"] + ([f"prefixes={_tuple(map(_literal, prefixes))}"] if prefixes else [])
    table = _call("RuleTable", arguments, names, indent=4, lead="return ")
    lines = [f'"""{family}: tensors on disk and parameters, both ways. A rule applies where the model has its parameter."""', ""]
    lines += [f"from labkit.models.mapping import {', '.join(sorted(names))}", ""]
    if reads_config:
        body = "\n".join("    " + line if line else line for line in f"return {main}".splitlines())
        lines += ["", "def rules_of(config) -> tuple:", '    """The rules whose sizes the config gives."""', body, ""]
    else:
        lines += [f"RULES = {main}"]
    lines += [f"{name} = {text}" for name, text in filter(None, parts)]
    lines += ["", "", f"def {identifier(family)}_rules(config) -> RuleTable:", '    """The rule table of one config."""', f"    {table}"]
    return "\n".join(lines) + "\n"


def identifier(family: str) -> str:
    """A model type as part of a Python name."""
    return re.sub(r"\W", "_", family)


def _groups(rules: Sequence[Rule]) -> list[list[tuple[Rule, str | None]]]:
    """Rules in order, those of one template together at the place of the first: (rule, the name that differs)."""
    groups: dict = {}
    for number, rule in enumerate(rules):
        name = _common(rule)
        key = number if name is None else _template(rule, name)
        groups.setdefault(key, []).append((rule, name))
    return [single for group in groups.values() for single in ([group] if len(group) > 2 else [[(rule, None)] for rule, _ in group])]


def _common(rule: Rule) -> str | None:
    """The run of components that the target and every source share, without the last: what a template leaves open."""
    if len(rule.targets) != 1 or "{" in rule.targets[0]:
        return None
    parts = rule.targets[0].split(".")
    found = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts), i, -1) if (i, j) != (0, len(parts))]
    found = [f for f in found if f != "layers" and all(f".{f}." in f".{s}." for layout in rule.layouts for s in layout.sources)]
    return max(found, key=len, default=None)


def _template(rule: Rule, name: str) -> tuple:
    def opened(text):
        return f".{text}.".replace(f".{name}.", f".{_MARK}.", 1)

    layouts = tuple((tuple(map(opened, layout.sources)), layout.steps) for layout in rule.layouts)
    return opened(rule.targets[0]), layouts, rule.kinds


def _group_text(group, names) -> str:
    if len(group) == 1:
        return _rule_text(group[0][0], names)
    rule, name = group[0]
    text = _rule_text(rule, names, name)
    one_line = f"*({text} for name in {_tuple(_literal(n) for _, n in group)})"
    if len(one_line) + 5 <= WIDTH and "\n" not in text:
        return one_line
    listed = _tuple(_literal(n) for _, n in group)
    return "*(\n" + _indent(text) + "\n" + _indent(f"for name in {listed}") + "\n)"


def _rule_text(rule: Rule, names, name: str | None = None) -> str:
    def text(value):
        if name is None:
            return _literal(value)
        return 'f"' + f".{value}.".replace("{", "{{").replace("}", "}}").replace(f".{name}.", ".{name}.", 1)[1:-1] + '"'

    targets = text(rule.targets[0]) if len(rule.targets) == 1 else _tuple(map(text, rule.targets))
    arguments = [targets, *(_layout_text(layout, text, names) for layout in rule.layouts)]
    if rule.kinds is not None:
        arguments.append(f"kinds={_tuple(map(_literal, rule.kinds)) if len(rule.kinds) > 1 else _literal(rule.kinds[0])}")
    return _call("Rule", arguments, names)


def _layout_text(layout: Layout, text, names) -> str:
    if not layout.steps and len(layout.sources) == 1:
        return text(layout.sources[0])
    sources = text(layout.sources[0]) if len(layout.sources) == 1 else _tuple(map(text, layout.sources))
    return _call("Layout", [sources, *(_step_text(step, names) for step in layout.steps)], names)


def _step_text(step: Step, names) -> str:
    if isinstance(step, Transpose):
        values = list(map(repr, step.axes))
    elif isinstance(step, Each):
        values = [_tuple(_step_text(s, names) for s in pipeline) for pipeline in step.pipelines]
    else:
        fields = [(getattr(step, f.name), f.default) for f in dataclasses.fields(step)]
        while fields and fields[-1][0] == fields[-1][1]:
            fields.pop()
        values = [repr(value) for value, _ in fields]
    return _call(type(step).__name__, values, names)


def _call(function: str, arguments: Sequence[str], names: set, indent: int = 4, lead: str = "") -> str:
    """`function(...)` on one line, or one argument a line where that is too long."""
    names.add(function)
    one_line = f"{lead}{function}({', '.join(arguments)})"
    if indent + len(one_line) + 1 <= WIDTH and "\n" not in one_line:
        return one_line
    return f"{lead}{function}(\n" + "".join(_indent(a, 4 if not lead else 8) + ",\n" for a in arguments) + (")" if not lead else "    )")


def _sequence(items: Sequence[str]) -> str:
    if len(items) == 1 and len(items[0]) + 20 <= WIDTH and "\n" not in items[0]:
        return _tuple(items)
    return "(\n" + "".join(_indent(item) + ",\n" for item in items) + ")"


def _tuple(items) -> str:
    items = list(items)
    one_line = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return one_line if len(one_line) <= WIDTH - 20 else "(\n" + "".join(_indent(item) + ",\n" for item in items) + ")"


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _indent(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line else line for line in text.splitlines())
