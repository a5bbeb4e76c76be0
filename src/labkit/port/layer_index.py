"""Plan: modules of a stack do not know their layer's index: where they pick a layer's part of an array by it, or ask whether it is a certain one, the layer's
handle knows it."""

import ast

from labkit.port.cache_paths import cache_of, give_cache
from labkit.port.program import Symbol


def index_from_handle(program, functions: dict, spine) -> list[str]:
    """Replace `x[..., self.layer_idx]` by `cache.index` and `self.layer_idx == 0` by `cache.layer_idx == 0`. Returns the labels that keep layers apart for
    which such tests differ."""
    if spine.layers is None:
        return []
    labels, wanting = [], []
    holders = _holders(program, functions, spine)
    for folded in functions.values():
        attributes = holders.get((folded.file, folded.cls), set())
        if not attributes or folded.node.name == "__init__":
            continue
        use = _Use(attributes, cache_of(folded) or "cache")
        use.visit(folded.node)
        if use.found:
            wanting.append(folded)
            labels += [label for label in use.labels if label not in labels]
    give_cache(functions, wanting)
    return labels


def _holders(program, functions, spine) -> dict:
    """(file, class) -> attributes that hold the index, from the constructor of the layer list on down."""
    found: dict = {}
    last = spine.last.symbol
    init = program.method(last.file, last.name, "__init__")
    open_ = []
    for node in ast.walk(init[1]) if init else ():
        if isinstance(node, ast.ListComp) and isinstance(node.elt, ast.Call) and isinstance(node.generators[0].target, ast.Name):
            open_ += _passed(program, last.file, node.elt, {node.generators[0].target.id})
    while open_:
        symbol, parameter = open_.pop()
        method = program.method(symbol.file, symbol.name, "__init__")
        if method is None:
            continue
        for node in ast.walk(method[1]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == parameter:
                found.setdefault((symbol.file, symbol.name), set()).add(node.targets[0].attr)
            elif isinstance(node, ast.Call):
                open_ += _passed(program, symbol.file, node, {parameter})
    return found


def _passed(program, path, call, names) -> list:
    """(class, parameter) pairs to which a constructor call passes one of the names as it is."""
    if not isinstance(call.func, ast.Name):
        return []
    symbol = program.resolve(path, call.func.id)
    method = program.method(symbol.file, symbol.name, "__init__") if symbol.kind == "class" else None
    if method is None:
        return []
    parameters = [a.arg for a in method[1].args.args[1:]]
    given = [*zip(parameters, call.args), *((k.arg, k.value) for k in call.keywords)]
    return [(Symbol("class", symbol.file, symbol.name), p) for p, value in given if isinstance(value, ast.Name) and value.id in names]


class _Use(ast.NodeTransformer):
    def __init__(self, attributes, cache: str):
        self.attributes, self.cache, self.found, self.labels = attributes, cache, False, []

    def _is_index(self, node) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in self.attributes and ast.unparse(node.value) == "self"

    def _handle(self, attribute: str, node):
        self.found = True
        return ast.copy_location(ast.parse(f"{self.cache}.{attribute}", mode="eval").body, node)

    def visit_Subscript(self, node):
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        if any(isinstance(p, ast.Slice) for p in parts):
            node.slice.elts = [self._handle("index", p) if self._is_index(p) else p for p in parts]
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        if self._is_index(node.left) and isinstance(node.comparators[0], ast.Constant) and len(node.ops) == 1:
            label = ast.unparse(node).replace(ast.unparse(node.left), "layer_idx")
            self.labels.append(label)
            node.left = self._handle("layer_idx", node.left)
        return node
