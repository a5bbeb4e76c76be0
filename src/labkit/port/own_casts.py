"""Simplify: a method that casts an array of its own module in place (`self.table = self.table.to(x.dtype)`) casts it into a local name."""

import ast


def casts_to_locals(functions: dict) -> None:
    for folded in functions.values():
        if folded.cls is None or folded.node.name == "__init__":
            continue
        for node in ast.walk(folded.node):
            attribute = _own_cast(node)
            if attribute is not None:
                _rename(folded, node, attribute)


def _own_cast(node) -> str | None:
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_own(node.targets[0]) and isinstance(node.value, ast.Call)):
        return None
    func, attribute = node.value.func, node.targets[0].attr
    cast = isinstance(func, ast.Attribute) and func.attr == "to" and _is_own(func.value) and func.value.attr == attribute
    return attribute if cast else None


def _is_own(node) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _rename(folded, assign, attribute: str) -> None:
    taken = {n.id for n in ast.walk(folded.node) if isinstance(n, ast.Name)}
    local = attribute if attribute not in taken else f"{attribute}_"
    folded.made_locals = getattr(folded, "made_locals", set()) | {local}
    value = assign.value

    class Reads(ast.NodeTransformer):
        def visit_Attribute(inner, node):
            inner.generic_visit(node)
            if not (_is_own(node) and node.attr == attribute):
                return node
            name = ast.copy_location(ast.Name(local, node.ctx), node)
            if hasattr(node, "origin"):
                name.origin = node.origin
            return name

        def visit_Assign(inner, node):
            if node is assign:
                node.targets = [ast.copy_location(ast.Name(local, ast.Store()), node.targets[0])]
                node.value = value
                return node
            return inner.generic_visit(node)

    Reads().visit(folded.node)
