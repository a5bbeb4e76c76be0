"""Emit: the modeling file of a slice, definitions in the reference's order, imports that are used, formatted."""

import ast
import subprocess
import sys

from labkit.port.construct import InitRewriter, numpy_text
from labkit.port.docstrings import first_sentence
from labkit.port.emit_classes import EmitClasses
from labkit.port.emit_config import EmitConfig
from labkit.port.emit_entry import EmitEntry
from labkit.port.program import Symbol
from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Rewriter
from labkit.port.trim import names_in
from labkit.port.values import Folded


def emit_modeling(context, model_type: str, tree, entry_key: str):
    """(text, refusals)."""
    emitter = Emitter(context, model_type, tree, entry_key)
    return emitter.text(), emitter.refusals


class Emitter(EmitClasses, EmitEntry, EmitConfig):
    def __init__(self, context, model_type, tree, entry_key):
        self.t, self.model_type, self.tree, self.entry_key = context, model_type, tree, entry_key
        self.refusals = []
        self.maker: list[str] = []
        context.layer_maker = self.layer_maker
        context.axes = self.axes
        self.reached = self._reached()
        self.numpy_only = context.numpy_only = self._constructed_only()

    def _reached(self) -> set[str]:
        """Functions that the emitted code still calls."""
        functions = self.t.functions
        seen, wanted = set(), [self.entry_key, *self._init_keys(self.t.program.entry)]
        wanted += [k for k in functions if k.endswith(".compute_default_rope_parameters")]
        while wanted:
            key = wanted.pop()
            if key in seen or key not in functions:
                continue
            seen.add(key)
            folded = functions[key]
            if self.t.known(folded) is not None:
                continue
            for node in ast.walk(folded.node):
                if isinstance(node, ast.Call):
                    wanted += getattr(node, "callees", [])
                elif isinstance(node, ast.Name) and node.id in self.t.program.file(folded.file).definitions and node.id not in self.t.local_names(folded):
                    wanted.append(f"{folded.file}::{node.id}")
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self" and folded.cls:
                    found = self.t.program.method(folded.file, folded.cls, node.attr)
                    if found:
                        wanted.append(f"{found[0].key}.{node.attr}")
        return seen

    def _init_keys(self, symbol):
        found = self.t.program.method(symbol.file, symbol.name, "__init__")
        return [f"{found[0].key}.__init__"] if found else []

    def _constructed_only(self) -> set[str]:
        """Functions that only constructors call: their arrays are numpy's."""
        functions = self.t.functions
        forward = set()
        wanted = [k for k in self.reached if k.partition("::")[2].split(".")[-1] == "forward"]
        while wanted:
            key = wanted.pop()
            if key in forward or key not in functions or key.endswith("__init__"):
                continue
            forward.add(key)
            for node in ast.walk(functions[key].node):
                if isinstance(node, ast.Call):
                    wanted += getattr(node, "callees", [])
        return {k for k in self.reached if k not in forward and not k.endswith("__init__")}

    def axes(self, folded, attribute, raw: bool = False):
        """Logical axes of a linear layer's kernel, or of a raw parameter, from the reference's parallel plan and the shapes of the first recorded model."""
        from labkit.port.shard_axes import axes_for

        if f"{folded.file}::{folded.cls}" in self.t.local_experts and raw:
            return self._expert_axes(self.t.local_experts[f"{folded.file}::{folded.cls}"], attribute)
        modules, state, config = (getattr(self.t.facts.record, n)[0] for n in ("modules", "state", "config"))
        hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0
        for path, cls in modules.items():
            child = f"{path}.{attribute}".lstrip(".")
            if raw and cls.startswith(f"{folded.file}::{folded.cls}") and child in state:
                shape = tuple(state[child][1])
                return axes_for(child, shape, hidden, config.get("vocab_size") or 0, self.t.parallel_plan, linear=False) if len(shape) > 1 else None
            if cls.startswith(f"{folded.file}::{folded.cls}") and f"{child}.weight" in state:
                shape = tuple(state[f"{child}.weight"][1])
                if len(shape) == 2:
                    return axes_for(child, shape[::-1], hidden, config.get("vocab_size") or 0, self.t.parallel_plan)
        return None

    def _expert_axes(self, local, attribute):
        """Those of a parameter with one matrix or bias per expert, from the first recorded model that has it."""
        from labkit.port.local_experts import local_experts_of
        from labkit.port.shard_axes import expert_axes

        record = self.t.facts.record
        for modules, state, config in zip(record.modules, record.state, record.config):
            hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0
            for path, cls in modules.items():
                if f"{path}.{attribute}" in state and local_experts_of(self.t, cls) is local:
                    return expert_axes(f"{path}.{attribute}", tuple(state[f"{path}.{attribute}"][1]), hidden, self.t.parallel_plan)
        return None

    def text(self) -> str:
        blocks = []
        symbols = self._symbols()
        for symbol in symbols:
            blocks.append(self.definition(symbol))
        before, extra = [], []
        done = {s.name for s in symbols}
        pending = [s for s in self.t.globals.values() if s.kind == "value" and s.name not in done]
        for symbol in pending:
            text = self.module_value(symbol)
            (extra if names_in(ast.parse(text)) & done else before).append(text)
        config = self.config_text()
        body = "\n\n\n".join([config, self.sharding_text(), *self._maker_text(), *before, *blocks, *extra, self.create_text()])
        imports = self.imports()
        head = self.head(body)
        return tidy("\n".join([*head, *imports, "", "", body, ""]))

    def head(self, body: str) -> list[str]:
        """The file's docstring: where it comes from and what is unusual."""
        from labkit.port.unusual import unusual

        self.t.unusual = unusual(self.t, body)
        lines = [f'"""{self.model_type}, translated from transformers {_version()} `{self.tree.file.relative_to(self.t.program.folder).as_posix()}`.', ""]
        lines += ["Unusual: " + "; ".join(self.t.unusual) + "." if self.t.unusual else "Unusual: nothing that the translator looks for."]
        return [*lines, '"""', ""]

    def _symbols(self) -> list[Symbol]:
        found = {}
        for key in self.reached:
            folded = self.t.functions[key]
            if folded.cls is None:
                if self.t.known(folded) is None:
                    found[f"{folded.file}::{folded.node.name}"] = (folded.file, folded.original.lineno, Symbol("function", folded.file, folded.node.name))
            else:
                found[f"{folded.file}::{folded.cls}"] = (
                    folded.file,
                    self.t.program.node(Symbol("class", folded.file, folded.cls)).lineno,
                    Symbol("class", folded.file, folded.cls),
                )
        for modules in self.t.facts.record.modules:
            for cls in modules.values():
                if "::" in cls and not cls.startswith("external::") and cls not in found:
                    path, _, name = cls.partition("::")
                    if any(k.startswith(f"{b.key}.") for b in self.t.program.bases(path, name) for k in self.reached):
                        symbol = Symbol("class", path, name)
                        found[cls] = (path, self.t.program.node(symbol).lineno, symbol)
        entry = self.t.program.entry
        found.setdefault(entry.key, (entry.file, self.t.program.node(entry).lineno, entry))
        ordered = sorted(found.values(), key=lambda item: (item[0] == entry.file, item[0], item[1]))
        spine = {lv.symbol.key for lv in self.t.spine.levels}
        plain = [s for _, _, s in ordered if s.key not in spine]
        return plain + [lv.symbol for lv in reversed(self.t.spine.levels)]

    def guarded(self, component, lines_of, indent="        "):
        try:
            return lines_of()
        except CannotTranslate as refused:
            from labkit.port.translate import Refusal

            self.refusals.append(Refusal(refused.construct, refused.where, component, refused.advice))
            return [f'{indent}raise NotImplementedError("{refused.construct} ({refused.where})")'.replace("\n", " ")]

    def definition(self, symbol: Symbol) -> str:
        if symbol.kind == "function":
            return "\n".join(self.function(self.t.functions[symbol.key], ""))
        return "\n".join(self.class_lines(symbol))

    def cite(self, file, line, node=None) -> str:
        """The docstring of what is emitted: the first sentence of the reference's, and where it stands."""
        first = first_sentence(ast.get_docstring(node) or "") if node is not None else ""
        plain = first and len(first) < 110 and '"' not in first and "\\" not in first
        return f'"""{first} {file}:{line}."""' if plain else f'"""{file}:{line}."""'

    def signature(self, folded, extra="") -> str:
        args = folded.original.args
        positional = [*args.posonlyargs, *args.args]
        defaults = dict(zip([a.arg for a in positional[len(positional) - len(args.defaults) :]], args.defaults))
        defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None}
        parts, star, optional = [], False, False
        kwonly = {a.arg for a in args.kwonlyargs}
        for name in folded.parameters:
            if name in kwonly and not star:
                parts.append("*")
                star = True
            if name in defaults or name in folded.extras:
                value = ast.unparse(defaults[name]) if name in defaults else self.extra_default(folded, name, set())
                value = value if "torch" not in value else "None"
                parts.append(f"{name}={value}")
                optional = True
            else:
                parts.append(f"{name}=None" if optional and not star else name)
        if self.t.takes_dtype(folded):
            parts += ([] if star else ["*"]) + ["dtype"]
            star = True
        if extra:
            parts += ([] if star else ["*"]) + [extra]
        if any(len(t) > 1 for t in self._calls_to(folded)) and args.kwarg:
            parts.append("**_")
        return ", ".join(parts)

    def extra_default(self, folded, name: str, seen: set) -> str:
        """What a keyword that goes through **kwargs is where nobody gives it: the default of the function that takes it in the end."""
        for key in sorted(folded.callees - seen):
            target = self.t.functions.get(key)
            if target is None:
                continue
            args = target.original.args
            positional = [*args.posonlyargs, *args.args]
            defaults = dict(zip([a.arg for a in positional[len(positional) - len(args.defaults) :]], args.defaults))
            defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None}
            if name in defaults and name in target.parameters:
                return ast.unparse(defaults[name])
            if name in target.extras and (found := self.extra_default(target, name, seen | {key})) != "None":
                return found
        return "None"

    def _calls_to(self, folded):
        for other in self.t.functions.values():
            for node in ast.walk(other.node):
                if isinstance(node, ast.Call) and folded.key in getattr(node, "callees", []):
                    yield node.callees

    def function(self, folded, indent, name=None, first=None) -> list[str]:
        numpy = folded.key in self.numpy_only
        wide = None
        if numpy:
            static = any(ast.unparse(d) == "staticmethod" for d in folded.original.decorator_list)
            wide = "wide_dtype(config.dtype)" if "config" in folded.parameters else "np.float64"
            if wide == "np.float64" and not static and self.t.keeps_config(folded):
                wide = "wide_dtype(self.config.dtype)"
            self.t.needs.use("labkit.layers.precision", "wide_dtype")
        builds = self.t.constructs(folded.key)
        rewriter = InitRewriter(self.t, folded) if builds else Rewriter(self.t, folded, numpy=numpy, wide=wide)
        static = any(ast.unparse(d) == "staticmethod" for d in folded.original.decorator_list)
        prop = any(ast.unparse(d) == "property" for d in folded.original.decorator_list)
        own = ["self"] if folded.cls and not static else []
        signature = ", ".join([*own, *filter(None, [self.signature(folded, "build" if builds else "")])])
        component = folded.key.partition("::")[2]
        body = self.guarded(component, lambda: [*(first or []), *rewriter.block(folded.node.body, indent + "    ")], indent + "    ")
        if numpy:
            body = [numpy_text(line) for line in body]
        lines = [f"{indent}@staticmethod"] if static else [f"{indent}@property"] if prop else []
        if name == "__call__" and f"{folded.file}::{folded.cls}" in self.t.local_experts:
            lines = [f"{indent}@{self.t.needs.use('labkit.layers.moe', 'on_local_experts')}"]
        lines.append(f"{indent}def {name or folded.node.name}({signature}):")
        lines.append(f"{indent}    {self.cite(folded.file, folded.original.lineno, folded.original)}")
        return lines + body

    def module_value(self, symbol) -> str:
        """A table or number of module level."""
        node = self.t.program.node(symbol)
        nowhere = ast.parse(f"def {symbol.name}():\n    pass").body[0]
        folded = Folded(f"{symbol.key}", nowhere, nowhere, symbol.file, None)
        folded.parameters = []
        try:
            return numpy_text(f"{symbol.name} = {InitRewriter(self.t, folded).expr(node.value)}")
        except CannotTranslate:
            return ast.unparse(node)

    def imports(self) -> list[str]:
        lines = [
            "import dataclasses",
            "from collections.abc import Mapping",
            "from typing import ClassVar",
            "",
            "import jax",
            "import jax.numpy as jnp",
            "import numpy as np",
            "from flax import nnx",
            "",
        ]
        for (module, name), alias in sorted(self.t.needs.names.items()):
            if module == "":
                lines.insert(0, f"import {name}" if name not in ("np",) else "import numpy as np")
            else:
                lines.append(f"from {module} import {name}" + (f" as {alias}" if alias != name else ""))
        return lines


def _version() -> str:
    from importlib.metadata import version

    return version("transformers")


def tidy(text: str) -> str:
    """Leftovers removed, unused imports and names removed, formatted by ruff."""
    from labkit.port.leftovers import remove_leftovers

    text = remove_leftovers(text)
    base = [sys.executable, "-m", "ruff"]
    fixed = subprocess.run(
        [*base, "check", "--isolated", "--quiet", "--fix-only", "--select", "F401,F811,I,UP034", "--stdin-filename", "slice.py", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    text = fixed.stdout or text
    formatted = subprocess.run(
        [*base, "format", "--isolated", "--quiet", "--line-length", "160", "--stdin-filename", "slice.py", "-"], input=text, capture_output=True, text=True
    )
    return formatted.stdout or text
