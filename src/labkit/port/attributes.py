"""Translate: `x.name`. dtypes, constants and activations by name, parameters and buffers as `read(...)` in torch's orientation."""

import ast
import re

from labkit.layers.activations import ACTIVATIONS
from labkit.port.dtypes import DTYPES, WIDE_DTYPES


class Attributes:
    """Mixin of the rewriter."""

    def x_Attribute(self, node):
        text = ast.unparse(node)
        if text in WIDE_DTYPES or text in DTYPES:
            return self.dtype(node)
        if text in ("torch.inf", "torch.nan", "torch.pi", "math.inf", "math.pi", "math.nan"):
            return f"jnp.{node.attr}"
        if text.startswith(("F.", "nn.functional.", "torch.nn.functional.")) and node.attr in ACTIVATIONS:
            return f"{self.use('labkit.layers.activations', 'activation')}({node.attr!r})"
        if node.attr == "dtype" and isinstance(node.value, ast.Attribute) and self.facts.is_parameter(node.value) and not self.numpy:
            tied = self.t.tied_head(self, node.value.value)
            owner = f"{self.use('labkit.layers.building', 'read')}(self.{tied}.embedding)" if tied is not None else self.expr(node.value)
            return f"{owner.removesuffix('.T')}.dtype"
        special = self.t.attribute(self, node)
        if special is not None:
            return special
        if node.attr in ("mT", "mH"):
            return f"{self.expr(node.value)}.swapaxes(-1, -2)"
        if node.attr == "data" and self.is_array(node.value):
            return self.expr(node.value)
        if node.attr == "device":
            return "None"
        if node.attr in ("values", "indices") and self.facts.is_a(node.value, "tuple", "other"):
            return f"{self.expr(node.value)}[{('values', 'indices').index(node.attr)}]"
        if not self.numpy and not self.facts.is_parameter(node.value) and (self.facts.is_parameter(node) or self._unseen_parameter(node)):
            return self.read(node)
        text = self.expr(node.value)
        return text.removesuffix(".T") if node.attr == "T" and text.endswith(".T") else f"{text}.{node.attr}"

    def _unseen_parameter(self, node) -> bool:
        """`self.dense.weight` where no run came by: the owner is a module of torch.nn."""
        owner = node.value
        if node.attr not in ("weight", "bias") or self.facts.ran(node) or self.folded.cls is None:
            return False
        if not (isinstance(owner, ast.Attribute) and ast.unparse(owner.value) == "self"):
            return False
        kinds = self.facts.attribute(self.folded.file, self.folded.cls, owner.attr).get("kinds", [])
        return any(k.startswith("module:") for k in kinds)

    def read(self, node) -> str:
        """The array of a parameter or buffer that a module owns, in torch's orientation."""
        read = self.use("labkit.layers.building", "read")
        owner = self.expr(node.value)
        modules = self.facts.modules(node.value)
        if not modules and isinstance(node.value, ast.Attribute) and self.folded.cls is not None:
            kinds = self.facts.attribute(self.folded.file, self.folded.cls, node.value.attr).get("kinds", [])
            modules = [k.partition(":")[2] for k in kinds if k.startswith("module:")]
        kind = self.t.builtin_module(modules)
        names = {"Embedding": {"weight": "embedding"}, "Linear": {"weight": "kernel"}, "Conv1D": {"weight": "kernel"}}
        name = names.get(kind, {}).get(node.attr, node.attr)
        text = f"{read}({owner}.{name})"
        return f"{text}.T" if kind == "Linear" and node.attr == "weight" else text

    def held(self, node) -> str | None:
        """The variable of a parameter that a module owns."""
        match = re.fullmatch(r"\w+\(([\w.]+)\)(?:\.T)?", self.read(node))
        return match[1] if match else None
