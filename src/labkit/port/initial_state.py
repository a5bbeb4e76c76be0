"""Simplify: a scan that the reference starts from zeros starts from the layer's state, so that a cache can be filled in pieces.

The reference's own kernels take no initial state, so it feeds a cache many tokens at once only when the cache is empty: there the state is zeros,
and both agree.
"""

import ast
import copy

from labkit.port.values import VARIES

INITIAL = "initial_state"


def start_from_state(functions: dict) -> None:
    """Where a method reads `state` from the cache and writes back what a function's loop made of zeros, the function is given `state` to start from."""
    for folded in list(functions.values()):
        reads = [(s.targets[0].id, s.value) for s in _assigns(folded.node) if isinstance(s.targets[0], ast.Name) and _method(s.value) == "get_recurrent_state"]
        writes = [n for n in ast.walk(folded.node) if _method(n) == "update_recurrent_state" and n.args and isinstance(n.args[0], ast.Name)]
        if len(reads) != 1 or len(writes) != 1:
            continue
        state, written = reads[0][0], writes[0].args[0].id
        stacked = _stacked(folded.node, written)
        found = _made_by(folded.node, stacked[0] if stacked else written)
        if found is None:
            continue
        call, place = found
        targets = [functions[c] for c in getattr(call, "callees", []) if c in functions]
        if len(targets) != 1 or any(isinstance(n, ast.Name) and n.id == state for n in ast.walk(call)):
            continue
        if _accept(targets[0], place):
            start = _part(folded.node, state, *stacked[1:]) if stacked else ast.copy_location(ast.Name(state, ast.Load()), call)
            call.keywords.append(ast.keyword(INITIAL, start))
            if stacked:
                _drop_steps(folded.node, state)


def _stacked(function, name: str):
    """(part, axis, index) when `name` is `torch.stack(parts, dim=axis)` and a loop over `index` appended each part; None else."""
    for statement in _assigns(function):
        value = statement.value
        if ast.unparse(statement.targets[0]) != name or not isinstance(value, ast.Call) or ast.unparse(value.func) != "torch.stack":
            continue
        axis = value.args[1] if len(value.args) > 1 else next((k.value for k in value.keywords if k.arg == "dim"), ast.Constant(0))
        for loop in ast.walk(function):
            if not (isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and isinstance(axis, ast.Constant) and axis.value >= 0):
                continue
            for call in ast.walk(loop):
                if _method(call) == "append" and ast.unparse(call.func.value) == ast.unparse(value.args[0]) and isinstance(call.args[0], ast.Name):
                    return call.args[0].id, axis.value, loop.target.id
    return None


def _part(function, state: str, axis: int, index: str):
    """`state[:, index]`, None where there is no state."""
    read = next(n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == state and isinstance(n.ctx, ast.Load))
    at = [*(ast.Slice() for _ in range(axis)), ast.Name(index, ast.Load())]
    part = ast.Subscript(copy.deepcopy(read), ast.Tuple(at, ast.Load()) if axis else at[0], ast.Load())
    return ast.IfExp(ast.Compare(copy.deepcopy(read), [ast.IsNot()], [ast.Constant(None)]), part, ast.Constant(None))


def _drop_steps(function, state: str) -> None:
    """`if state is not None and length == 1:` with a form that changes parts of the state in place goes: the scan over one token, begun from the
    state, is it."""

    class Drop(ast.NodeTransformer):
        def visit_If(inner, node):
            inner.generic_visit(node)
            parts = [n for s in node.body for c in ast.walk(s) if isinstance(c, ast.Call) for n in c.args if isinstance(n, ast.Subscript)]
            if (
                node.orelse
                and f"{state} is not None" in ast.unparse(node.test)
                and "== 1" in ast.unparse(node.test)
                and any(ast.unparse(p.value) == state for p in parts)
            ):
                return node.orelse
            return node

    Drop().visit(function)


def _assigns(function):
    return [n for n in ast.walk(function) if isinstance(n, ast.Assign) and len(n.targets) == 1]


def _method(node) -> str | None:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def _made_by(function, name: str):
    """(call, place) when `name` is an element of the tuple that a call gives, at once or through one more name."""
    for statement in _assigns(function):
        target = statement.targets[0]
        if not isinstance(target, ast.Tuple) or name not in (names := [ast.unparse(e) for e in target.elts]):
            continue
        value = statement.value
        if isinstance(value, ast.Name):
            value = next((s.value for s in _assigns(function) if ast.unparse(s.targets[0]) == value.id), None)
        if isinstance(value, ast.Call):
            return value, names.index(name)
    return None


def _accept(folded, place: int) -> bool:
    """Give the function an `initial_state` in place of the zeros that its loop starts from."""
    returned = {
        ast.unparse(n.value.elts[place])
        for n in ast.walk(folded.node)
        if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple) and len(n.value.elts) > place
    }
    if len(returned) != 1:
        return False
    name = returned.pop()
    inside = {id(s) for loop in ast.walk(folded.node) if isinstance(loop, ast.For) for s in ast.walk(loop)}
    starts = [s for s in _assigns(folded.node) if ast.unparse(s.targets[0]) == name and id(s) not in inside]
    carried = any(ast.unparse(s.targets[0]) == name for s in _assigns(folded.node) if id(s) in inside)
    if len(starts) != 1 or not carried or not isinstance(starts[0].value, ast.Call) or ast.unparse(starts[0].value.func) != "torch.zeros":
        return False
    zeros = starts[0].value
    test = ast.Compare(ast.Name(INITIAL, ast.Load()), [ast.Is()], [ast.Constant(None)])
    starts[0].value = ast.copy_location(ast.IfExp(test, zeros, ast.Name(INITIAL, ast.Load())), zeros)
    folded.extras[INITIAL] = VARIES
    return True
