"""Simplify: a state that the reference's caller takes from one call and gives to the next goes through the cache.

The entry takes it under a name, None by default, and gives it back under the same name; the module that finds none makes the state that stands before the first
token. Forms for single tokens beside a form for any number that starts from the state as well go.
"""

import ast

from labkit.port.cache_paths import cache_of, give_cache
from labkit.port.values import CACHE_NAMES, GIVEN_AT_ENTRY, Const


def carry_states(functions: dict, entry_key: str) -> None:
    """Insert `state = cache.kept_state("state", state)` after the state is made and `cache.keep_state("state", state)` before it is given back."""
    for name in _carried(functions.get(entry_key)):
        for folded in list(functions.values()):
            made = _made(folded, name)
            if made is None:
                continue
            block, place = made
            cache = cache_of(folded) or "cache"
            block.insert(place + 1, ast.copy_location(ast.parse(f"{name} = {cache}.kept_state({name!r}, {name})").body[0], block[place]))
            keep = ast.parse(f"{cache}.keep_state({name!r}, {name})").body[0]
            keep.keep = True
            _before_returns(folded.node, keep)
            give_cache(functions, [folded])
            for each in functions.values():
                _SingleTokens(name).visit(each.node)


def _carried(entry) -> list[str]:
    """Parameters of the entry that nobody gives there and that its outputs hold."""
    if entry is None:
        return []
    outputs = {k.arg for n in ast.walk(entry.original) if isinstance(n, ast.Return) and isinstance(n.value, ast.Call) for k in n.value.keywords}
    empty = {name for name, value in entry.arguments.items() if isinstance(value, Const) and value.value is None}
    return sorted((outputs & empty) - GIVEN_AT_ENTRY - CACHE_NAMES - {"loss"})


def _made(folded, name: str):
    """(block, index of the last statement) of what `if state is None: ...` made of the name, where that is now the only way."""
    if name not in folded.arguments:
        return None
    for test in ast.walk(folded.original):
        if isinstance(test, ast.If) and f"{name} is None" in ast.unparse(test.test) and any(_assigns(s, name) for s in test.body):
            inside = [i for i, s in enumerate(folded.node.body) if test.lineno < getattr(s, "lineno", 0) <= test.end_lineno]
            if inside and any(_assigns(folded.node.body[i], name) for i in inside):
                return folded.node.body, inside[-1]
    return None


def _assigns(statement, name: str) -> bool:
    return isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)


def _before_returns(function, statement) -> None:
    class Insert(ast.NodeTransformer):
        def visit_FunctionDef(inner, node):
            return inner.generic_visit(node) if node is function else node

        def visit_Return(inner, node):
            return [ast.copy_location(statement, node), node]

    Insert().visit(function)


class _SingleTokens(ast.NodeTransformer):
    """`if x.size(1) == 1 and state is not None: ... else: ...` is its other side, where that one asks for the state too."""

    def __init__(self, name: str):
        self.name = name

    def visit_If(self, node):
        self.generic_visit(node)
        text = ast.unparse(node.test)
        single = ".size(1) == 1" in text or ".shape[1] == 1" in text
        given = f"{self.name} is not None"
        if single and isinstance(node.test, ast.Compare) and self._reads(node.body) and self._reads(node.orelse):
            return node.orelse
        if single and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) and given in text:
            if any(isinstance(s, ast.If) and ast.unparse(s.test) == given for s in node.orelse):
                return node.orelse
        return node

    def _reads(self, block) -> bool:
        return any(isinstance(n, ast.Subscript) and ast.unparse(n.value) == self.name for s in block for n in ast.walk(s))
