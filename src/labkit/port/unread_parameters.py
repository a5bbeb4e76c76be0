"""Leftovers of a translation: parameters that no statement reads any more, such as a padding mask whose place the call's own record of its tokens took."""

import ast

_FACE = frozenset({"__init__", "__call__", "init_cache", "for_mesh", "make_layer"})
"""Called from outside of the slice, or on modules of any kind: their parameters are a contract."""


def drop_unread_parameters(tree: ast.Module) -> None:
    """Takes them from methods whose every mention in the module is a call that gives them by name, or not at all."""
    methods: dict[str, list[ast.FunctionDef]] = {}
    for cls in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        for method in (m for m in cls.body if isinstance(m, ast.FunctionDef) and m.name not in _FACE and not m.decorator_list):
            methods.setdefault(method.name, []).append(method)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    mentions = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)] + [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    for name, (method, *others) in methods.items():
        mine = [call for call in calls if call.func.attr == name]
        if others or len(mine) != mentions.count(name) or any(k.arg is None for call in mine for k in call.keywords):
            continue
        for parameter in _unread(method):
            place = [a.arg for a in method.args.args].index(parameter) - 1
            if all(len(call.args) <= place and not any(isinstance(a, ast.Starred) for a in call.args) for call in mine):
                _drop(method, parameter)
                for call in mine:
                    call.keywords = [k for k in call.keywords if k.arg != parameter]


def _unread(method: ast.FunctionDef) -> list[str]:
    read = {n.id for s in method.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    return [a.arg for a in method.args.args[1:] if a.arg not in read]


def _drop(method: ast.FunctionDef, parameter: str) -> None:
    arguments = method.args
    place = [a.arg for a in arguments.args].index(parameter)
    default = place - (len(arguments.args) - len(arguments.defaults))
    del arguments.args[place]
    if default >= 0:
        del arguments.defaults[default]
