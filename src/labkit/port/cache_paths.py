"""Simplify: functions that come to need the cache are given it by their callers."""

import ast

from labkit.port.values import CACHE_NAMES


def cache_of(folded) -> str | None:
    """The name under which a function takes the cache, also among what reaches it through **kwargs."""
    args = folded.original.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs]] + list(folded.extras)
    return next((name for name in names if name in CACHE_NAMES), None)


def give_cache(functions: dict, wanting: list) -> None:
    """Every function of `wanting` that takes no cache takes one from now on, and so do its callers up to one that has it."""
    wanting = [folded for folded in wanting if cache_of(folded) is None]
    while wanting:
        target = wanting.pop()
        if cache_of(target) is None:
            target.extras["cache"] = None
        for caller in functions.values():
            for node in ast.walk(caller.node):
                if isinstance(node, ast.Call) and target.key in getattr(node, "callees", []) and not any(k.arg == "cache" for k in node.keywords):
                    if cache_of(caller) is None:
                        wanting.append(caller)
                    node.keywords.append(ast.keyword("cache", ast.Name(cache_of(caller) or "cache", ast.Load())))
