"""What the record knows of a syntax node: the kinds of its values, the truth of a test, who was called."""

import ast

from labkit.port.program import node_key

ARRAYS = ("array", "param", "buffer")


class Facts:
    """Look-ups in a source record by syntax node. A node that the translator made itself has no facts."""

    def __init__(self, record):
        self.record = record

    def _at(self, node):
        origin = getattr(node, "origin", None)
        if origin is None and hasattr(node, "lineno") and hasattr(node, "file"):
            origin = (node.file, node_key(node))
        return origin

    def _get(self, table, node, default):
        origin = self._at(node)
        return default if origin is None else table.get(origin[0], {}).get(origin[1], default)

    def kinds(self, node) -> tuple[str, ...]:
        return tuple(self._get(self.record.nodes, node, ()))

    def ran(self, node) -> bool:
        """Whether any run evaluated the expression."""
        return bool(self.kinds(node))

    def is_array(self, node) -> bool:
        """Every value seen was an array (None aside)."""
        kinds = [k for k in self.kinds(node) if k != "none"]
        return bool(kinds) and all(k.split(":")[0] in ARRAYS for k in kinds)

    def may_be_array(self, node) -> bool:
        return any(k.split(":")[0] in ARRAYS for k in self.kinds(node))

    def is_parameter(self, node) -> bool:
        """A Parameter or a buffer of a module."""
        return any(k.split(":")[0] in ("param", "buffer") for k in self.kinds(node))

    def dtype(self, node) -> str | None:
        """ "f", "i", "b" or "c" when every array seen had it."""
        found = {k.split(":")[1] for k in self.kinds(node) if k.split(":")[0] in ARRAYS}
        return found.pop() if len(found) == 1 else None

    def rank(self, node) -> int | None:
        found = {k.split(":")[2] for k in self.kinds(node) if k.split(":")[0] in ARRAYS}
        return int(found.pop()) if len(found) == 1 else None

    def modules(self, node) -> list[str]:
        """Names of the module classes seen."""
        return [k.split(":", 1)[1] for k in self.kinds(node) if k.startswith("module:")]

    def is_a(self, node, *kinds: str) -> bool:
        """Every value seen was of one of these kinds (compared by the part before the colon)."""
        seen = self.kinds(node)
        return bool(seen) and all(k.split(":")[0] in kinds for k in seen)

    def truths(self, node) -> tuple[bool, ...]:
        return tuple(self._get(self.record.tests, node, ()))

    def constant(self, node):
        """(True, value) when the expression had one plain value in every run."""
        origin = self._at(node)
        table = getattr(self.record, "constants", {}).get(origin[0], {}) if origin else {}
        return (True, table[origin[1]]) if origin and origin[1] in table else (False, None)

    def callees(self, node: ast.Call) -> tuple[str, ...]:
        return tuple(self._get(self.record.callees, node, ()))

    def calls(self, path: str, qualname: str) -> int:
        return self.record.functions.get(path, {}).get(qualname, 0)

    def attribute(self, path: str, cls: str, name: str) -> dict:
        """What the record holds of an attribute of a class: kinds, values, tensors; empty when no run saw it."""
        return self.record.attributes.get(f"{path}::{cls}", {}).get(name, {})
