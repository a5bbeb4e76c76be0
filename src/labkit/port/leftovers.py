"""Leftovers of a translation: names bound to themselves, locals that nobody reads, parentheses. Works on the emitted text."""

import ast


def remove_leftovers(text: str) -> str:
    """The module's text without them; comments are not expected in it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for _ in range(4):
                before = ast.dump(node)
                _clean(node)
                if ast.dump(node) == before:
                    break
    return _spaced(ast.unparse(ast.fix_missing_locations(tree)))


def _spaced(text: str) -> str:
    return text


def _clean(function: ast.FunctionDef) -> None:
    reads = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

    class Clean(ast.NodeTransformer):
        def visit_FunctionDef(inner, node):
            if node is not function:
                return node
            inner.generic_visit(node)
            return node

        def visit_Assign(inner, node):
            target = node.targets[0]
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Name) and node.value.id == target.id:
                return None
            if isinstance(target, ast.Name) and target.id not in reads and _pure(node.value):
                return None
            return node

        def visit_If(inner, node):
            inner.generic_visit(node)
            if not node.body and not node.orelse:
                return None
            if not node.body:
                node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, []
            return node

    Clean().visit(function)
    if not function.body:
        function.body = [ast.Pass()]


def _pure(node) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if not name.startswith(("jnp.", "jax.nn.", "np.")) and not name.endswith((".reshape", ".astype", ".swapaxes", ".transpose")):
                return False
    return True
