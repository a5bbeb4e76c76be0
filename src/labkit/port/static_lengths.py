"""Simplify: the number of keys a query may see, where it says how large something is or where it begins.

`queries + cache.get_seq_length()` counts the tokens so far. Sizes must not depend on what a cache holds: a cache of fixed capacity has that many keys always.
"""

import ast

from labkit.port.values import CACHE_NAMES


def count_by_capacity(functions: dict) -> None:
    """`n + cache.get_seq_length()` becomes `cache.get_mask_sizes(n)[0]` where every use of it is a size or a bound."""
    for folded in functions.values():
        parents = {child: node for node in ast.walk(folded.node) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(folded.node):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (found := _count(node.value)) is not None:
                name = node.targets[0].id
                uses = [n for n in ast.walk(folded.node) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
                stores = [n for n in ast.walk(folded.node) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
                if uses and len(stores) == 1 and all(_bounds(use, parents) for use in uses):
                    cache, length = found
                    node.value = ast.copy_location(ast.parse(f"{cache}.get_mask_sizes({length})[0]", mode="eval").body, node.value)


def _count(value) -> tuple[str, str] | None:
    """(cache, queries) of `queries + cache.get_seq_length()`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        for length, call in ((value.left, value.right), (value.right, value.left)):
            counts = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "get_seq_length"
            if counts and ast.unparse(call.func.value) in CACHE_NAMES:
                return ast.unparse(call.func.value), ast.unparse(length)
    return None


def _bounds(use, parents) -> bool:
    """The use ends, through differences and `max` or `min`, as an argument of them or as a bound of a slice."""
    node = parents.get(use)
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        node = parents.get(node)
    return isinstance(node, ast.Slice) or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("max", "min"))
