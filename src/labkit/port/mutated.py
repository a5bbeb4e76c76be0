"""Simplify: functions that change an argument in place (`state.copy_(new)`) give it back too, and their callers take it: arrays do not change here."""

import ast

from labkit.port.trim import in_place

_STATES = ("get_recurrent_state", "get_conv_state")


def mark_mutations(functions: dict, facts) -> None:
    """Set `.mutated` on every function that changes parameters whose callers hold them under a name, and put its calls into statements of their own.

    Callers' further use of the name sees the change; a state read from the cache is written back to it (`Context.write_back`).
    """
    for folded in functions.values():
        folded.mutated = []
    for folded in functions.values():
        for name in _changed(folded, facts):
            position = _parameters(folded).index(name)
            if any(isinstance(_argument(call, name, position), ast.Name) for other in functions.values() for call in _calls(other, folded.key)):
                folded.mutated.append(name)
    for folded in functions.values():
        if folded.mutated and not any(isinstance(n, ast.Return) for n in ast.walk(folded.node)):
            folded.node.body.append(ast.Return(ast.Constant(None)))
    for folded in functions.values():
        keys = {c for n in ast.walk(folded.node) if isinstance(n, ast.Call) for c in getattr(n, "callees", []) if c in functions and functions[c].mutated}
        if keys:
            for node in ast.walk(folded.node):
                if isinstance(node, ast.Call) and keys & set(getattr(node, "callees", [])):
                    node.mutates = True
            _alone(folded.node, keys)


def from_cache(function, name: str):
    """The call that read a state from the cache into `name`, or None."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name and isinstance(node.value, ast.Call):
            if isinstance(node.value.func, ast.Attribute) and node.value.func.attr in _STATES:
                return node.value
    return None


def _parameters(folded) -> list[str]:
    args = folded.original.args
    return [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs] if a.arg not in ("self", "cls", "ctx")]


def _changed(folded, facts) -> list[str]:
    """Parameters that are arrays, never bound anew, and changed in place."""
    names = _parameters(folded)
    bound = {n.id for n in ast.walk(folded.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found = []
    for node in ast.walk(folded.node):
        target = None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and in_place(node.value):
            target = node.value.func.value
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            target = target.value if isinstance(target, ast.Subscript) and facts.is_array(target.value) else None
        if isinstance(target, ast.Name) and target.id in names and target.id not in bound and target.id not in found:
            found.append(target.id)
    return found


def _calls(folded, key):
    return [n for n in ast.walk(folded.node) if isinstance(n, ast.Call) and key in getattr(n, "callees", [])]


def _argument(call, name, position):
    if position < len(call.args):
        return call.args[position]
    return next((k.value for k in call.keywords if k.arg == name), None)


def _alone(function, keys) -> None:
    """`y = f(state).unsqueeze(-1)` -> `y = f(state)`, `y = y.unsqueeze(-1)`."""

    def block(body):
        out = []
        for statement in body:
            for field in ("body", "orelse"):
                if isinstance(getattr(statement, field, None), list) and not isinstance(statement, ast.FunctionDef):
                    setattr(statement, field, block(getattr(statement, field)))
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                inner = [n for n in ast.walk(statement.value) if n is not statement.value and isinstance(n, ast.Call) and keys & set(getattr(n, "callees", []))]
                if len(inner) == 1:
                    name = statement.targets[0].id
                    first = ast.Assign([ast.Name(name, ast.Store())], inner[0])
                    ast.copy_location(first, statement)
                    read = ast.Name(name, ast.Load())
                    if hasattr(inner[0], "origin"):
                        read.origin = inner[0].origin
                    ast.copy_location(read, inner[0])
                    statement.value = _Put(inner[0], read).visit(statement.value)
                    out.append(first)
            out.append(statement)
        return out

    function.body = block(function.body)


class _Put(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)
