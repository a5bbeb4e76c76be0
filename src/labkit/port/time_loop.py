"""Plan: a loop over time or over chunks becomes a scan. Taken where the index does nothing but pick from arrays; any other loop stays as it is written."""

import ast

from labkit.port.layer_loop import _assigned, _ordered, _read_first
from labkit.port.trim import names_in
from labkit.port.values import CACHE_NAMES

LOOPS = "labkit.layers.loops"
_LINEAR = {"clone", "unsqueeze", "sum", "transpose", "contiguous", "squeeze", "to", "float"}


def rewrite_time_loop(context, rewriter, node: ast.For, indent: str) -> list[str] | None:
    """`for i in range(n): ...` as a step and `scan_range(step, range(n), ...)`; None for a loop that is none of this kind."""
    if rewriter.numpy or not _over_range(node) or not _plain(node.body) or not _reads_arrays(context, node):
        return None
    index = node.target.id
    function = rewriter.folded.node
    after = live_after(function.body, node)
    if after is None:
        return None
    appended = _appended(node.body)
    if any(not _only_list(function, name, node) for name in appended):
        return None
    assigned = _assigned(node.body)
    first = _read_first(node.body) & assigned
    stored = _stored(node.body)
    order = [n for n in _ordered(node.body) if n in assigned | stored and n != index]
    carry = [n for n in order if n in first | stored]
    last = [n for n in order if n in after and n not in carry]
    outs = [name for name in appended] + last
    prefixes = Prefixes(index)
    body = [prefixes.visit(_copy(s)) for s in node.body]
    if prefixes.found and not (_linear(node.body) and all(t.prefix[1] == [-1] for s in body for t in getattr(s, "targets", []) if hasattr(t, "prefix"))):
        return None
    scan = rewriter.use(LOOPS, "scan_range")
    step = next(n for n in ("step", f"{index}_step", "loop_step") if n not in context.local_names(rewriter.folded))
    lines = [f"{indent}def {step}({', '.join([index, *carry])}):"]
    collected = {}
    for statement in body:
        name = _append_of(statement)
        if name is not None:
            collected[name] = f"{name}_{index}"
            lines.append(f"{indent}    {collected[name]} = {rewriter.expr(statement.value.args[0])}")
        else:
            lines += PrefixWriter.statement(rewriter, statement, indent + "    ")
    returned = _tuple([collected.get(n, n) for n in outs])
    lines += [f"{indent}    return {_tuple(carry)}, {returned}", ""]
    iterated = rewriter.expr(node.iter)
    call = f"{scan}({', '.join([step, iterated, *carry])})"
    if not outs:
        lines.append(f"{indent}{_tuple(carry)}, _ = {call}")
    else:
        lines.append(f"{indent}{_tuple(carry) if carry else '_'}, {_tuple(outs)} = {call}")
    lines += [f"{indent}{name} = {name}[-1]" for name in last]
    for name in appended:
        lines += _as_list(rewriter, function, name, indent)
    return lines


def _tuple(names) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _copy(node):
    import copy

    return copy.deepcopy(node)


def _over_range(node) -> bool:
    return isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"


def _plain(body) -> bool:
    """Assignments and appends alone, and no cache: what a scan can hold."""
    for statement in body:
        if not isinstance(statement, (ast.Assign, ast.AugAssign)) and _append_of(statement) is None:
            return False
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in CACHE_NAMES:
                return False
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                return False
    return True


def _append_of(statement) -> str | None:
    """The list that `xs.append(value)` appends to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append" and isinstance(call.func.value, ast.Name):
        return call.func.value.id
    return None


def _appended(body) -> list[str]:
    return list(dict.fromkeys(filter(None, map(_append_of, body))))


def _reads_arrays(context, node) -> bool:
    """Every use of the index picks from an array: `x[:, i]`, `x[:i]`, `x[i : i + 1]`."""
    index, used = node.target.id, 0
    for statement in node.body:
        for part in ast.walk(statement):
            if isinstance(part, ast.Subscript) and index in names_in(part.slice):
                if not context.facts.is_array(part.value):
                    return False
                for element in part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]:
                    if index not in names_in(element):
                        continue
                    if not (isinstance(element, ast.Name) or _is_prefix(element, index) or _is_one(element, index)):
                        return False
                    used += sum(isinstance(n, ast.Name) and n.id == index for n in ast.walk(element))
    total = sum(isinstance(n, ast.Name) and n.id == index for s in node.body for n in ast.walk(s))
    return total == used and used > 0


def _is_prefix(element, index) -> bool:
    return (
        isinstance(element, ast.Slice) and element.lower is None and element.step is None and isinstance(element.upper, ast.Name) and element.upper.id == index
    )


def _is_one(element, index) -> bool:
    return (
        isinstance(element, ast.Slice)
        and element.step is None
        and element.lower is not None
        and element.upper is not None
        and (ast.unparse(element.lower) == index and ast.unparse(element.upper) in (f"{index} + 1", f"1 + {index}"))
    )


def _stored(body) -> set[str]:
    """Arrays of which an element is assigned, `x[..., i] = value`: they go through the loop."""
    targets = [t for s in body for t in (s.targets if isinstance(s, ast.Assign) else [getattr(s, "target", None)])]
    return {t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name)}


def _linear(body) -> bool:
    """Zeros behind a prefix change nothing here: only products, sums and copies."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Attribute) and node.func.attr in _LINEAR):
                return False
            if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.MatMult)):
                return False
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and any(isinstance(s, ast.Constant) for s in (node.left, node.right)):
                return False
    return True


