"""Why a changed slice answers as before: measured by running the slice with probes at the changed place, never argued.

A probe evaluates the old and the new text of an expression wherever the slice does, compares the two values, and goes on with the old one. So a change is
without effect when its line is never reached (then the tests and functions around it are probed, and say which way they went), or when the smallest
expression around it that a probe finds equal in every evaluation has the same value either way.
"""

import ast
import builtins
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

NAME = "probe_of_mutation"
Run = Callable[[str], None]  # load a slice of this source, and make the calls that the verdict makes


@dataclasses.dataclass
class Seen:
    """What one probe saw: how often it was evaluated while tracing, how many values it compared at run time, and whether all were equal."""

    evaluated: int = 0
    compared: int = 0
    equal: bool = True
    values: list = dataclasses.field(default_factory=list)


def why_no_effect(text: str, mutated: str, begin: int, end: int, run: Run) -> str | None:
    """The evidence that replacing text[begin:end] changes nothing in the runs of `run`, in one line; None when there is none.

    mutated: the text after the change. Raises what `run` raises for the text with probes.
    """
    grown = len(mutated) - len(text)
    around = list(_expressions_around(text, begin, end))
    for first, (start, stop) in enumerate(around):
        seen = _probed(text, start, stop, mutated[start : stop + grown], run)
        if seen.evaluated == 0 and not first:
            return _why_not_reached(text, begin, end, run)
        if seen.equal:
            compared = f"{seen.compared} arrays compared" if seen.compared else "compared while tracing"
            return f"`{_short(text[start:stop])}` has the same value after the change, in each of {seen.evaluated} evaluations ({compared})"
    return None


def _why_not_reached(text: str, begin: int, end: int, run: Run) -> str | None:
    """The innermost test around the place that was evaluated and always went the other way, else the function that nobody called."""
    place = _short(text[begin:end])
    for node, wanted in _tests_around(text, begin, end):
        seen = _probed(text, *_span(text, node), None, run)
        if seen.evaluated:
            other = {bool(value) for value in seen.values} == {not wanted}
            said = f"0 evaluations of `{place}`: `{_short(ast.unparse(node))}` was {not wanted} in each of {seen.evaluated} evaluations"
            return said if other else None
    function = _function_around(text, begin, end)
    body = next(s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)))
    start, _ = _span(text, body)
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    seen = _watch(f"{text[:start]}{NAME}(None, None)\n{indent}{text[start:]}", run)
    return f"0 evaluations of `{place}`: `{function.name}` was never called" if seen.evaluated == 0 else None


def _probed(text: str, begin: int, end: int, new: str | None, run: Run) -> Seen:
    """Run with a probe in the place of text[begin:end]. new: what to compare with, or None to note the value alone."""
    old = text[begin:end]
    probe = f"{NAME}(lambda: ({old}), {'None' if new is None else f'lambda: ({new})'})"
    return _watch(text[:begin] + probe + text[end:], run)


def _watch(source: str, run: Run) -> Seen:
    seen = Seen()

    def probe(old, new):
        seen.evaluated += 1
        value = None if old is None else old()
        if new is None:
            seen.values.append(value)
        else:
            try:
                other = new()
            except Exception:
                seen.equal = False
            else:
                _compare(value, other, seen)
        return value

    import jax

    setattr(builtins, NAME, probe)
    try:
        run(source)
        jax.effects_barrier()  # what the program noted while it ran
    finally:
        delattr(builtins, NAME)
    return seen


def _compare(old, new, seen: Seen) -> None:
    """Equal in structure, shapes, dtypes and every number; arrays when the program runs, everything else now."""
    import jax

    leaves, others = jax.tree.leaves(old), jax.tree.leaves(new)
    if jax.tree.structure(old) != jax.tree.structure(new):
        seen.equal = False
        return
    for a, b in zip(leaves, others):
        if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in (a, b)):
            seen.equal &= type(a) is type(b) and bool(a == b)
        elif a.shape != b.shape or a.dtype != b.dtype:
            seen.equal = False
        else:
            jax.debug.callback(lambda x, y: _note(seen, x, y), a, b)


def _note(seen: Seen, a, b) -> None:
    seen.compared += 1
    a, b = np.asarray(a), np.asarray(b)
    seen.equal &= bool(((a == b) | ((a != a) & (b != b))).all())


# -- places in a text ------------------------------------------------------------------------------------------------------------------------------------


def _span(text: str, node: ast.AST) -> tuple[int, int]:
    lines = text.splitlines(keepends=True)
    offset = lambda line, column: sum(map(len, lines[: line - 1])) + column
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _holders(text: str, begin: int, end: int) -> list[ast.AST]:
    """Nodes with a place in the text that hold text[begin:end], innermost first."""
    spans = [(node, *_span(text, node)) for node in ast.walk(ast.parse(text)) if hasattr(node, "lineno")]
    return [node for node, start, stop in sorted(spans, key=lambda entry: entry[2] - entry[1]) if start <= begin and end <= stop]


def _expressions_around(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of the expressions of the statement that hold the place, innermost first; those that stand for a place rather than a value are left out."""
    for node in _holders(text, begin, end):
        if isinstance(node, ast.stmt | ast.Lambda | ast.GeneratorExp | ast.ListComp):
            return
        value = isinstance(node, ast.expr) and not isinstance(node, ast.Starred | ast.Slice | ast.JoinedStr | ast.FormattedValue)
        if value and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            yield _span(text, node)


def _tests_around(text: str, begin: int, end: int) -> Iterator[tuple[ast.expr, bool]]:
    """(test, the truth that leads to the place) of the conditions around it, innermost first."""
    for node in _holders(text, begin, end):
        if isinstance(node, ast.If | ast.IfExp):
            then = node.body if isinstance(node.body, list) else [node.body]
            inside = lambda part: _span(text, part)[0] <= begin and end <= _span(text, part)[1]
            if not inside(node.test):
                yield node.test, any(map(inside, then))


def _function_around(text: str, begin: int, end: int) -> ast.FunctionDef:
    return next(node for node in _holders(text, begin, end) if isinstance(node, ast.FunctionDef))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:87]}..."
