"""Emit: the modeling file of a slice, definitions in the reference's order, imports that are used, formatted."""

import ast
import subprocess
import sys

from labkit.port.construct import InitRewriter, numpy_text
from labkit.port.docstrings import first_sentence
from labkit.port.program import Symbol
from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Rewriter
from labkit.port.trim import names_in
from labkit.port.values import CACHE_NAMES, Folded

_STATES = {"update_conv_state", "update_recurrent_state", "keep_state", "store_compression_weights"}
"""Calls on the cache by which a layer keeps what depends on all tokens before."""


def emit_modeling(context, model_type: str, tree, entry_key: str):
    """(text, refusals)."""
    emitter = Emitter(context, model_type, tree, entry_key)
    return emitter.text(), emitter.refusals


class Emitter:
    def __init__(self, context, model_type, tree, entry_key):
        self.t, self.model_type, self.tree, self.entry_key = context, model_type, tree, entry_key
        self.refusals = []
        self.maker: list[str] = []
        context.layer_maker = self.layer_maker
        context.axes = self.axes
        self.reached = self._reached()
        self.numpy_only = context.numpy_only = self._constructed_only()

    # what is emitted

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

    # text

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

    def entry_lines(self, folded) -> list[str]:
        rewriter = Rewriter(self.t, folded)
        cache = self.t.cache_name(folded)
        stores = {n.id for n in ast.walk(folded.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        used = names_in(folded.node)
        self.t.needs.use("labkit.layers.decoding", "DecoderCall")
        apart = [f"    @{self.t.needs.use('labkit.layers.packing', 'apart_when_packed')}"] if self._keeps_a_state() else []
        lines = [
            *apart,
            "    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):",
            '        """tokens int [batch, length] -> logits [batch, length, vocab][, aux][, cache].',
            "",
            f'        {folded.file}:{folded.original.lineno}."""',
            "        cache = DecoderCall.begin(self, tokens, positions, segment_ids, cache, scan=scan, remat=remat)",
        ]
        for name, text in (
            ("input_ids", "tokens"),
            ("attention_mask", f"cache.{'key_' if self._keeps_keys() else ''}attention_mask.astype(jnp.int32)"),
            ("position_ids", "cache.positions"),
            (cache, "cache"),
        ):
            if name == text or name not in used:
                continue
            if name in stores:
                lines.append(f"        {name} = {text}")
            else:
                rewriter.renames[name] = text
        rewriter.returned = lambda node: f"cache.outputs({rewriter.expr(node.value)}, return_aux)"
        return lines + self.guarded("__call__", lambda: rewriter.block(folded.node.body, "        "))

    def _keeps_a_state(self) -> bool:
        """Some layer carries more along a row than keys and values, which no mask keeps from the next segment."""
        calls = [n for key in self.reached for n in ast.walk(self.t.functions[key].node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return any(call.func.attr in _STATES for call in calls)

    def _keeps_keys(self) -> bool:
        """Some layer keeps keys: a mask is over all of them, else over the tokens of the call."""
        calls = [n for key in self.reached for n in ast.walk(self.t.functions[key].node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return any(c.func.attr == "update" and ast.unparse(c.func.value) in CACHE_NAMES for c in calls)

    def cache_lines(self) -> list[str]:
        uncached = self.t.uncached(self.reached)
        if uncached is not None:
            from labkit.port.translate import Refusal

            construct, where = uncached
            self.refusals.append(Refusal(construct, where, "init_cache", "write cached attention by hand, or call it without a cache"))
            return [
                "    def init_cache(self, batch: int, capacity: int):",
                f'        """Raises NotImplementedError: {construct}."""',
                f"        raise NotImplementedError({f'{construct} ({where})'!r})",
                "",
            ]
        self.t.needs.use("labkit.layers.decoding", "empty_cache")
        return [
            "    def init_cache(self, batch: int, capacity: int):",
            '        """An empty cache for `capacity` tokens per row, in the model\'s dtype."""',
            "        return empty_cache(self, batch, capacity)",
            "",
        ]

    # the layers

    def layer_maker(self, rewriter, node) -> None:
        """`make_layer` from the constructor's list of layers: a comprehension, or a loop that appends."""
        value = node.value
        argument = value.args[0] if isinstance(value, ast.Call) and value.args else None
        if isinstance(argument, ast.ListComp) and len(argument.generators) == 1:
            generator = argument.generators[0]
            index = generator.target.id
            rewriter.renames[index] = "layer_idx"
            body = [f"    return {rewriter.expr(argument.elt)}"]
            rewriter.renames.pop(index)
        else:
            name = ast.unparse(argument) if argument is not None else f"self.{self.t.spine.layers}"
            loop = next((s for s in rewriter.folded.node.body if isinstance(s, ast.For) and f"{name}.append" in ast.unparse(s)), None)
            if loop is None or not isinstance(loop.target, ast.Name):
                raise CannotTranslate("a list of layers made in another way than by a comprehension or by append", node)
            rewriter.renames[loop.target.id] = "layer_idx"
            body = []
            for statement in loop.body:
                for line in rewriter.statement(statement, "    "):
                    stripped = line.strip()
                    if stripped.startswith(f"{name}.append(") and stripped.endswith(")"):
                        line = line[: len(line) - len(stripped)] + f"return {stripped[len(name) + 8 : -1]}"
                    body.append(line)
            rewriter.folded.node.body = [s for s in rewriter.folded.node.body if s is not loop]
            rewriter.renames.pop(loop.target.id)
        body = self._completed(rewriter, body)
        needed = self._locals_before(rewriter, node, body)
        self.maker = [
            "def make_layer(config, layer_idx, build):",
            '    """One layer of the decoder, by its index."""',
            *needed,
            *[b.replace("self.config", "config") for b in body],
        ]

    def _completed(self, rewriter, body) -> list[str]:
        """With what the constructor does to every layer once all are made: `for layer in self.layers: layer.x.register_buffer(...)`."""
        for loop in rewriter.folded.node.body:
            if isinstance(loop, ast.For) and ast.unparse(loop.iter) == f"self.{self.t.spine.layers}" and isinstance(loop.target, ast.Name):
                made = body[-1].strip().removeprefix("return ")
                body = [*body[:-1], f"    {loop.target.id} = {made}", *rewriter.block(loop.body, "    "), f"    return {loop.target.id}"]
        return body

    def _locals_before(self, rewriter, node, body) -> list[str]:
        """Assignments to locals that the layer's constructor arguments read."""
        wanted = names_in(ast.parse("\n".join(["def f():", *body])))
        out = []
        for statement in reversed(rewriter.folded.node.body):
            if statement is node or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                continue
            if statement.targets[0].id in wanted and statement.targets[0].id != "config":
                wanted |= names_in(statement.value)
                out = rewriter.statement(statement, "    ") + out
        return [numpy_text(line).replace("self.config", "config") for line in out]

    def _maker_text(self) -> list[str]:
        return ["\n".join(numpy_text(line) for line in self.maker)] if self.maker else []

    # the rest of the file

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

    def config_text(self) -> str:
        from labkit.port.config_class import ConfigClass

        path = self.tree.config_file.relative_to(self.t.program.folder).as_posix() if self.tree.config_file else None
        name = self.t.config_class or "Config"
        lines = [
            "@dataclasses.dataclass(frozen=True, kw_only=True)",
            f"class {name}(TranslatedConfig):",
            f'    """`{name}` of transformers: the attributes that this slice reads."""',
            "",
        ]
        attributes = dict(self.t.config_attributes)
        count = next(
            (k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers") if any(k in c for c in self.t.facts.record.config)),
            "num_hidden_layers",
        )
        for key in (count, "vocab_size", "hidden_size", "num_attention_heads", "tie_word_embeddings"):
            attributes.setdefault(key, None)
        if any("layer_types" in c for c in self.t.facts.record.config):
            attributes.setdefault("layer_types", None)
        if self._counts_key_values():
            attributes.setdefault("num_key_value_heads", None)
        if self.t.reports:
            for key in ("router_aux_loss_coef", "aux_loss_coef", "router_aux_loss_coefficient"):
                if any(key in c for c in self.t.facts.record.config):
                    attributes.setdefault(key, None)
        if self.t.ropes:
            for key in ("rope_parameters", "max_position_embeddings", "head_dim", "partial_rotary_factor", "original_max_position_embeddings", "rope_theta"):
                if any(key in c for c in self.t.facts.record.config):
                    attributes.setdefault(key, None)
        for label in self.t.labels:
            for node in ast.walk(ast.parse(label)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    attributes.setdefault(node.attr, None)
        if path:
            config_class = ConfigClass(self.t.program, path, name)
            lines += config_class.lines(name, attributes, self.t.facts.record.config)
            lines += config_class.irrelevant(self._config_reads(), self.t.facts.record.config)
        self.t.needs.use("labkit.models.config", "TranslatedConfig")
        if self.maker:
            self.t.needs.use("labkit.layers.planning", "plan_layers")
            labels = f", labels=tuple(({', '.join(self.t.labels)},) for layer_idx in range(self.{count}))" if self.t.labels else ""
            lines += [
                "",
                "    @property",
                "    def plan(self):",
                f"        return plan_layers(self.{count}, lambda layer_idx, build: make_layer(self, layer_idx, build), self{labels})",
            ]
        else:
            self.t.needs.use("labkit.layers.plan", "LayerPlan")
            lines += ["", "    @property", "    def plan(self):", "        return LayerPlan.from_kinds([])"]
        return "\n".join(lines)

    def _config_reads(self) -> dict[str, list[str]]:
        """Config attribute -> "file:line `statement`" of every read in the reference's functions that the model reaches, before anything was folded away."""
        found: dict[str, list[str]] = {}
        for folded in self.t.functions.values():
            for statement in (n for n in ast.walk(folded.original) if isinstance(n, ast.stmt)):
                parts = (
                    [statement] if not hasattr(statement, "body") else [p for p in (getattr(statement, "test", None), getattr(statement, "iter", None)) if p]
                )
                for node in (n for part in parts for n in ast.walk(part)):
                    for name in self._read_of_config(node):
                        text = ast.unparse(parts[0])
                        place = f"{folded.file.split('/')[-1]}:{node.lineno} `{text if len(text) <= 60 else text[:57] + '...'}`"
                        found.setdefault(name, []).append(place)
        return found

    def _read_of_config(self, node) -> list[str]:
        """`config.name`, `getattr(config, "name")`."""
        is_config = lambda owner: self.t.facts.is_a(owner, "config") or ast.unparse(owner).endswith(("config", "cfg"))
        if isinstance(node, ast.Attribute) and is_config(node.value):
            return [node.attr]
        if isinstance(node, ast.Call) and node.args and is_config(node.args[0]):
            return [a.value for a in node.args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return []

    def _counts_key_values(self) -> bool:
        """The config says how many heads keys and values have: one number, the same for every layer."""
        counts = [c["num_key_value_heads"] for c in self.t.facts.record.config if "num_key_value_heads" in c]
        return bool(counts) and all(count is None or isinstance(count, int) for count in counts)

    def names(self) -> tuple[str, str, str]:
        """(config class, sharding class, model class)."""
        name = self.t.config_class or "Config"
        return name, name.removesuffix("Config") + "Sharding", self.t.program.entry.name

    def sharding_text(self) -> str:
        self.t.needs.use("labkit.layers.sharding", "Sharding")
        config, sharding, _ = self.names()
        return "\n".join(
            [
                f"class {sharding}(Sharding):",
                '    """The base mapping as it is."""',
                "",
                "    @classmethod",
                f"    def for_mesh(cls, config: {config}, mesh):",
                f"        heads, kv_heads = config.num_attention_heads or 0, config.num_{'key_value' if self._counts_key_values() else 'attention'}_heads or 0",
                "        return cls(dict(mesh.shape), vocab_size=config.vocab_size or 0, num_heads=heads, num_kv_heads=kv_heads)",
            ]
        )

    def create_text(self) -> str:
        self.t.needs.use("labkit.layers.building", "create_model")
        config, sharding, model = self.names()
        return "\n".join(
            [
                f"def create_{self.model_type.replace('-', '_')}_model(config: {config}, *, rngs, mesh=None, quant_mode_str=None) -> {model}:",
                '    """A model with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`."""',
                f"    return create_model({model}, config, {sharding}, rngs=rngs, mesh=mesh, quant_mode_str=quant_mode_str)",
            ]
        )

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
