"""Mixtures on a mesh: which classes of experts can run on the part of the experts that a device holds, and how their weights are kept for that."""

import ast
import dataclasses

from labkit.port.trim import names_in

_SIZED = {"reshape", "view", "view_as", "reshape_as", "size", "shape", "expand", "unflatten"}


@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """A class whose forward is one loop over experts and uses nothing but its rows, its stacked weights and elementwise code.

    weights: the attributes that hold one matrix or one bias per expert. halves: attribute -> the axis that holds gates and ups, for those that have both in
    one axis. interleaved: gates and ups lie there in turn; otherwise gates come first.
    """

    weights: frozenset[str]
    halves: dict[str, int]
    interleaved: bool


def find_local_experts(context) -> dict[str, LocalExperts]:
    """`file::class` -> what can be said of it, for every class whose experts need not be together."""
    found = {}
    for folded in context.functions.values():
        loops = [n for n in ast.walk(folded.node) if getattr(n, "experts", None) is not None]
        if folded.cls and folded.node.name == "forward" and len(loops) == 1:
            local = _local(context, folded, loops[0])
            if local is not None:
                found[f"{folded.file}::{folded.cls}"] = local
    return found


def local_experts_of(context, cls: str) -> LocalExperts | None:
    """What was found for a class of a record (`file::name`), or for one of its bases."""
    path, _, name = cls.partition("::")
    if not name or path == "external":
        return None
    own = [cls, *(base.key for base in context.program.bases(path, name))]
    return next((context.local_experts[key] for key in own if key in context.local_experts), None)


def _local(context, folded, loop) -> LocalExperts | None:
    weights, used = set(), set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and loop.experts.expert in names_in(node.slice):
            attribute = _own(node.value)
            if attribute is None or ast.unparse(node.slice) != loop.experts.expert:
                return None
            weights.add(attribute)
            used.add(node.slice)
    if any(isinstance(n, ast.Name) and n.id == loop.experts.expert and n not in used and isinstance(n.ctx, ast.Load) for n in ast.walk(loop)) or not weights:
        return None
    bodies = [folded.node]
    for node in ast.walk(folded.node):
        attribute = _own(node)
        if attribute is None or attribute in weights:
            continue
        helper = context.program.method(folded.file, folded.cls, attribute)
        if helper is not None:
            key = f"{helper[0].key}.{attribute}"
            if key not in context.functions or any(_own(n) in weights for n in ast.walk(context.functions[key].node)):
                return None
            bodies.append(context.functions[key].node)
        elif not context.facts.modules(node) and not any(k.startswith("function") for k in context.facts.kinds(node)):
            return None
    if any(isinstance(n, ast.Attribute) and n.attr in _SIZED and _own(n.value) not in weights for body in bodies for n in ast.walk(body)):
        return None
    ways = {way for body in bodies for n in ast.walk(body) if (way := _way(n)) is not None}
    halves = _halves(context, folded, weights)
    if "other" in ways or len(ways) > 1 or bool(ways) != bool(halves):
        return None
    return LocalExperts(frozenset(weights), halves, ways == {"in turn"})


def _own(node) -> str | None:
    """The attribute in `self.attribute`."""
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self" else None


def _way(node) -> str | None:
    """How an expression takes gates and ups apart: "halves", "in turn", or "other" for another part of a row."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("chunk", "split", "narrow", "tensor_split"):
        return "halves" if node.func.attr == "chunk" and ast.unparse(node.args[0]) == "2" else "other"
    slices = (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]) if isinstance(node, ast.Subscript) else []
    parts = [s for s in slices if isinstance(s, ast.Slice) and (s.lower or s.upper or s.step)]
    if not parts:
        return None
    taken = {(s.lower and ast.unparse(s.lower), s.upper and ast.unparse(s.upper), s.step and ast.unparse(s.step)) for s in parts}
    return "in turn" if taken <= {(None, None, "2"), ("1", None, "2"), ("0", None, "2")} and slices[-1] is parts[-1] else "other"


def _halves(context, folded, weights) -> dict[str, int]:
    """The weights whose constructor says `2 * size`, with the place of that among their sizes."""
    method = context.program.method(folded.file, folded.cls, "__init__")
    init = context.functions.get(f"{method[0].key}.__init__") if method else None
    found = {}
    for node in ast.walk(init.node) if init else ():
        attribute = _own(node.targets[0]) if isinstance(node, ast.Assign) else None
        if attribute in weights:
            for call in ast.walk(node.value):
                sizes = (
                    call.args[0].elts
                    if isinstance(call, ast.Call) and len(call.args) == 1 and isinstance(call.args[0], ast.Tuple)
                    else getattr(call, "args", [])
                )
                places = [place for place, size in enumerate(sizes) if place and half_of(size) is not None]
                if places:
                    found[attribute] = places[-1]
    return found


def half_of(size) -> ast.expr | None:
    """`x` of `2 * x`."""
    if isinstance(size, ast.BinOp) and isinstance(size.op, ast.Mult):
        for two, other in ((size.left, size.right), (size.right, size.left)):
            if isinstance(two, ast.Constant) and two.value == 2:
                return other
    return None


def in_halves(shape: str, axis: int) -> str:
    """The text of a shape with `2 * x` at `axis` as two sizes."""
    sizes = ast.parse(shape, mode="eval").body
    sizes.elts[axis : axis + 1] = [ast.Constant(2), half_of(sizes.elts[axis])]
    return ast.unparse(sizes)
