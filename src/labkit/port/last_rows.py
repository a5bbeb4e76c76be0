"""Simplify: the last rows of a table that has one row per token so far are the rows of this call's tokens.

`table[..., keys - queries : keys, :keys]` counts on a cache that holds what was written and no more. A cache of fixed capacity knows the rows by their slots.
"""

import ast

from labkit.port.values import CACHE_NAMES


def rows_by_slot(functions: dict) -> None:
    """Every such slice becomes `cache.tokens.slots`; functions that lack the cache are given it by their callers."""
    wanting = []
    for folded in functions.values():
        if _replace(folded.node, _cache_of(folded) or "cache") and _cache_of(folded) is None:
            wanting.append(folded)
    while wanting:
        target = wanting.pop()
        target.extras["cache"] = None
        for caller in functions.values():
            for node in ast.walk(caller.node):
                if isinstance(node, ast.Call) and target.key in getattr(node, "callees", []) and not any(k.arg == "cache" for k in node.keywords):
                    node.keywords.append(ast.keyword("cache", ast.Name(_cache_of(caller) or "cache", ast.Load())))
                    if _cache_of(caller) is None:
                        wanting.append(caller)


def _cache_of(folded) -> str | None:
    args = folded.original.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs]] + list(folded.extras)
    return next((name for name in names if name in CACHE_NAMES), None)


def _replace(function, cache: str) -> bool:
    found = []

    class Rows(ast.NodeTransformer):
        def visit_Subscript(inner, node):
            inner.generic_visit(node)
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
            for index, (rows, keys) in enumerate(zip(parts, parts[1:])):
                if _is_last_rows(rows, keys):
                    parts[index] = ast.parse(f"{cache}.tokens.slots", mode="eval").body
                    found.append(node)
            return node

    Rows().visit(function)
    return bool(found)


def _is_last_rows(rows, keys) -> bool:
    """`keys - queries : keys` beside `:keys`."""
    if not (isinstance(rows, ast.Slice) and isinstance(keys, ast.Slice) and rows.upper is not None and keys.upper is not None and keys.lower is None):
        return False
    count = ast.unparse(rows.upper)
    return isinstance(rows.lower, ast.BinOp) and isinstance(rows.lower.op, ast.Sub) and ast.unparse(rows.lower.left) == count == ast.unparse(keys.upper)
