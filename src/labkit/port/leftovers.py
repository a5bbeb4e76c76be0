"""Leftovers of a translation: names bound to themselves, locals that nobody reads, parentheses. Works on the emitted text."""

import ast

from labkit.port.unread_parameters import drop_unread_parameters


def remove_leftovers(text: str) -> str:
    """The module's text without them; comments are not expected in it."""
    tree = _Casts().visit(ast.parse(text))
    _read_parameters_themselves(tree)
    _drop_unread_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for _ in range(4):
                before = ast.dump(node)
                _clean(node)
                if ast.dump(node) == before:
                    break
    drop_unread_parameters(tree)
    return "\n".join(map(_bare_tuple, ast.unparse(ast.fix_missing_locations(tree)).splitlines()))


class _Casts(ast.NodeTransformer):
    """`x.astype(x.dtype)` is x; `widen(jnp.asarray(x, wide))` is wide already."""

    def visit_Call(self, node):
        self.generic_visit(node)
        func = node.func
        if (
            isinstance(func, ast.Attribute)
            and func.attr == "astype"
            and len(node.args) == 1
            and ast.unparse(node.args[0]) == f"{ast.unparse(func.value)}.dtype"
        ):
            return func.value
        if isinstance(func, ast.Name) and func.id == "widen" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            inner = node.args[0]
            if ast.unparse(inner.func) == "jnp.asarray" and len(inner.args) == 2 and ast.unparse(inner.args[1]).startswith("wide_dtype("):
                return inner
        return node


def _read_parameters_themselves(tree: ast.Module) -> None:
    """`self.x = x` in a constructor that alone reads it, as the parameter itself: what a layer keeps without need, such as its index, makes it differ from the
    next one."""
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for init in [m for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]:
        parameters = {a.arg for a in (*init.args.args, *init.args.kwonlyargs)} - {"self", "config", "build"}
        rebound = {n.id for n in ast.walk(init) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for statement in list(init.body):
            if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Name)):
                continue
            target, name = statement.targets[0], statement.value.id
            if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and name in parameters - rebound) or target.attr in strings:
                continue
            mine = [n for n in ast.walk(init) if isinstance(n, ast.Attribute) and n.attr == target.attr and ast.unparse(n.value) == "self"]
            every = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == target.attr and ast.unparse(n.value) != "config"]
            if len(mine) < 2 or len(every) > len(mine) or sum(isinstance(n.ctx, ast.Store) for n in mine) > 1:
                continue
            init.body.remove(statement)
            _Renamed(target.attr, name).visit(init)


class _Renamed(ast.NodeTransformer):
    """`self.<attribute>` as the name."""

    def __init__(self, attribute: str, name: str):
        self.attribute, self.name = attribute, name

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == self.attribute and ast.unparse(node.value) == "self":
            return ast.Name(self.name, node.ctx)
        return node


_READ_CONFIG = ("DecoderCall.begin", "empty_cache")
"""Functions of `layers/decoding.py`; of a model they read `config` alone."""

_LIBRARIES = ("jnp.", "jax.", "np.")


def _drop_unread_attributes(tree: ast.Module) -> None:
    """`self.x = value` in constructors, where no code that can hold such an object reads an x and the value makes no module, parameter or constant."""
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    for _ in range(4):
        elsewhere = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        elsewhere |= {n.attr for n in _loads(tree) if not ast.unparse(n.value).endswith(("self", "config")) and not ast.unparse(n).startswith(_LIBRARIES)}
        changed = False
        for cls in classes.values():
            family = _family(cls, classes)
            read = {n.attr for member in family for n in _loads(member) if ast.unparse(n.value) == "self"}
            shared = len(family) > 1 or any(isinstance(b, ast.Name) and b.id != "nnx" for b in cls.bases)
            if any(_handed_on(member) for member in family):
                read |= {n.attr for n in _loads(tree) if ast.unparse(n.value) == "self"}
            for init in [m for m in cls.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]:
                kept = [statement for statement in init.body if not _unread(statement, read | elsewhere, read, shared)]
                changed |= len(kept) < len(init.body)
                init.body = kept or [ast.Pass()]
        if not changed:
            return


def _loads(tree) -> list[ast.Attribute]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]


def _family(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class, the module's classes that it derives from, and those that derive from any of them."""
    bases = lambda one: [b.id for b in one.bases if isinstance(b, ast.Name) and b.id in classes]
    found = {cls.name}
    while True:
        more = {name for name, one in classes.items() if {name, *bases(one)} & found for name in (name, *bases(one))} - found
        if not more:
            return [classes[name] for name in found]
        found |= more


def _handed_on(cls: ast.ClassDef) -> bool:
    """A method gives `self` to some function, which may read any attribute."""
    calls = [n for n in ast.walk(cls) if isinstance(n, ast.Call) and ast.unparse(n.func) not in _READ_CONFIG]
    return any(isinstance(arg, ast.Name) and arg.id == "self" for call in calls for arg in (*call.args, *(k.value for k in call.keywords)))


def _unread(statement, read: set[str], own: set[str], shared: bool) -> bool:
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Attribute)):
        return False
    target = statement.targets[0]
    if ast.unparse(target.value) != "self" or any(isinstance(n, ast.Name) and n.id in ("build", "nnx") for n in ast.walk(statement.value)):
        return False
    if target.attr == "config":
        return not shared and "config" not in own
    return target.attr not in read


def _bare_tuple(line: str) -> str:
    """`return (a, b)` and `a, b = (x, y)` without the parentheses that unparsing adds."""
    stripped = line.lstrip()
    for lead in ("return ", " = "):
        at = stripped.find(lead)
        if at < 0 or (lead == "return " and at != 0):
            continue
        head, value = stripped[: at + len(lead)], stripped[at + len(lead) :]
        if not (value.startswith("(") and value.endswith(")")) or (lead == " = " and "(" in head):
            continue
        try:
            node = ast.parse(value, mode="eval").body
            bare = ast.parse(value[1:-1], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(node, ast.Tuple) and isinstance(bare, ast.Tuple) and len(node.elts) > 1 and not any(isinstance(e, ast.Starred) for e in node.elts):
            return line[: len(line) - len(stripped)] + head + value[1:-1]
    return line


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


def _join_return(body: list) -> None:
    """`x = f(y)` and `return x` right after it as `return f(y)`."""
    if len(body) > 1 and isinstance(body[-1], ast.Return) and isinstance(body[-1].value, ast.Name) and isinstance(body[-2], ast.Assign):
        target = body[-2].targets[0]
        if len(body[-2].targets) == 1 and isinstance(target, ast.Name) and target.id == body[-1].value.id:
            body[-1].value = body[-2].value
            del body[-2]


def _clean(function: ast.FunctionDef) -> None:
    _join_names(function.body)
    _join_return(function.body)
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
