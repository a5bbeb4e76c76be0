"""Translate: constructors. Modules become NNX modules made by `build`, parameters and persistent buffers its variables, other arrays numpy constants."""

import ast

from labkit.port.local_experts import in_halves
from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Rewriter
from labkit.port.shared_weights import sharing_lines, table_text

_CREATORS = {"ones": "jnp.ones", "zeros": "jnp.zeros", "empty": '"normal"', "randn": '"normal"', "rand": '"normal"'}
_SIGNATURES = {
    "Linear": ("in_features", "out_features", "bias"),
    "Embedding": ("num_embeddings", "embedding_dim", "padding_idx"),
    "Conv1d": ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    "LayerNorm": ("shape", "eps", "elementwise_affine", "bias"),
    "RMSNorm": ("shape", "eps", "elementwise_affine"),
    "Conv1D": ("nf", "nx"),
}
_MAKERS = {"Linear": "linear", "Embedding": "embedding", "Conv1d": "conv1d", "LayerNorm": "layer_norm", "RMSNorm": "rms_norm", "Conv1D": "gpt_linear"}
_OWN_ARGUMENTS = {"Linear": 3, "Embedding": 3, "LayerNorm": 4}
"""How many of a module's positional arguments come before device and dtype."""

_RENAMED = {"normalized_shape": "shape"}
_DROPPED = {"padding_idx", "dtype", "device", "padding_mode", "max_norm"}
_PADDING = {"ZeroPad1d": 2, "ZeroPad2d": 4}
_IDENTITY = {"Dropout", "Identity", "Dropout1d", "Dropout2d"}
_ACTIVATIONS_WITH_PARAMETERS = {"XIELUActivation", "PReLU"}
_ACTIVATION_MODULES = {"SiLU": "silu", "GELU": "gelu", "ReLU": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": None}


class InitRewriter(Rewriter):
    """Rewrites `__init__` of one class. attribute: the attribute being assigned, for the names of parameters."""

    def __init__(self, context, folded):
        super().__init__(context, folded, numpy=True, wide="wide_dtype(build.dtype)")
        context.needs.use("labkit.layers.precision", "wide_dtype")
        self.attribute = ""

    def x_Call(self, node):
        if getattr(node, "partial", False):
            return super().x_Call(node)
        name = ast.unparse(node.func)
        short = name.split(".")[-1]
        if isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name) and self.t.is_external(self.folded, node.func.value, "ACT2CLS"):
            options = "".join(f", {k.arg}={self.expr(k.value)}" for k in node.keywords if k.arg not in _DROPPED)
            return f"{self.use('labkit.layers.activations', 'activation')}({self.expr(node.func.slice)}, build=build{options})"
        if name in ("nn.ModuleList", "torch.nn.ModuleList"):
            return f"build.list({self.expr(node.args[0]) if node.args else '[]'})"
        if name in ("nn.ModuleDict", "torch.nn.ModuleDict"):
            return f"nnx.Dict({self.expr(node.args[0])})"
        if name in ("nn.Sequential", "torch.nn.Sequential"):
            return f"{self.use('labkit.layers.modules', 'Sequential')}([{', '.join(self.expr(a) for a in node.args)}])"
        if short == "to" and isinstance(node.func, ast.Attribute) and self.facts.modules(node.func.value):
            return self._converted(node)
        if short in _MAKERS and self._is_torch(node.func):
            return self.make(short, node)
        if short in _IDENTITY and self._is_torch(node.func):
            return self.use("labkit.layers.functional", "identity") if short == "Identity" and self._other_modules() else "None"
        if short in _PADDING and self._is_torch(node.func):
            widths = self.expr(node.args[0])
            widths = widths if isinstance(node.args[0], ast.Tuple) else f"({widths},) * {_PADDING[short]}"
            return f"{self.use('labkit.layers.functional', 'Partial')}({self.use('labkit.layers.functional', 'pad')}, widths={widths})"
        if short in _ACTIVATION_MODULES and self._is_torch(node.func):
            if short == "Softmax":
                return f"(lambda x: jax.nn.softmax(x, axis={self.expr(node.keywords[0].value if node.keywords else node.args[0])}))"
            approximate = any(k.arg == "approximate" and ast.unparse(k.value) == "'tanh'" for k in node.keywords)
            return f"{self.use('labkit.layers.activations', 'activation')}({'gelu_pytorch_tanh' if approximate else _ACTIVATION_MODULES[short]!r})"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "uniform_":
            created = self._created(node.func.value)
            if created is not None:
                low, high = [self.expr(a) for a in node.args] if node.args else ("0", "1")
                return f"np.full({created[1]}, ({low} + {high}) / 2, dtype={self.wide_dtype()})"
        if name in ("torch.rand", "torch.randn"):
            # The expected value: what a checkpoint fills needs a shape and no luck.
            return f"np.full({self._shape(node.args, node)}, {0.5 if short == 'rand' else 0.0}, dtype={self.wide_dtype()})"
        if short == "Parameter" and self._is_torch(node.func):
            frozen = any(k.arg == "requires_grad" and isinstance(k.value, ast.Constant) and k.value.value is False for k in node.keywords)
            return self.buffer(node, self.attribute, node.args[0]) if frozen else self.parameter(node.args[0], node)
        if short == "Buffer" and self._is_torch(node.func):
            return self.buffer(node, self.attribute, node.args[0])
        return super().x_Call(node)

    def x_Subscript(self, node):
        text = super().x_Subscript(node)
        if (
            isinstance(node.value, ast.Name)
            and self.t.is_external(self.folded, node.value, "ACT2FN")
            and {*self.facts.modules(node)} & _ACTIVATIONS_WITH_PARAMETERS
        ):
            return f"{text[:-1]}, build=build)"
        return text

    def _converted(self, node) -> str:
        """`Module(...).to(torch.float32)`: a module whose parameters are kept and computed in at least float32."""
        text = self.expr(node.func.value)
        wide = any(self._is_wide(a) for a in [*node.args, *(k.value for k in node.keywords)])
        return f"{text[: -len('build=build)')]}build=build.wide())" if wide and text.endswith("build=build)") else text

    def _other_modules(self) -> bool:
        """The attribute being assigned holds something else than an identity in another layer or configuration."""
        kinds = self.facts.attribute(self.folded.file, self.folded.cls, self.attribute).get("kinds", [])
        return any(kind.startswith("module:") and kind.split(":")[1] not in _IDENTITY for kind in kinds)

    def _is_torch(self, func) -> bool:
        text = ast.unparse(func)
        if text.startswith(("nn.", "torch.nn.")):
            return True
        if isinstance(func, ast.Name):
            symbol = self.program.resolve(self.folded.file, func.id)
            return symbol.kind == "external" and (symbol.file.startswith("torch") or symbol.file == "pytorch_utils")
        return False

    def arguments(self, node) -> str:
        text = super().arguments(node)
        if any(self.t.constructs(c) for c in getattr(node, "callees", [])):
            return f"{text}{', ' if text else ''}build=build"
        return text

    def make(self, kind: str, node) -> str:
        names = _SIGNATURES[kind]
        bound = dict(zip(names, node.args)) | {_RENAMED.get(k.arg, k.arg): k.value for k in node.keywords}
        wide = kind == "Linear" and self._is_wide(bound.get("dtype"))
        bound = {k: v for k, v in bound.items() if k not in _DROPPED}
        positional = {"Linear": 2, "Embedding": 2, "Conv1d": 3, "LayerNorm": 1, "RMSNorm": 1, "Conv1D": 2}[kind]
        parts = [self.expr(bound.pop(n)) for n in names[:positional] if n in bound]
        if kind == "Linear" and "bias" not in bound:
            bound["bias"] = ast.Constant(True)
        if kind == "Linear" and isinstance(bound["bias"], ast.Constant) and bound["bias"].value is False:
            bound.pop("bias")
        parts += [f"{k}={self.expr(v)}" for k, v in bound.items()]
        axes = self.t.axes(self.folded, self.attribute) if kind == "Linear" else None
        parts += [f"axes={axes!r}"] if axes else []
        parts += ["wide=True"] if wide else []
        parts += [f"name={self.attribute!r}"] if self.attribute else []
        return f"build.{_MAKERS[kind]}({', '.join(parts)})"

    def _created(self, node):
        """(initial value, shape) of `torch.ones(shape)` and the like; None for another expression."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            created = self._created(node.left) or self._created(node.right)
            return created and ('"normal"', created[1])
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func)
        if name.startswith("torch."):
            op = name.removeprefix("torch.")
            if op in _CREATORS:
                # The reference draws such a matrix after it has made it of zeros; a router left at zero would send every token to the first experts.
                matrix = op == "zeros" and (self.facts.rank(node) or 0) > 1
                return '"normal"' if matrix else _CREATORS[op], self._shape(node.args, node)
            if op == "full":
                return self.expr(node.args[1]), self._shape(node.args[:1], node)
            if op in ("normal",):
                return '"normal"', self._shape([a for a in node.args if not isinstance(a, ast.Constant)], node)
        if isinstance(node.func, ast.Attribute) and (node.func.attr.endswith("_") or node.func.attr in ("to", "float", "log")):
            return self._created(node.func.value)
        return None

    def _shape(self, args, node) -> str:
        size = next((k.value for k in node.keywords if k.arg == "size"), None)
        return self.sequence(list(args)) if size is None else self.expr(size)

    def parameter(self, inner, node) -> str:
        created = self._created(inner)
        name = f", name={self.attribute!r}" if self.attribute else ""
        if created is not None:
            axes, shape = self.t.axes(self.folded, self.attribute, raw=True), created[1]
            local = self.t.local_experts.get(f"{self.folded.file}::{self.folded.cls}")
            if local is not None and self.attribute in local.halves and axes is not None:
                place = local.halves[self.attribute]
                shape, axes = in_halves(shape, place), (*axes[:place], None, *axes[place:])
            return f"build.param({created[0]}, {shape}{f', axes={axes!r}' if axes else ''}{name})"
        value = super().expr(inner)
        return f"build.parameter({value}{name})"

    def buffer(self, node, attribute: str, inner) -> str:
        persistent = next((k.value for k in node.keywords if k.arg == "persistent"), ast.Constant(True))
        if isinstance(persistent, ast.Constant) and not persistent.value:
            owner = node.func.value if ast.unparse(node.func).endswith(".register_buffer") else None
            return f"{self.use('labkit.layers.building', 'Constant')}({self.expr(inner)}{self._default_dtype(attribute, owner)})"
        created = self._created(inner)
        dtype = {"i": ", dtype=jnp.int32", "b": ", dtype=bool"}.get(self.facts.dtype(inner) or "", "")
        shape = created[1] if created is not None else f"np.shape({self.expr(inner)})"
        return f"build.buffer({shape}, name={attribute!r}{dtype})"

    def _default_dtype(self, attribute: str, owner) -> str:
        """`, build.dtype` for a tensor that torch makes in its default dtype, which is the model's own while it is built; others keep the one they ask for."""
        names = {*([] if owner is None else self.facts.modules(owner)), self.folded.cls}
        known = [entry for name in names if (entry := self.facts.attribute(self.folded.file, name, attribute))]
        return ", build.dtype" if known and all(entry.get("narrow") for entry in known) else ""

    # statements

    def s_Assign(self, node, indent):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            self.attribute = target.attr
            level = self.t._level_of(self.folded)
            if level is not None:
                spine = self._spine_statement(level, target.attr, node, indent)
                if spine is not None:
                    self.attribute = ""
                    return spine
            table = table_text(self, node)
            if table is not None:
                self.attribute = ""
                return [f"{indent}self.{target.attr} = {table}"]
            text = self.expr(node.value)
            # What is not a module or an array is part of the graph definition, which must hash.
            text = f"frozen{text}" if text.startswith("set(") else text
            if isinstance(node.value, ast.Constant) and node.value.value is None and self._set_again(node, target.attr):
                text = "nnx.data(None)"
            head = self.t.tied_head(self, ast.Attribute(ast.Name("self", ast.Load()), target.attr, ast.Load()))
            if head is not None:
                self.attribute = ""
                lines = [f"{indent}if not config.tie_word_embeddings:", f"{indent}    self.{target.attr} = {text}"]
                if self.t.head_has_bias(target.attr):
                    made = dict(zip(_SIGNATURES["Linear"], node.value.args)) | {k.arg: k.value for k in node.value.keywords}
                    bias = f", bias={self.expr(made['bias'])}" if "bias" in made else ""
                    lines += [
                        f"{indent}else:",
                        f"{indent}    self.{target.attr} = build.head_bias({self.expr(made['out_features'])}{bias}, name={target.attr!r})",
                    ]
                return lines
            if self.facts.is_a(node.value, "list") and not isinstance(node.value, ast.List) and not text.startswith(("build.", "self.")):
                text = f"tuple({text})"
            if self.facts.is_array(node.value) and not self.facts.is_parameter(node.value) and not text.startswith(("build.", "Constant", "self.")):
                text = f"{self.use('labkit.layers.building', 'Constant')}({text}{self._default_dtype(target.attr, target.value)})"
            if isinstance(node.value, ast.Dict) and not node.value.keys:
                text = f"{self.use('labkit.layers.building', 'Table')}()"
            elif isinstance(node.value, ast.DictComp) and self.facts.is_a(node.value.value, "int", "float", "bool", "str", "none"):
                text = f"{self.use('labkit.layers.building', 'Table')}({text})"
            self.attribute = ""
            return [f"{indent}self.{target.attr} = {text}"]
        lines = super().s_Assign(node, indent)
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "config" and self.folded.cls:
            owner = self.program.node(self.program.resolve(self.folded.file, self.folded.cls))
            lines += [f"{indent}self.config = config"] if "self.config" in ast.unparse(owner) else []
        return lines

    def _set_again(self, node, attribute) -> bool:
        """Another statement of the constructor gives the attribute a value: nnx must know from the start that it may hold a module."""
        others = [s for s in ast.walk(self.folded.node) if isinstance(s, ast.Assign) and s is not node]
        return any(isinstance(t, ast.Attribute) and t.attr == attribute for s in others for t in s.targets)

    def _spine_statement(self, level, attribute, node, indent):
        levels = self.t.spine.levels
        index = levels.index(level)
        if index + 1 < len(levels) and levels[index + 1].attribute == attribute:
            arguments = self.arguments(node.value) if isinstance(node.value, ast.Call) else "config"
            return [f"{indent}super().__init__({arguments}{', ' if arguments else ''}build=build)"]
        if level is self.t.spine.last and attribute == self.t.spine.layers:
            self.t.layer_maker(self, node)
            return [f"{indent}self.layers = build.layers(config.plan, lambda layer_idx, build: make_layer(config, layer_idx, build))"]
        return None

    def s_For(self, node, indent):
        """The loop that makes the decoder's layers is `make_layer`'s."""
        if self.t._level_of(self.folded) is self.t.spine.last:
            if any(f"{name}.append" in ast.unparse(node) for name in self._layer_lists()) or ast.unparse(node.iter) == f"self.{self.t.spine.layers}":
                return []
        return super().s_For(node, indent)

    def _layer_lists(self) -> list[str]:
        """What the constructor calls the list of the decoder's layers: the attribute, and a local that becomes it."""
        assigns = [s for s in self.folded.node.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == f"self.{self.t.spine.layers}"]
        return [f"self.{self.t.spine.layers}"] + [
            ast.unparse(s.value.args[0]) for s in assigns if isinstance(s.value, ast.Call) and s.value.args and isinstance(s.value.args[0], ast.Name)
        ]

    def s_Expr(self, node, indent):
        call = node.value
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if name == "super().__init__":
            if getattr(call, "callees", None):
                arguments = self.arguments(call)
                return [f"{indent}super().__init__({arguments}{', ' if arguments else ''}build=build)"]
            kind = self.t.builtin_module([self.folded.cls])
            if kind:
                call.args = call.args[: _OWN_ARGUMENTS.get(kind)]
                call.keywords = [k for k in call.keywords if k.arg not in ("device", "dtype")]
                arguments = self.arguments(call)
                return [f"{indent}super().__init__({arguments}{', ' if arguments else ''}build=build)"]
            return []
        if name == "self.post_init" and getattr(node, "keep", False):
            return sharing_lines(self, indent)
        if name in ("self.post_init", "self.init_weights", "self._init_weights", "nn.Module.__init__"):
            return []
        if name.endswith(".register_buffer"):
            attribute = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            if attribute is None:
                raise CannotTranslate("a buffer whose name is computed", node)
            return [f"{indent}{self.expr(call.func.value)}.{attribute} = {self.buffer(call, attribute, call.args[1])}"]
        if name == "self.register_parameter":
            return [f"{indent}self.{call.args[0].value} = {self.expr(call.args[1])}"]
        if name == "setattr" and ast.unparse(call.args[0]) == "self":
            return [f"{indent}setattr(self, {self.expr(call.args[1])}, {self.expr(call.args[2])})"]
        if name.startswith(("init.", "nn.init.", "torch.nn.init.")):
            return []
        return super().s_Expr(node, indent)


def numpy_text(line: str) -> str:
    """A constructor's line with numpy in place of jax.numpy wherever it computes; initialisers stay."""
    for kept in ("jnp.ones,", "jnp.zeros,", "dtype=jnp.int32", "jnp.int32", "jnp.bfloat16"):
        line = line.replace(kept, kept.replace("jnp.", "\0"))
    return line.replace("jnp.", "np.").replace("jax.lax.rsqrt(", "1 / np.sqrt(").replace("\0", "jnp.")
