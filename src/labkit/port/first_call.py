"""Plan: what a model does once to the weights of its layers, before it first runs in evaluation, is done to each layer where it runs.

The reference keeps a flag: `if flag == training: self.change()` with a method that changes weights in place and sets the flag. A layer of a stack is made
anew for each run, so that its weights can be changed there and stay as a checkpoint has them.
"""

import ast
import copy

from labkit.port.spine import layer_list
from labkit.port.trim import in_place


def changes_to_layers(functions: dict, spine) -> list[str]:
    """Move such changes into the loop over the layers. Returns labels that keep layers apart which are changed differently."""
    labels: list[str] = []
    for folded in list(functions.values()):
        for statement in [s for s in folded.node.body if isinstance(s, ast.If)]:
            flag, method = _once(statement), _method(functions, statement)
            loop = next((s for s in ast.walk(folded.node) if isinstance(s, ast.For) and layer_list(s.iter) == spine.layers and layer_list(s.iter)), None)
            changed = _changes(method, flag) if flag and method is not None else None
            if changed is None or loop is None or not isinstance(loop.iter, ast.Call):
                continue
            condition, inner = changed
            if layer_list(inner.iter) != spine.layers or not isinstance(inner.iter, ast.Call):
                continue
            index, layer = (e.id for e in loop.target.elts)
            names = dict(zip((e.id for e in inner.target.elts), (index, layer)))
            body = [_Named(names).visit(copy.deepcopy(s)) for s in inner.body]
            for change in body:
                change.value.fresh = True
                change.keep = True
                guard = ast.unparse(condition)
                for argument in change.value.args:
                    text = f"({ast.unparse(argument)} if {guard} else None)".replace("self.config.", "self.").replace(index, "layer_idx")
                    labels += [text] if text not in labels else []
            loop.body.insert(0, ast.copy_location(ast.If(condition, body, []), loop.body[0]))
            folded.node.body.remove(statement)
            _Flag(flag).visit(folded.node)
    return labels


def _once(statement: ast.If) -> str | None:
    """The flag of `if False == self.flag: self.change()`."""
    test = statement.test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and isinstance(test.left, ast.Constant) and test.left.value is False:
        right = test.comparators[0]
        if isinstance(right, ast.Attribute) and ast.unparse(right.value) == "self" and len(statement.body) == 1 and not statement.orelse:
            return right.attr
    return None


def _method(functions, statement):
    call = statement.body[0].value if isinstance(statement.body[0], ast.Expr) else None
    callees = [functions[c] for c in getattr(call, "callees", []) if c in functions] if isinstance(call, ast.Call) and not call.args else []
    return callees[0] if len(callees) == 1 else None


def _changes(method, flag: str):
    """(condition, loop over layers) of a method that changes weights in place, under one condition, and sets the flag; None for one that does anything else."""
    found = None
    for statement in method.node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == f"self.{flag}" and ast.unparse(statement.value) in ("True", "not False"):
            continue
        if isinstance(statement, ast.If) and f"self.{flag}" in ast.unparse(statement.test) and all(isinstance(s, ast.Return) for s in statement.body):
            continue
        if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1 or not isinstance(statement.body[0], ast.For) or found is not None:
            return None
        loop = statement.body[0]
        plain = all(
            isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and in_place(s.value) and isinstance(s.value.func.value, ast.Attribute) for s in loop.body
        )
        if not plain:
            return None
        found = statement.test, loop
    return found


class _Named(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        node.id = self.names.get(node.id, node.id)
        return node


class _Flag(ast.NodeTransformer):
    """The flag is set from here on."""

    def __init__(self, flag: str):
        self.flag = flag

    def visit_Attribute(self, node):
        return ast.copy_location(ast.Constant(True), node) if ast.unparse(node) == f"self.{self.flag}" else node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        if isinstance(node.op, ast.And):
            node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value is True)] or node.values[:1]
            return node.values[0] if len(node.values) == 1 else node
        return node
