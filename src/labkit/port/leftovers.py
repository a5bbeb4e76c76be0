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
    return ast.unparse(ast.fix_missing_locations(tree))


def _join_names(body: list) -> None:
    """`a = f(x)` and `b = a` right after it, a read nowhere else, as `b = f(x)`."""
    for first, second in zip(list(body), body[1:]):
        if not (isinstance(first, ast.Assign) and isinstance(second, ast.Assign) and len(first.targets) == len(second.targets) == 1):
            continue
        a, b = first.targets[0], second.targets[0]
        if isinstance(a, ast.Name) and isinstance(b, ast.Name) and isinstance(second.value, ast.Name) and second.value.id == a.id != b.id:
            rest = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == a.id]
            if len(rest) == 2:
                first.targets = second.targets
                body.remove(second)


def _clean(function: ast.FunctionDef) -> None:
    _join_names(function.body)
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
            if not name.startswith(("jnp.", "jax.nn.", "np.")) and not name.endswith((".reshape", ".astype", ".swapaxes", ".transpose", ".copy")):
                return False
    return True
