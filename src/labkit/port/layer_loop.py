"""Plan: the loop over the decoder's layers becomes a step that the stack runner scans or loops."""

import ast

from labkit.port.refusal import CannotTranslate
from labkit.port.spine import layer_list
from labkit.port.trim import names_in
from labkit.port.values import CACHE_NAMES


def rewrite_layer_loop(context, rewriter, node: ast.For, indent: str) -> list[str] | None:
    """`for layer in self.layers: ...` as `def layer_step(layer, cache, *carry)` and `cache.run(self.layers, layer_step, ...)`; None for any other loop."""
    folded = rewriter.folded
    level = context.spine.keys.get(f"{folded.file}::{folded.cls}")
    attribute = layer_list(node.iter)
    if attribute is None or folded.node.name == "__init__" or context.spine.apart:
        return None
    stacked = level is not None and level is context.spine.last and attribute == context.spine.layers
    if not stacked and not (context.spine.layers is None and set().union(*map(names_in, node.body)) & CACHE_NAMES):
        return None
    enumerated = isinstance(node.iter, ast.Call)
    index = node.target.elts[0].id if enumerated else None
    layer = (node.target.elts[1] if enumerated else node.target).id
    if any(isinstance(n, (ast.Break, ast.Continue, ast.Return)) for s in node.body for n in ast.walk(s)):
        raise CannotTranslate("a loop over layers that stops early", node)
    if any(n is node for w in ast.walk(folded.node) if isinstance(w, ast.While) for n in ast.walk(w)):
        raise CannotTranslate("layers run again for every part of the tokens", node, "give the parts through a cache")
    cache = context.cache_name(folded)
    assigned = _assigned(node.body)
    before = _read_first(node.body) & assigned
    after = _names_after(folded.node, node)
    carry = [n for n in _ordered(node.body) if n in assigned and (n in before or n in after) and n not in (layer, index, cache)]
    carry += [n for n in _ordered(node.body) if n not in carry and _empty_before(folded.node, node, n)]
    missing = [n for n in carry if n not in before and not _defined_before(folded.node, node, n)]
    if missing:
        raise CannotTranslate(f"a loop over layers that first defines {', '.join(missing)}", node)
    if any(_none_before(folded.node, node, n) for n in carry) and "layer_idx == 0" not in context.labels:
        context.labels.append("layer_idx == 0")
    if index is not None:
        _bind_index(context, rewriter, node, index, cache)
    step = f"{layer}_step" if f"{layer}_step" not in context.local_names(folded) else "run_layer"
    lines = [f"{indent}def {step}({', '.join([layer, cache, *carry])}):"]
    lines += rewriter.block(node.body, indent + "    ")
    lines += [f"{indent}    return {', '.join(carry)}", ""]
    grows = ", grows=True" if any(_grows(node.body, n) for n in carry) else ""
    lines += [f"{indent}{', '.join(carry)} = {cache}.run(self.{'layers' if stacked else attribute}, {step}, {', '.join(carry)}{grows})"]
    return lines


def _grows(body, name: str) -> bool:
    """Each layer appends to it: `name = torch.cat([name, ...])`."""
    for node in (n for s in body for n in ast.walk(s)):
        joined = isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name] and isinstance(node.value, ast.Call)
        if joined and ast.unparse(node.value.func) in ("torch.cat", "torch.concat", "torch.hstack") and node.value.args:
            if isinstance(node.value.args[0], ast.List | ast.Tuple) and any(name in names_in(part) for part in node.value.args[0].elts):
                return True
    return False


def _assigned(body) -> set[str]:
    found = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.target.id for s in body for n in ast.walk(s) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}


def _ordered(body) -> list[str]:
    return list(dict.fromkeys(n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name)))


