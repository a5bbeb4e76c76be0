"""Emit: classes of the slice, their constructors and their calls."""

import ast

from labkit.port.construct import InitRewriter, numpy_text
from labkit.port.program import Symbol
from labkit.port.trim import names_in
from labkit.port.values import CACHE_NAMES


class EmitClasses:
    """The class methods of the emitter."""

    def class_lines(self, symbol: Symbol) -> list[str]:
        program, functions = self.t.program, self.t.functions
        node = program.node(symbol)
        level = self.t.spine.keys.get(symbol.key)
        index = self.t.spine.levels.index(level) if level else None
        if level is not None and index + 1 < len(self.t.spine.levels):
            base = self.t.spine.levels[index + 1].symbol.name
        else:
            base = self._base(symbol)
        lines = [f"class {symbol.name}({base}):" if base else f"class {symbol.name}:", f"    {self.cite(symbol.file, node.lineno, node)}", ""]
        lines += self.class_values(node)
        own = [functions[k] for k in self.reached if functions[k].file == symbol.file and functions[k].cls == symbol.name]
        own.sort(key=lambda f: (f.node.name != "__init__", f.original.lineno))
        if not any(f.node.name == "__init__" for f in own) and level is not None:
            for inherited in self._init_keys(symbol):
                own.insert(0, functions[inherited])
        forward_done = False
        bodies = []
        for folded in own:
            if folded.node.name == "__init__" and f"{symbol.file}::{symbol.name}" in self.t.ropes:
                continue
            elif folded.node.name == "__init__":
                bodies.append(("__init__", self.init_lines(folded, symbol, level)))
            elif folded.node.name == "forward" and not base:
                bodies.append(("forward", self.function(folded, "    ")))
            elif folded.node.name == "forward":
                forward_done = True
                bodies.append(("forward", self.forward_lines(folded, level)))
            else:
                bodies.append((folded.node.name, self.function(folded, "    ")))
        if level is not None and not forward_done and self.t.forward_key(level) in functions:
            key = self.t.forward_key(level)
            bodies.append(("forward", self.forward_lines(functions[key], level)))
        inits = [b for n, b in bodies if n == "__init__"]
        key = f"{symbol.file}::{symbol.name}"
        if key in self.t.ropes:
            params = [p for p in (functions[self._init_keys(symbol)[0]].parameters if self._init_keys(symbol) else [])]
            inits = [
                [
                    f"    def __init__(self, {', '.join(p if p == 'config' else f'{p}=None' for p in params) or 'config'}, *, build):",
                    "        self.config = config",
                    *self.rope_attributes(symbol),
                ]
            ]
        elif key in self.t.uses_config and inits and not any("self.config = config" in line for line in inits[0]) and "config" in inits[0][0]:
            inits[0].insert(1, "        self.config = config")
        rest = [b for n, b in bodies if n != "__init__"]
        for body in [*inits, *rest]:
            lines += [*body, ""]
        if level is not None and index == 0:
            lines += self.cache_lines()
        if len(lines) == 3:
            lines.append("    pass")
        return lines

    def class_values(self, node) -> list[str]:
        """Plain values of a class's body that the emitted code reads as attributes."""
        if not hasattr(self, "_read"):
            self._read = {
                n.attr for k in self.reached for n in ast.walk(self.t.functions[k].node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            }
        found = {}
        for statement in node.body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
            value = getattr(statement, "value", None)
            if isinstance(target, ast.Name) and target.id in self._read and isinstance(value, ast.Constant) and isinstance(value.value, (str, int, float)):
                found[target.id] = value.value
        return [*(f"    {name} = {value!r}" for name, value in found.items()), *([""] if found else [])]

    def _base(self, symbol) -> str:
        for base in self.t.program.bases(symbol.file, symbol.name):
            if any(self.t.functions[k].file == base.file and self.t.functions[k].cls == base.name for k in self.reached):
                return base.name
        names = {b.split(".")[-1] for b in self.t.program.base_names(symbol.file, symbol.name)}
        if "Function" in names:
            return ""
        for kind in ("Embedding", "Linear", "LayerNorm", "Conv1d"):
            if kind in names:
                alias = {"Embedding": "Embedding", "Linear": "Linear", "LayerNorm": "LayerNorm", "Conv1d": "Conv1d"}[kind]
                return self.t.needs.use("labkit.layers.torch_modules", alias)
        return "nnx.Module"

    def init_lines(self, folded, symbol, level) -> list[str]:
        rewriter = InitRewriter(self.t, folded)
        signature = self.signature(folded, "build")
        body = self.guarded(f"{symbol.name}.__init__", lambda: rewriter.block(folded.node.body, "        "))
        body = [numpy_text(line) for line in body]
        return [f"    def __init__(self, {signature}):", *([] if body == ["        pass"] else body)] + (["        pass"] if body == ["        pass"] else [])

    def forward_lines(self, folded, level) -> list[str]:
        key = f"{folded.file}::{folded.cls}"
        if level is None:
            first = []
            if key in self.t.ropes:
                first = self.rope_lines(folded)
            return self.function(folded, "    ", "__call__", first)
        if level.path == "":
            return self.entry_lines(folded)
        if not set(folded.parameters) & CACHE_NAMES:
            folded.parameters = [*folded.parameters, "cache"]
            folded.extras.setdefault("cache", None)
            self.t._locals.pop(folded.key, None)
        return self.function(folded, "    ", "decode")

    def rope_attributes(self, symbol) -> list[str]:
        """What the constructor of a rope class sets besides the tables, where other code reads it."""
        keys = [k for k in self._init_keys(symbol) if k in self.t.functions]
        read = {
            n.attr for key in self.reached - set(keys) for n in ast.walk(self.t.functions[key].node)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            and (ast.unparse(n.value) != "self" or self.t.functions[key].cls == symbol.name)
        }  # fmt: skip
        read -= {"config", "inv_freq", "original_inv_freq", "attention_scaling", "rope_type", "max_seq_len_cached", "original_max_seq_len"}
        lines = []
        for key in keys:
            rewriter = InitRewriter(self.t, self.t.functions[key])
            for statement in _about(self.t.functions[key].original.body, {f"self.{name}" for name in read}):
                lines += [numpy_text(line) for line in rewriter.statement(statement, "        ")]
        return lines

    def rope_lines(self, folded) -> list[str]:
        function = self.t.needs.use("labkit.layers.rope_types", "rope_init")
        found = self.t.program.method(folded.file, folded.cls, "compute_default_rope_parameters")
        default = ", default=self.compute_default_rope_parameters" if found else ""
        typed = ", layer_type=layer_type" if "layer_type" in folded.parameters else ""
        positions = next((p for p in folded.parameters if "position" in p), "None")
        config = "self.config"
        if typed and "per_layer_config" in ast.unparse(self.t.program.method(folded.file, folded.cls, "__init__")[1]):
            self.t.config_attributes.setdefault("per_layer_config", None)
            config = "self.config.layer_configs[layer_type]"
        return [f"        inv_freq, attention_scaling = {function}({config}, {positions}{default}{typed})"]


def _about(body, wanted: set[str]) -> list:
    """The statements that give these names and attributes, or elements of them, a value, and what they read, in the loops around them."""
    kept = []
    for statement in reversed(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if target is not None and ast.unparse(target.value if isinstance(target, ast.Subscript) else target) in wanted:
            wanted |= names_in(statement.value)
            kept.insert(0, statement)
        elif isinstance(statement, ast.For):
            inner = _about(statement.body, wanted)
            if any(isinstance(s, ast.Assign) for s in inner):
                wanted |= {ast.unparse(statement.iter)}
                kept.insert(0, ast.copy_location(ast.For(statement.target, statement.iter, inner, []), statement))
        elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue):
            wanted |= names_in(statement.test)
            kept.insert(0, statement)
    return kept
