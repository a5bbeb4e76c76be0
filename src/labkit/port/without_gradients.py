"""Blocks, contexts chosen per turn and decorated functions that the reference computes without gradients.

What comes out of each goes on as an array without gradients (`.detach()`)."""

import ast
import re

from labkit.port.refusal import CannotTranslate

_NONE = re.compile(r"(?:torch\.)?(?:no_grad|inference_mode)\(\)|(?:torch\.)?(?:autograd\.)?set_grad_enabled\(False\)")
_OPPOSITE = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_METADATA = {"dtype", "device", "shape", "ndim", "size", "dim"}


def stops(node) -> bool:
    """The expression, or the decorator, is a context without gradients."""
    return bool(_NONE.fullmatch(ast.unparse(node)))


def chosen(node) -> ast.expr | None:
    """The condition under which `a if test else b` is a context without gradients; None where neither side is one."""
    if not isinstance(node, ast.IfExp) or not (stops(node.body) or stops(node.orelse)):
        return None
    return node.test if stops(node.body) else negated(node.test)


def negated(test):
    """`not test`, a comparison turned round."""
    if isinstance(test, ast.Compare) and type(test.ops[0]) in _OPPOSITE and len(test.ops) == 1:
        return ast.copy_location(ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators), test)
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def detached(node):
    """`node.detach()`."""
    return ast.copy_location(ast.Call(ast.Attribute(node, "detach", ast.Load()), [], []), node)


def floats(names, within, facts) -> list[str]:
    """Those of the names that hold arrays of floats somewhere in the function, in order."""
    seen = {n.id for n in ast.walk(within) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and facts.dtype(n) == "f"}
    return [name for name in names if name in seen]


def after_block(body: list, source: list, within, facts, always: bool) -> list:
    """Statements that take the gradients from what a block leaves behind; what it returns loses them in place. `source`: the block as the reference has it.

    Raises CannotTranslate for a return from a block that has gradients in some turns (always False)."""
    returns = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Return) and n.value is not None]
    if returns and not always:
        raise CannotTranslate("a return from a block without gradients", source[0])
    for statement in returns:
        statement.value = without(statement.value, facts)
    inside = {id(n) for s in source for n in ast.walk(s)}
    read = {n.id for n in ast.walk(within) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in inside}
    assigned = [name for s in body for n in ast.walk(s) for name in _stored(n)]
    out = []
    for name in floats(dict.fromkeys(n for n in assigned if n in read), within, facts):
        load = ast.copy_location(ast.Name(name, ast.Load()), source[-1])
        out.append(ast.copy_location(ast.Assign([ast.copy_location(ast.Name(name, ast.Store()), source[-1])], detached(load)), source[-1]))
    return out


def _stored(node) -> list[str]:
    """The name that a node stores into: as a whole, at an index, or by a method that ends in `_`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_") and not node.func.attr.endswith("__"):
        node = node.func.value
    elif not isinstance(getattr(node, "ctx", None), ast.Store):
        return []
    while isinstance(node, ast.Subscript):
        node = node.value
    return [node.id] if isinstance(node, ast.Name) else []


def gradients_enter(function, facts) -> bool:
    """Gradients would pass through the function: it reads more than the sizes and the dtype of an array of floats, or a parameter."""
    takes = {a.arg for a in [*function.args.args, *function.args.kwonlyargs] if any(k.startswith("array:f") for k in facts.kinds(a))}
    metadata = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in _METADATA}
    return any(
        (isinstance(n, ast.Name) and n.id in takes and isinstance(n.ctx, ast.Load) and id(n) not in metadata)
        or (isinstance(n, ast.Attribute) and "param" in {k.split(":")[0] for k in facts.kinds(n)})
        or (isinstance(n, ast.Call) and bool(facts.modules(n.func)))
        for n in ast.walk(function)
    )


def without(value, facts):
    """The returned value with the gradients taken from its arrays of floats."""
    if isinstance(value, ast.Tuple):
        value.elts = [without(e, facts) for e in value.elts]
        return value
    return detached(value) if facts.dtype(value) == "f" else value
