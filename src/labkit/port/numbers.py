"""Translate: Python numbers that meet arrays. torch multiplies a bfloat16 array by a number in float32 and rounds once; jax rounds the number first."""

import ast
import math

from labkit.port.dtypes import WIDE_DTYPES

_NARROWING = {"to", "type", "type_as", "half", "bfloat16"}
_MADE = {"zeros", "ones", "full", "rand", "randn", "linspace", "eye", "empty"}


class Numbers:
    """Mixin of the rewriter."""

    def by_number(self, node: ast.BinOp, left: str, right: str) -> str | None:
        """`scaled(x, number)` or `divided(x, number)`; None where the number is exact in bfloat16, or the array is in at least float32 anyway."""
        pairs = [(node.left, left, node.right, right)]
        pairs += [(node.right, right, node.left, left)] if isinstance(node.op, ast.Mult) else []
        if self.numpy or not isinstance(node.op, ast.Mult | ast.Div):
            return None
        for array, text, number, other in pairs:
            narrow = self.facts.is_array(array) and self.facts.dtype(array) == "f" and self.facts.rank(array) != 0 and not self.surely_wide(array)
            if narrow and self.number(number) == "float" and not _exact(number):
                return f"{self.helper('scaled' if isinstance(node.op, ast.Mult) else 'divided')}({_bare(text)}, {_bare(other)})"
        return None

    def surely_wide(self, node, depth: int = 0) -> bool:
        """What the function itself does to the value leaves it in at least float32: cast there, made there, or met by such a value since."""
        if depth > 40:
            return False
        wide = lambda inner: self.surely_wide(inner, depth + 1)
        if isinstance(node, ast.Call):
            if any(ast.unparse(k.value) in WIDE_DTYPES for k in node.keywords if k.arg == "dtype"):
                return True
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in ("float", "double") or name in _NARROWING and any(ast.unparse(a) in WIDE_DTYPES for a in node.args):
                return True
            if name in _NARROWING or getattr(node, "callees", None) or any(k.arg == "dtype" for k in node.keywords):
                return False
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch" and name in _MADE:
                return True
            receiver = [node.func.value] if name and self.facts.is_array(node.func.value) else []
            return any(map(wide, [*receiver, *node.args]))
        if isinstance(node, ast.BinOp):
            return wide(node.left) or wide(node.right)
        if isinstance(node, ast.UnaryOp):
            return wide(node.operand)
        if isinstance(node, ast.Subscript) or isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "real", "imag"):
            return wide(node.value)
        if isinstance(node, ast.Tuple | ast.List):
            return any(map(wide, node.elts))
        if isinstance(node, ast.IfExp):
            return wide(node.body) and wide(node.orelse)
        if isinstance(node, ast.Name):
            value = self._last_value(node)
            return value is not None and wide(value)
        return False

    def _last_value(self, name: ast.Name):
        """What the last assignment above gives to a name."""
        line, found = getattr(name, "lineno", 0), None
        for statement in ast.walk(self.folded.node):
            if not isinstance(statement, ast.Assign) or not statement.lineno < line or found is not None and statement.lineno <= found.lineno:
                continue
            targets = [e for t in statement.targets for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
            if any(isinstance(t, ast.Name) and t.id == name.id for t in targets):
                found = statement
        return found and found.value


def _exact(node) -> bool:
    """A literal that bfloat16 holds as it is: few bits, as powers of two have."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return not math.isfinite(value) or (math.frexp(value)[0] * 256).is_integer()


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and index < len(text) - 1:
            return text
    return text[1:-1]
