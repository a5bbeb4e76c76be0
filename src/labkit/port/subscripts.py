"""Translate: `x[...]`. Places are kept as they are written; a boolean mask is refused, and every k-th element of the last axis has a function."""

import ast

from labkit.port.refusal import CannotTranslate


class Subscripts:
    """Mixin of the rewriter."""

    def x_Slice(self, node):
        parts = [self.expr(p) if p is not None else "" for p in (node.lower, node.upper)]
        return ":".join(parts) + (f":{self.expr(node.step)}" if node.step is not None else "")

    def index(self, node) -> str:
        if isinstance(node, ast.Tuple):
            return ", ".join(self.expr(e) for e in node.elts) + ("," if len(node.elts) == 1 else "")
        if isinstance(node, ast.List):
            return f"jnp.asarray({self.expr(node)})"
        return self.expr(node)

    def x_Subscript(self, node):
        if self.is_array(node.value) and self._boolean_index(node.slice):
            raise CannotTranslate("indexing by a boolean mask: the result's shape depends on values", node, "write it with jnp.where over the whole array")
        if isinstance(node.value, ast.Name) and self.t.is_external(self.folded, node.value, "ACT2FN"):
            return f"{self.use('labkit.layers.activations', 'activation')}({self.expr(node.slice)})"
        strided = self._every(node)
        if strided is not None:
            return strided
        text = f"{self.expr(node.value)}[{self.index(node.slice)}]"
        stop, axes = getattr(node, "prefix", (None, ()))
        for axis in axes:
            text = f"{self.use('labkit.layers.loops', 'prefix')}({text}, {self.renames.get(stop, stop)}{'' if axis == -1 else f', axis={axis}'})"
        return text

    def _every(self, node) -> str | None:
        """`x[..., 1::2]` of an array that is traced: the function whose gradient compiles (`layers.functional.every`)."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        last = parts[-1]
        if self.numpy or not (isinstance(last, ast.Slice) and isinstance(last.step, ast.Constant) and last.upper is None and self.is_array(node.value)):
            return None
        start = 0 if last.lower is None else last.lower.value if isinstance(last.lower, ast.Constant) else -1
        whole = [isinstance(part, ast.Slice) and ast.unparse(part) == ":" for part in parts[:-1]]
        is_last = (all(whole) and len(parts) == self.facts.rank(node.value)) or (len(parts) == 2 and ast.unparse(parts[0]) == "...")
        if not is_last or not isinstance(last.step.value, int) or not 0 <= start < last.step.value:
            return None
        return f"{self.helper('every')}({self.expr(node.value)}, {last.step.value}{f', {start}' if start else ''})"

    def _boolean_index(self, node) -> bool:
        elements = node.elts if isinstance(node, ast.Tuple) else [node]
        return any(self.facts.is_array(e) and self.facts.dtype(e) == "b" for e in elements)