def _only_list(function, name, loop) -> bool:
    """A local list that this loop alone fills, and that is stacked or joined afterwards."""
    appends = sum(1 for n in ast.walk(loop) if isinstance(n, ast.Expr) and _append_of(n) == name)
    reads = [n for n in ast.walk(function) if isinstance(n, ast.Call) and any(isinstance(a, ast.Name) and a.id == name for a in n.args)]
    return appends == 1 and bool(reads) and all(ast.unparse(r.func) in ("torch.stack", "torch.cat", "torch.concat", "torch.concatenate") for r in reads)


def _as_list(rewriter, function, name, indent) -> list[str]:
    """What was collected, as the list that the code after the loop reads."""
    read = next(n for n in ast.walk(function) if isinstance(n, ast.Call) and any(isinstance(a, ast.Name) and a.id == name for a in n.args))
    axis = read.args[1] if len(read.args) > 1 else next((k.value for k in read.keywords if k.arg in ("dim", "axis")), ast.Constant(0))
    if ast.unparse(read.func) == "torch.stack":
        loops = sum(1 for n in ast.walk(function) if isinstance(n, ast.Expr) and _append_of(n) == name)
        if loops == 1:
            rewriter.stacked.add(name)
            return []
        return [f"{indent}{name} = list({name})"]
    return [f"{indent}{name} = [{rewriter.use(LOOPS, 'rows_joined')}({name}, {rewriter.expr(axis)})]"]


class Prefixes(ast.NodeTransformer):
    """Marks `x[..., :i]`: reads become `prefix(x[..., :], i)`, and `x[..., i : i + 1]` an index and a new axis."""

    def __init__(self, index: str):
        self.index, self.found = index, False

    def visit_Subscript(self, node):
        self.generic_visit(node)
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        out, axes = [], []
        for place, element in enumerate(elements):
            if _is_prefix(element, self.index):
                self.found = True
                if any(isinstance(e, ast.Constant) and e.value is Ellipsis for e in elements[:place]):
                    axes.append(-1 - sum(not isinstance(e, ast.Name) for e in elements[place + 1 :]))
                else:
                    axes.append(sum(not isinstance(e, ast.Name) for e in elements[:place]))
                out.append(ast.Slice())
            elif _is_one(element, self.index):
                out += [ast.Name(self.index, ast.Load()), ast.Constant(None)]
            else:
                out.append(element)
        if len(out) == len(elements) and not axes:
            return node
        node.slice = ast.Tuple(out, ast.Load()) if len(out) > 1 else out[0]
        if axes:
            node.prefix = (self.index, axes)
        return node


class PrefixWriter:
    @staticmethod
    def statement(rewriter, statement, indent) -> list[str]:
        """A statement whose target may be a prefix."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        found = getattr(target, "prefix", None)
        if found is None:
            return rewriter.statement(statement, indent)
        write = rewriter.use(LOOPS, "with_prefix")
        place = rewriter.index(target.slice)
        base = rewriter.target(target.value)
        return [f"{indent}{base} = {base}.at[{place}].set({write}({base}[{place}], {rewriter.expr(statement.value)}, {found[0]}))"]


def live_after(body, loop, live=frozenset()) -> set[str] | None:
    """Names that may be read after `loop` before anything else is written to them; None when it stands inside another loop."""
    found: list = []

    def backward(statements, live):
        for s in reversed(statements):
            if s is loop:
                found.append(set(live))
                live = live | names_in(s)
            elif isinstance(s, ast.If):
                live = backward(s.body, set(live)) | backward(s.orelse, set(live)) | names_in(s.test)
            elif isinstance(s, (ast.For, ast.While)):
                if any(n is loop for n in ast.walk(s)):
                    found.append(None)
                live = live | names_in(s)
            elif isinstance(s, ast.Assign):
                bound = {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                live = (live - bound) | names_in(s)
            elif isinstance(s, (ast.Return, ast.Raise)):
                live = names_in(s)
            else:
                live = live | names_in(s) | {n.id for n in ast.walk(s) if isinstance(n, ast.Name)}
        return live

    backward(body, set(live))
    return found[0] if found else None