def _read_first(body) -> set[str]:
    """Names whose first use on some way through the body is a reading."""
    found, written = set(), set()

    def walk(statements):
        for s in statements:
            if isinstance(s, ast.Assign):
                found.update(names_in(s.value) - written)
                for t in s.targets:
                    for n in ast.walk(t):
                        if isinstance(n, ast.Name):
                            (written if isinstance(n.ctx, ast.Store) else found).add(n.id) if n.id not in written else None
            elif isinstance(s, ast.AugAssign):
                found.update((names_in(s.value) | {n.id for n in ast.walk(s.target) if isinstance(n, ast.Name)}) - written)
            elif isinstance(s, ast.If):
                found.update(names_in(s.test) - written)
                before = set(written)
                walk(s.body)
                then = set(written)
                written.clear()
                written.update(before)
                walk(s.orelse)
                written.intersection_update(then)
            elif isinstance(s, ast.For):
                found.update(names_in(s.iter) - written)
                before = set(written)
                written.update(n.id for n in ast.walk(s.target) if isinstance(n, ast.Name))
                walk(s.body)
                written.clear()
                written.update(before)
            else:
                found.update(names_in(s) - written)

    walk(body)
    return found


def _names_after(function, loop) -> set[str]:
    """Names read in the statements that follow the loop at its level."""
    for node in ast.walk(function):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and loop in block:
                return set().union(*(names_in(s) for s in block[block.index(loop) + 1 :]), set())
    return set()


def _defined_before(function, loop, name) -> bool:
    if name in {a.arg for a in function.args.args}:
        return True
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store) and getattr(node, "lineno", 0) < loop.lineno:
            return True
    return False


def _before(function, loop, name):
    """The value that the last assignment before the loop gives to a name."""
    found = None
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.lineno < loop.lineno and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found = node if found is None or node.lineno > found.lineno else found
    return found and found.value


def _none_before(function, loop, name) -> bool:
    """The loop starts with None under this name: its first layer, which gives it a value, is of a kind of its own."""
    value = _before(function, loop, name)
    return isinstance(value, ast.Constant) and value.value is None


def _empty_before(function, loop, name) -> bool:
    """An empty dictionary that layers fill for later layers: it goes through the layers as what they compute does."""
    value = _before(function, loop, name)
    filled = any(isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == name for n in ast.walk(function))
    empty = (
        isinstance(value, ast.Dict) and not value.keys or isinstance(value, ast.Call) and not value.args and ast.unparse(value.func).endswith(("dict", "Dict"))
    )
    return empty and not filled


def _bind_index(context, rewriter, loop, index: str, cache: str) -> None:
    """The loop's index: the layer's own index within arrays, and for lookups in the config, where layers that differ are of different kinds."""
    handled: set[int] = set()
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and index in names_in(node):
                parts = [v for v in node.values if names_in(v) <= {index, "self"} and _of_config(v)]
                if any(index in names_in(v) for v in parts):
                    text = " and ".join(ast.unparse(v) for v in parts).replace("self.config.", "self.")
                    context.labels.append(f"({text.replace(index, 'layer_idx')})")
                    handled |= {id(n) for v in node.values for n in ast.walk(v)}
            if isinstance(node, ast.Subscript) and index in names_in(node.slice):
                if context.facts.is_array(node.value):
                    for n in ast.walk(node.slice):
                        if isinstance(n, ast.Name) and n.id == index:
                            n.id = f"{index}__in_array"
                elif not context.facts.is_a(node.value, "dict"):
                    text = rewriter.expr(node).replace("self.config.", "self.").replace("config.", "self.")
                    text = text.replace(f"[{index}]", "[layer_idx]")
                    if text.startswith("self.") and text not in context.labels and "cache" not in text:
                        context.labels.append(text)
            elif isinstance(node, ast.Compare) and index in names_in(node) and id(node) not in handled:
                text = ast.unparse(node).replace("self.config.", "self.")
                context.labels.append(text.replace(index, "layer_idx"))
    rewriter.renames[f"{index}__in_array"] = f"{cache}.index"
    rewriter.renames[index] = f"{cache}.layer_idx"


def _of_config(node) -> bool:
    """Every attribute that the expression reads is one of the config."""
    texts = [ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return all(text.startswith("self.config") for text in texts)
