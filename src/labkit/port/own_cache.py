"""Simplify: a cache class of the modeling file that keeps, in one attribute, arrays of zeros for every layer: they are the layer's recurrent states."""

import ast

from labkit.port.values import CACHE_NAMES


def layer_states(program, functions: dict) -> None:
    """`cache.states[layer_idx]` is `cache.get_recurrent_states(n)`, the loop that copies into its elements updates them."""
    for folded in functions.values():
        counts = _counts(program, folded.file)
        if counts:
            folded.node = ast.fix_missing_locations(_Use(counts).visit(folded.node))


def _counts(program, path: str) -> dict[str, int]:
    """Attribute -> how many arrays of zeros the cache class of a file keeps in it for each layer."""
    found = {}
    for name, definition in program.file(path).definitions.items():
        if not (isinstance(definition, ast.ClassDef) and name.endswith("Cache")):
            continue
        for node in ast.walk(definition):
            target = node.targets[0] if isinstance(node, ast.Assign) and node.targets else None
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and isinstance(node.value, ast.DictComp):
                value, generator = node.value.value, node.value.generators[0]
                over_layers = isinstance(generator.iter, ast.Call) and ast.unparse(generator.iter.func) == "range" and "layers" in ast.unparse(generator.iter)
                zeros = isinstance(value, ast.Tuple) and all(isinstance(e, ast.Call) and ast.unparse(e.func) == "torch.zeros" for e in value.elts)
                if over_layers and zeros:
                    found[target.attr] = len(value.elts)
    return found


class _Use(ast.NodeTransformer):
    def __init__(self, counts):
        self.counts = counts

    def _layer(self, node):
        """(cache, count) of `cache.states[layer_idx]`."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr in self.counts:
            if ast.unparse(node.value.value) in CACHE_NAMES:
                return ast.unparse(node.value.value), self.counts[node.value.attr]
        return None

    def visit_Call(self, node):
        if ast.unparse(node.func) == "len" and node.args and (found := self._layer(node.args[0])):
            return ast.copy_location(ast.Constant(found[1]), node)
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "copy_" and isinstance(func.value, ast.Subscript) and (found := self._layer(func.value.value)):
            update = ast.parse(f"{found[0]}.update_recurrent_state(None, state_idx={ast.unparse(func.value.slice)})", mode="eval").body
            update.args = [self.visit(node.args[0])]
            return ast.copy_location(update, node)
        return self.generic_visit(node)

    def visit_Subscript(self, node):
        found = self._layer(node)
        if found is None or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return ast.copy_location(ast.parse(f"{found[0]}.get_recurrent_states({found[1]})", mode="eval").body, node)
