"""Simplify: the last rows of a table that has one row per token so far are the rows of this call's tokens.

`table[..., keys - queries : keys, :keys]` counts on a cache that holds what was written and no more. A cache of fixed capacity knows the rows by their slots.
"""

import ast

from labkit.port.cache_paths import cache_of, give_cache


def rows_by_slot(functions: dict) -> None:
    """Every such slice becomes `cache.tokens.slots`; functions that lack the cache are given it by their callers."""
    wanting = [folded for folded in functions.values() if _replace(folded.node, cache_of(folded) or "cache")]
    give_cache(functions, wanting)


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
