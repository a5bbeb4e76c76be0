"""Translate: expressions and statements of a folded function, from torch to jax.numpy, as text. Names, order and structure stay.

What a name holds comes from the record, never from a method's name, unless no run saw it and only arrays have the method.
"""

import ast
import re

from labkit.layers.activations import ACTIVATIONS
from labkit.port.facts import Facts
from labkit.port.fold import CACHE_NAMES
from labkit.port.ops import FLOATING, HELPERS, OPS, SAME, TENSOR_METHODS
from labkit.port.program import Program

DTYPES = {
    **{n: "jnp.int32" for n in ("torch.long", "torch.int64", "torch.int32", "torch.int", "torch.int16", "torch.int8")},
    **{"torch.uint8": "jnp.uint8", "torch.bool": "bool", "torch.bfloat16": "jnp.bfloat16", "torch.float16": "jnp.float16", "torch.half": "jnp.float16"},
}
WIDE_DTYPES = {"torch.float32", "torch.float", "torch.float64", "torch.double"}
TORCH_ROOTS = ("torch.nn.functional.", "nn.functional.", "F.", "torch.special.", "torch.linalg.", "torch.")


class CannotTranslate(Exception):
    """construct, where ("file:line") and what to do about it."""

    def __init__(self, construct: str, node: ast.AST | None = None, advice: str = ""):
        super().__init__(construct)
        origin = getattr(node, "origin", None)
        self.construct, self.advice = construct, advice
        self.where = f"{origin[0]}:{origin[1].split(':')[0]}" if origin else ""


class Needs:
    """What an emitted file must import; a name that the code itself uses is imported under another."""

    def __init__(self, taken: set[str]):
        self.taken, self.names = taken, {}

    def use(self, module: str, name: str) -> str:
        alias = name if name not in self.taken else f"{name}_"
        self.names[(module, name)] = alias
        return alias


class Rewriter:
    """Rewrites the body of one function.

    folded: the function. wide: the expression for "at least float32" here. numpy: True where values are computed at construction, once, with numpy.
    """

    def __init__(self, translation, folded, *, numpy: bool = False, wide: str | None = None):
        self.t, self.folded, self.numpy = translation, folded, numpy
        self.program: Program = translation.program
        self.facts: Facts = translation.facts
        self.needs: Needs = translation.needs
        self._wide = wide
        self.renames: dict[str, str] = {}
        self.stacked: set[str] = set()

    def helper(self, name: str) -> str:
        return self.needs.use(HELPERS[name], name)

    def use(self, module: str, name: str) -> str:
        return self.needs.use(module, name)

    # dtypes

    def wide_dtype(self) -> str:
        """The dtype that `torch.float32` means here: at least float32, by the first array of floats that the function takes."""
        if self._wide:
            return self._wide
        args = self.folded.original.args
        for arg in [*args.args, *args.kwonlyargs]:
            if arg.arg in self.folded.parameters and any(k.startswith("array:f") for k in self.facts.kinds(arg)):
                return f"{self.helper('wide_dtype')}({arg.arg}.dtype)"
        if self.folded.cls is not None:
            return f"{self.helper('wide_dtype')}(self.config.dtype)" if self.t.keeps_config(self.folded) else "jnp.float32"
        for arg in [*args.args, *args.kwonlyargs]:
            if arg.arg in self.folded.parameters and self.facts.is_a(arg, "dtype"):
                return f"{self.helper('wide_dtype')}({arg.arg})"
        return "dtype" if self.t.takes_dtype(self.folded) else "jnp.float32"

    def dtype(self, node) -> str:
        """A dtype expression."""
        text = ast.unparse(node)
        if text in WIDE_DTYPES:
            return self.wide_dtype()
        if text in DTYPES:
            return DTYPES[text]
        if text in ("bool", "int", "float"):
            return {"bool": "bool", "int": "jnp.int32", "float": self.wide_dtype()}[text]
        if text == "torch.get_default_dtype()":
            return self.wide_dtype()
        return self.expr(node)

    def _is_wide(self, node) -> bool:
        return node is not None and ast.unparse(node) in WIDE_DTYPES

    # expressions

    def expr(self, node) -> str:
        method = getattr(self, f"x_{type(node).__name__}", None)
        if method is None:
            raise CannotTranslate(f"expression {type(node).__name__}", node)
        return method(node)

    def x_Constant(self, node):
        return repr(node.value) if node.value is not Ellipsis else "..."

    def x_Name(self, node):
        if node.id in self.renames:
            return self.renames[node.id]
        if node.id in self.t.local_names(self.folded):
            return node.id
        return self.t.global_name(self, node)

    def x_Tuple(self, node):
        inner = ", ".join(self.expr(e) for e in node.elts)
        return f"({inner}{',' if len(node.elts) == 1 else ''})"

    def x_List(self, node):
        return f"[{', '.join(self.expr(e) for e in node.elts)}]"

    def x_Set(self, node):
        return f"{{{', '.join(self.expr(e) for e in node.elts)}}}"

    def x_Dict(self, node):
        return "{" + ", ".join(f"{self.expr(k)}: {self.expr(v)}" if k is not None else f"**{self.expr(v)}" for k, v in zip(node.keys, node.values)) + "}"

    def x_Starred(self, node):
        return f"*{self.expr(node.value)}"

    def x_JoinedStr(self, node):
        return 'f"' + "".join(v.value.replace('"', "'") if isinstance(v, ast.Constant) else f"{{{self.expr(v.value)}}}" for v in node.values) + '"'

    def x_Lambda(self, node):
        return f"(lambda {ast.unparse(node.args)}: {self.expr(node.body)})"

    def _comprehension(self, node, element, left, right):
        clauses = "".join(
            f" for {ast.unparse(g.target)} in {self.expr(g.iter)}" + "".join(f" if {self.expr(i)}" for i in g.ifs) for g in node.generators
        )
        return f"{left}{element}{clauses}{right}"

    def x_ListComp(self, node):
        return self._comprehension(node, self.expr(node.elt), "[", "]")

    def x_GeneratorExp(self, node):
        return self._comprehension(node, self.expr(node.elt), "(", ")")

    def x_SetComp(self, node):
        return self._comprehension(node, self.expr(node.elt), "{", "}")

    def x_DictComp(self, node):
        return self._comprehension(node, f"{self.expr(node.key)}: {self.expr(node.value)}", "{", "}")

    def x_IfExp(self, node):
        if self.facts.is_array(node.test) and self.facts.rank(node.test) == 0 and all(self.facts.is_a(s, "int", "float") for s in (node.body, node.orelse)):
            return f"jnp.where({self.expr(node.test)}, {self.expr(node.body)}, {self.expr(node.orelse)})"
        self._refuse_array_test(node.test)
        return f"({self.expr(node.body)} if {self.expr(node.test)} else {self.expr(node.orelse)})"

    def x_BoolOp(self, node):
        word = " and " if isinstance(node.op, ast.And) else " or "
        return "(" + word.join(self.expr(v) for v in node.values) + ")"

    def x_UnaryOp(self, node):
        operators = {ast.Not: "not ", ast.USub: "-", ast.UAdd: "+", ast.Invert: "~"}
        return f"({operators[type(node.op)]}{self.expr(node.operand)})"

    def x_Compare(self, node):
        operators = {
            **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
            **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
        }
        if len(node.ops) == 1 and not isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            left, right = self.arithmetic(node.left, node.comparators[0], self.expr(node.left), self.expr(node.comparators[0]))
            return f"({left} {operators[type(node.ops[0])]} {right})"
        return "(" + self.expr(node.left) + "".join(f" {operators[type(o)]} {self.expr(c)}" for o, c in zip(node.ops, node.comparators)) + ")"

    def x_BinOp(self, node):
        operators = {
            **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@"},
            **{ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
        }
        left, right = self.arithmetic(node.left, node.right, self.expr(node.left), self.expr(node.right), node.op)
        return f"({left} {operators[type(node.op)]} {right})"

    def arithmetic(self, a, b, left: str, right: str, op=None) -> tuple[str, str]:
        """Operands brought to one kind of number, as torch does: an array of integers or booleans that meets floats becomes floats."""
        da, db = self.number(a), self.number(b)
        order = {"b": 0, "i": 1, "f": 2, "c": 3}
        if da in order and db in order and da != db and self.facts.is_array(a) and self.facts.is_array(b):
            cast = re.search(r"\.astype\(([\w.]+(?:\([\w.]+\))?)\)$", right if order[da] < order[db] else left)
            if cast is not None:
                left, right = (f"{left}.astype({cast[1]})", right) if order[da] < order[db] else (left, f"{right}.astype({cast[1]})")
            elif order[da] < order[db]:
                left = f"{left}.astype({right}.dtype)" if self._cheap(right) else f"{left}.astype({self.wide_dtype() if db == 'f' else 'jnp.int32'})"
            else:
                right = f"{right}.astype({left}.dtype)" if self._cheap(left) else f"{right}.astype({self.wide_dtype() if da == 'f' else 'jnp.int32'})"
        elif self.facts.is_array(a) and da in ("i", "b") and db == "float":
            left = f"{left}.astype({self.wide_dtype()})"
        elif self.facts.is_array(b) and db in ("i", "b") and da == "float":
            right = f"{right}.astype({self.wide_dtype()})"
        elif isinstance(op, ast.Div):
            left = f"{left}.astype({self.wide_dtype()})" if self.facts.is_array(a) and da in ("i", "b") else left
            right = f"{right}.astype({self.wide_dtype()})" if self.facts.is_array(b) and db in ("i", "b") else right
        return left, right

    @staticmethod
    def _cheap(text: str) -> bool:
        return re.fullmatch(r"[\w.]+", text) is not None

    def number(self, node) -> str | None:
        """"f", "i", "b", "c" of an array; "float" or "int" of a plain number."""
        if self.facts.may_be_array(node):
            return self.facts.dtype(node)
        if isinstance(node, ast.Constant):
            return type(node.value).__name__
        kinds = set(self.facts.kinds(node)) - {"none"}
        return kinds.pop() if len(kinds) == 1 else None

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
        text = f"{self.expr(node.value)}[{self.index(node.slice)}]"
        stop, axes = getattr(node, "prefix", (None, ()))
        for axis in axes:
            text = f"{self.use('labkit.layers.loops', 'prefix')}({text}, {self.renames.get(stop, stop)}{'' if axis == -1 else f', axis={axis}'})"
        return text

    def _boolean_index(self, node) -> bool:
        elements = node.elts if isinstance(node, ast.Tuple) else [node]
        return any(self.facts.is_array(e) and self.facts.dtype(e) == "b" for e in elements)

    # attributes

    def is_array(self, node) -> bool:
        return self.facts.is_array(node)

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

    # calls

    def x_Call(self, node):
        special = self.t.call(self, node)
        if special is not None:
            return special
        name = ast.unparse(node.func)
        if name in ("np.sqrt", "numpy.sqrt") and not self.numpy and not self.facts.may_be_array(node.args[0]):
            # A Python number: numpy's own would not take the dtype of the array it meets.
            return f"{self.use('', 'math')}.sqrt({self.expr(node.args[0])})"
        for root in TORCH_ROOTS:
            if name.startswith(root) and re.fullmatch(r"[\w.]+", name):
                return self.operation(name[len(root) :], node, node.args)
        if isinstance(node.func, ast.Attribute):
            method, receiver = node.func.attr, node.func.value
            base = method.rstrip("_") if method.endswith("_") and not method.startswith("_") else method
            cast = method in ("to", "type") and any(ast.unparse(a) in {*DTYPES, *WIDE_DTYPES} or ast.unparse(a).endswith(".dtype") for a in [*node.args, *(k.value for k in node.keywords)])
            arrays = self.is_array(receiver) or (not self.facts.ran(receiver) and (base in TENSOR_METHODS or base in SAME or cast) and not self._plain(receiver))
            if arrays:
                if method != base and isinstance(receiver, ast.Name) and method not in SAME and self._read_after(receiver.id, node):
                    raise CannotTranslate(f"an array changed in place within an expression ({method})", node, "write it as a statement of its own")
                if method in SAME:
                    return self.expr(receiver)
                if base in OPS and not (base == "size" and False):
                    return self.operation(base, node, [receiver, *node.args])
                if method == "nonzero":
                    raise CannotTranslate("nonzero: the result's shape depends on values", node)
                raise CannotTranslate(f"array method {method}", node)
            if method == "finfo":
                return f"jnp.finfo({self.arguments(node)})"
        if isinstance(node.func, ast.Name) and not getattr(node, "callees", None) and node.func.id not in self.t.local_names(self.folded):
            external = self.t.external_function(self, node)
            if external is not None:
                return external
        return f"{self.expr(node.func)}({self.arguments(node)})"

    @staticmethod
    def _plain(node) -> bool:
        return isinstance(node, (ast.Constant, ast.List, ast.Dict, ast.JoinedStr)) or ast.unparse(node) in ("math", "np", "numpy", "super()")

    def arguments(self, node) -> str:
        parts = [self.expr(a) for a in node.args]
        parts += [f"{k.arg}={self.expr(k.value)}" if k.arg else f"**{self.expr(k.value)}" for k in node.keywords]
        if any(self.t.takes_dtype(self.t.functions[c]) for c in getattr(node, "callees", []) if c in self.t.functions):
            parts.append(f"dtype={self.wide_dtype()}")
        return ", ".join(parts)

    def bind(self, op, args, keywords, node) -> dict[str, ast.expr | list]:
        """torch's parameter names -> argument nodes; `*name` collects a sequence."""
        bound: dict = {}
        names = list(op.signature)
        positional = list(args)
        for i, name in enumerate(names):
            if name.startswith("*"):
                bound[name[1:]] = positional[i:]
                positional = positional[:i]
                break
            if i < len(positional):
                bound[name] = positional[i]
        if len(positional) > len(names):
            raise CannotTranslate("more arguments than this operation is known to take", node)
        plain = {n.lstrip("*") for n in names}
        for keyword in keywords:
            if keyword.arg in ("device", "layout", "requires_grad", "non_blocking", "memory_format", "pin_memory", "copy", "out", "generator", "inplace", "training", "output_size"):
                continue
            name = {"axis": "dim", "x": "input", "self": "input", "keepdims": "keepdim"}.get(keyword.arg, keyword.arg)
            if name not in plain:
                raise CannotTranslate(f"argument {keyword.arg}", node)
            bound[name] = keyword.value
        return bound

    def sequence(self, nodes) -> str:
        """`*size` as one tuple: `(2, 3)`, `(shape)`, `(*shape, 4)`."""
        if not isinstance(nodes, list):
            return self.expr(nodes)
        if len(nodes) == 1 and (self.facts.is_a(nodes[0], "tuple", "list", "size") or isinstance(nodes[0], (ast.Tuple, ast.List))):
            return self.expr(nodes[0])
        if len(nodes) == 1 and isinstance(nodes[0], ast.Starred):
            return self.expr(nodes[0].value)
        if len(nodes) == 1 and set(self.facts.kinds(nodes[0])) & {"tuple", "list", "size"}:
            return self.expr(nodes[0])
        return f"({', '.join(self.expr(n) for n in nodes)},)"

    def operation(self, name: str, node, args) -> str:
        if name not in OPS:
            raise CannotTranslate(f"operation {name}", node, "add it to labkit.port.ops with a test, or write this method by hand")
        op = OPS[name]
        if name == "to":
            return self.op_to(name, {"input": args[0]}, node)
        if name in ("float", "double") and self.facts.dtype(args[0]) in ("i", "b"):
            return f"{self.expr(args[0])}.astype({self.wide_dtype()})"
        bound = self.bind(op, args, node.keywords, node)
        if name in FLOATING and self.facts.is_array(bound.get("input")) and self.facts.dtype(bound["input"]) in ("i", "b"):
            return op.template.replace("{input}", f"{self.expr(bound['input'])}.astype({self.wide_dtype()})")
        if op.template.startswith("@"):
            return getattr(self, f"op_{op.template[1:]}")(name, bound, node)
        return self.fill(op.template, bound, op, node)

    def fill(self, template: str, bound, op, node) -> str:
        stars = {n[1:] for n in op.signature if n.startswith("*")}

        def text(name):
            if name in stars:
                return self.sequence(bound[name])
            if name in ("dtype", "type"):
                return self.dtype(bound[name])
            return self.expr(bound[name])

        def replace(match):
            body = match.group(1)
            if body in HELPERS and template[match.end() : match.end() + 1] == "(":
                return self.helper(body)
            if body.startswith(", "):
                key, _, name = body[2:].partition("=")
                if name not in bound or (isinstance(bound[name], ast.Constant) and bound[name].value is None):
                    return ""
                return f", {key}={text(name)}"
            if body.startswith("wide:"):
                value = text(body[5:])
                if "dtype" not in bound:
                    return value
                return f"{self.helper('widen')}({value})" if self._is_wide(bound["dtype"]) else f"{value}.astype({self.dtype(bound['dtype'])})"
            if body in bound:
                return text(body)
            if "|" in body:
                name, _, default = body.partition("|")
                return text(name) if name in bound else re.sub(r"{(\w+)}", lambda m: text(m.group(1)), default)
            raise CannotTranslate(f"argument {body} is missing", node)

        return re.sub(r"{((?:[^{}]|{\w+})*)}", replace, template)

    # operations that need a look at their arguments

    def op_pow(self, name, b, node):
        left, right = self.arithmetic(b["input"], b["other"] if "other" in b else b["exponent"], self.expr(b["input"]), self.expr(b["other"]))
        if isinstance(b["other"], ast.Constant) and b["other"].value == 2:
            return f"jnp.square({left})"
        return f"({left} ** {right})"

    def op_plus(self, name, b, node):
        left, right = self.arithmetic(b["input"], b["other"], self.expr(b["input"]), self.expr(b["other"]))
        return f"({left} {'+' if name == 'add' else '-'} {self.expr(b['alpha']) + ' * ' if 'alpha' in b else ''}{right})"

    def op_pad(self, name, b, node):
        if "mode" in b and ast.unparse(b["mode"]) != "'constant'":
            raise CannotTranslate(f"pad with mode {ast.unparse(b['mode'])}", node)
        value = f", value={self.expr(b['value'])}" if "value" in b and ast.unparse(b["value"]) != "None" else ""
        return f"{self.helper('pad')}({self.expr(b['input'])}, {self.expr(b['pad'])}{value})"

    def op_norm(self, name, b, node):
        """A vector's norm, of all elements where no axis is named."""
        order = next((self.expr(b[k]) for k in ("p", "ord") if k in b), "None")
        if "dim" not in b:
            if "keepdim" in b:
                raise CannotTranslate("a norm of all elements that keeps axes", node)
            return f"jnp.linalg.norm({self.expr(b['input'])}.reshape(-1), ord={order})"
        keep = f", keepdims={self.expr(b['keepdim'])}" if "keepdim" in b else ""
        return f"jnp.linalg.norm({self.expr(b['input'])}, ord={order}, axis={self.expr(b['dim'])}{keep})"

    def op_gelu(self, name, b, node):
        approximate = "approximate" in b and ast.literal_eval(b["approximate"]) == "tanh"
        return f"jax.nn.gelu({self.expr(b['input'])}, approximate={approximate})"

    def op_extreme(self, name, b, node):
        x = self.expr(b["input"])
        if "dim" not in b:
            return f"jnp.{name}({x})"
        if self.facts.is_array(b["dim"]):
            return f"jnp.{name}imum({x}, {self.expr(b['dim'])})"
        dim, keep = self.expr(b["dim"]), f", keepdims={self.expr(b['keepdim'])}" if "keepdim" in b else ""
        return f"(jnp.{name}({x}, axis={dim}{keep}), jnp.arg{name}({x}, axis={dim}{keep}))"

    def op_softmax(self, name, b, node):
        x, dim = self.expr(b["input"]), self.expr(b["dim"]) if "dim" in b else "-1"
        dtype = b.get("dtype")
        if dtype is None or isinstance(dtype, ast.Constant) or ast.unparse(dtype) == f"{ast.unparse(b['input'])}.dtype":
            function = "jax.nn.softmax" if x.startswith(f"{self.helper('widen')}(") else self.helper("softmax")
            return f"{function}({x}, axis={dim})"
        wide = f"{self.helper('widen')}({x})" if self._is_wide(dtype) else f"{x}.astype({self.dtype(dtype)})"
        return f"jax.nn.softmax({wide}, axis={dim})"

    def op_variance(self, name, b, node):
        correction = 1
        if "unbiased" in b:
            correction = int(bool(ast.literal_eval(b["unbiased"])))
        if "correction" in b:
            correction = ast.literal_eval(b["correction"])
        parts = [self.expr(b["input"])]
        parts += [f"axis={self.expr(b['dim'])}"] if "dim" in b else []
        parts += [f"keepdims={self.expr(b['keepdim'])}"] if "keepdim" in b else []
        return f"jnp.{name}({', '.join(parts)}, ddof={correction})"

    def op_view(self, name, b, node):
        sizes = b.get("size", b.get("shape"))
        if isinstance(sizes, list) and len(sizes) == 1 and (self.facts.is_a(sizes[0], "dtype") or ast.unparse(sizes[0]) in {*DTYPES, *WIDE_DTYPES}):
            raise CannotTranslate("view as another dtype", node)
        x = self.expr(b["input"])
        if isinstance(sizes, list):
            return f"{x}.reshape({', '.join(self.expr(s) for s in sizes)})"
        return f"{x}.reshape({self.expr(sizes)})"

    def op_flatten(self, name, b, node):
        rest = [self.expr(b[n]) for n in ("start_dim", "end_dim") if n in b]
        if not rest:
            return f"{self.expr(b['input'])}.reshape(-1)"
        if "start_dim" not in b:
            rest = ["0", *rest]
        return f"{self.helper('flatten')}({', '.join([self.expr(b['input']), *rest])})"

    def op_squeeze(self, name, b, node):
        x = self.expr(b["input"])
        if "dim" not in b:
            return f"jnp.squeeze({x})"
        rank = self.facts.rank(b["input"])
        out = self.facts.rank(node)
        if rank is not None and out == rank:
            return x
        return f"{x}.squeeze({self.expr(b['dim'])})"

    def op_concatenate(self, name, b, node):
        tensors = b["tensors"]
        if isinstance(tensors, (ast.List, ast.Tuple)):
            numbers = {self.number(e) for e in tensors.elts}
            if {"f", "i"} <= numbers or {"f", "b"} <= numbers:
                parts = [self.expr(e) if self.number(e) == "f" else f"{self.expr(e)}.astype({self.wide_dtype()})" for e in tensors.elts]
                return f"jnp.concatenate([{', '.join(parts)}], axis={self.expr(b['dim']) if 'dim' in b else 0})"
        return f"jnp.concatenate({self.expr(tensors)}, axis={self.expr(b['dim']) if 'dim' in b else 0})"

    def op_stack(self, name, b, node):
        axis = self.expr(b["dim"]) if "dim" in b else "0"
        if isinstance(b["tensors"], ast.Name) and b["tensors"].id in self.stacked:
            return f"jnp.moveaxis({b['tensors'].id}, 0, {axis})"
        return f"jnp.stack({self.expr(b['tensors'])}, axis={axis})"

    def op_scatter(self, name, b, node):
        return f"{self.helper('scatter')}({self.expr(b['input'])}, {self.expr(b['dim'])}, {self.expr(b['index'])}, {self.expr(b.get('src', b.get('value')))})"

    def op_masked_fill(self, name, b, node):
        x, mask = self.expr(b["input"]), self.expr(b["mask"])
        mask = mask if self.number(b["mask"]) in ("b", None) else f"{mask}.astype(bool)"
        if self._cheap(x):
            return f"jnp.where({mask}, jnp.asarray({self.expr(b['value'])}, {x}.dtype), {x})"
        return f"jnp.where({mask}, {self.expr(b['value'])}, {x})"

    def op_where(self, name, b, node):
        if "input" not in b:
            raise CannotTranslate("torch.where with one argument: the result's shape depends on values", node)
        left, right = self.arithmetic(b["input"], b["other"], self.expr(b["input"]), self.expr(b["other"]))
        return f"jnp.where({self.expr(b['condition'])}, {left}, {right})"

    def op_topk(self, name, b, node):
        if "largest" in b and ast.literal_eval(b["largest"]) is False:
            raise CannotTranslate("topk of the smallest", node)
        dim = ast.unparse(b["dim"]) if "dim" in b else "-1"
        rank = self.facts.rank(b["input"])
        if dim != "-1" and (rank is None or dim != str(rank - 1)):
            raise CannotTranslate(f"topk along axis {dim}", node)
        return f"jax.lax.top_k({self.expr(b['input'])}, {self.expr(b['k'])})"

    def op_sort(self, name, b, node):
        x, dim = self.expr(b["input"]), self.expr(b["dim"]) if "dim" in b else "-1"
        descending = f", descending={self.expr(b['descending'])}" if "descending" in b else ""
        return f"(jnp.sort({x}, axis={dim}{descending}), jnp.argsort({x}, axis={dim}{descending}, stable=True))"

    def op_einsum(self, name, b, node):
        operands = b["operands"] if isinstance(b["operands"], list) else [b["operands"]]
        return f"jnp.einsum({self.expr(b['equation'])}, {', '.join(self.expr(o) for o in operands)})"

    def op_baddbmm(self, name, b, node):
        first, second = [b[k] for k in (("batch1", "batch2") if name == "baddbmm" else ("mat1", "mat2"))]
        scale = lambda key, text: text if key not in b else f"({self.expr(b[key])} * {text})"
        return f"({scale('beta', self.expr(b['input']))} + {scale('alpha', f'({self.expr(first)} @ {self.expr(second)})')})"

    def op_linear(self, name, b, node):
        weight = self.expr(b["weight"])
        transposed = weight[:-2] if weight.endswith(".T") else f"{weight}.swapaxes(-1, -2)"
        text = f"({self.expr(b['input'])} @ {transposed})"
        if "bias" not in b or (isinstance(b["bias"], ast.Constant) and b["bias"].value is None):
            return text
        bias = self.expr(b["bias"])
        if "none" in self.facts.kinds(b["bias"]):
            return f"({text} if {bias} is None else {text} + {bias})"
        return f"({text} + {bias})"

    def _made(self, b, default: str | None) -> str:
        return self.dtype(b["dtype"]) if "dtype" in b and not (isinstance(b["dtype"], ast.Constant) and b["dtype"].value is None) else default

    def op_full0(self, name, b, node):
        return f"jnp.zeros({self.sequence(b['size'])}, dtype={self._made(b, self.wide_dtype())})"

    def op_full1(self, name, b, node):
        return f"jnp.ones({self.sequence(b['size'])}, dtype={self._made(b, self.wide_dtype())})"

    def op_full(self, name, b, node):
        return f"jnp.full({self.sequence(b['size'])}, {self.expr(b['fill_value'])}, dtype={self._made(b, self.wide_dtype())})"

    def op_arange(self, name, b, node):
        order = [self.expr(b[k]) for k in ("start", "end", "step") if k in b]
        default = "jnp.int32" if self.facts.dtype(node) in ("i", None) else self.wide_dtype()
        return f"jnp.arange({', '.join(order)}, dtype={self._made(b, default)})"

    def op_eye(self, name, b, node):
        size = ", ".join(self.expr(b[k]) for k in ("n", "m") if k in b)
        return f"jnp.eye({size}, dtype={self._made(b, self.wide_dtype())})"

    def op_tensor(self, name, b, node):
        default = {"i": "jnp.int32", "b": "bool"}.get(self.facts.dtype(node), self.wide_dtype())
        return f"jnp.asarray({self.expr(b['data'])}, dtype={self._made(b, default)})"

    def op_size(self, name, b, node):
        x = self.expr(b["input"])
        return f"{x}.shape[{self.expr(b['dim'])}]" if "dim" in b else f"{x}.shape"

    def op_div(self, name, b, node):
        mode = b["rounding_mode"].value if isinstance(b.get("rounding_mode"), ast.Constant) else None
        op = ast.Div() if mode is None else ast.FloorDiv()
        left, right = self.arithmetic(b["input"], b["other"], self.expr(b["input"]), self.expr(b["other"]), op)
        if mode == "trunc":
            return f"jnp.trunc({left} / {right})" if "f" in (self.number(b["input"]), self.number(b["other"])) else f"jax.lax.div({left}, jnp.asarray({right}, {left}.dtype))"
        return f"({left} {'/' if mode is None else '//'} {right})"

    def op_item(self, name, b, node):
        if name == "tolist" and self.facts.rank(b["input"]) == 1 and any(getattr(f, "by_counts", False) for f in self.t.functions.values()):
            return self.expr(b["input"])
        if self.numpy:
            return f"{self.expr(b['input'])}.item()"
        raise CannotTranslate(f"{name}(): a Python number from an array's value", node)

    def op_to(self, name, b, node):
        """`.to(dtype)`, `.to(device)`, `.to(other)`, `.to(device, dtype)`."""
        x, dtype = b["input"], None
        args = [a for a in node.args if a is not x] if not (node.args and node.args[0] is x) else node.args[1:]
        for keyword in node.keywords:
            if keyword.arg == "dtype":
                dtype = keyword.value
        for arg in args:
            if self.facts.is_a(arg, "dtype") or ast.unparse(arg) in {*DTYPES, *WIDE_DTYPES} or ast.unparse(arg).endswith("dtype"):
                dtype = arg
            elif self.facts.is_array(arg) or isinstance(arg, ast.Name) and not self.facts.ran(arg) and self._assigned_array(arg.id):
                return f"{self.expr(x)}.astype({self.expr(arg)}.dtype)"
            elif isinstance(arg, ast.Constant) or self.facts.is_a(arg, "device", "none", "str") or ast.unparse(arg).endswith("device"):
                continue
            else:
                raise CannotTranslate(f"to({ast.unparse(arg)})", node)
        if dtype is None or (isinstance(dtype, ast.Constant) and dtype.value is None):
            return self.expr(x)
        if self._is_wide(dtype):
            text = self.expr(x)
            return f"{self.helper('widen')}({text})" if self.facts.dtype(x) == "f" else f"{text}.astype({self.wide_dtype()})"
        return f"{self.expr(x)}.astype({self.dtype(dtype)})"

    def _assigned_array(self, name: str) -> bool:
        """Every value that the function gives to a name was an array."""
        values = [
            e for s in ast.walk(self.folded.node) if isinstance(s, ast.Assign) for t in s.targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])
            if isinstance(e, ast.Name) and e.id == name
        ]  # fmt: skip
        assigned = [s.value for s in ast.walk(self.folded.node) if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)]
        return bool(values) and all(self.facts.is_array(v) for v in assigned)

    def op_solve_triangular(self, name, b, node):
        unit = f", unitriangular={self.expr(b['unitriangular'])}" if "unitriangular" in b else ""
        return f"{self.helper('solve_triangular')}({self.expr(b['A'])}, {self.expr(b['B'])}, upper={self.expr(b['upper'])}{unit})"

    # statements

    def block(self, body, indent: str = "        ") -> list[str]:
        lines = []
        for statement in body:
            lines += self.statement(statement, indent)
        return lines or [f"{indent}pass"]

    def statement(self, node, indent) -> list[str]:
        special = self.t.statement(self, node, indent)
        if special is not None:
            return special
        method = getattr(self, f"s_{type(node).__name__}", None)
        if method is None:
            raise CannotTranslate(f"statement {type(node).__name__}", node)
        return method(node, indent)

    def s_Pass(self, node, indent):
        return [f"{indent}pass"]

    def s_Break(self, node, indent):
        return [f"{indent}break"]

    def s_Continue(self, node, indent):
        return [f"{indent}continue"]

    def s_Return(self, node, indent):
        return [f"{indent}return" + (f" {self.returned(node)}" if node.value is not None else "")]

    def returned(self, node) -> str:
        text = self.expr(node.value)
        mutated = getattr(self.folded, "mutated", ())
        return f"{text}, {', '.join(mutated)}" if mutated else text

    def s_Raise(self, node, indent):
        if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            arguments = ", ".join(self.expr(a) for a in node.exc.args)
            return [f"{indent}raise {node.exc.func.id}({arguments})"]
        return [f"{indent}raise ValueError({ast.unparse(node)!r})"]

    def target(self, node) -> str:
        if isinstance(node, ast.Name):
            return self.renames.get(node.id, node.id)
        if isinstance(node, (ast.Tuple, ast.List)):
            return f"({', '.join(self.target(e) for e in node.elts)}{',' if len(node.elts) == 1 else ''})"
        if isinstance(node, ast.Starred):
            return f"*{self.target(node.value)}"
        if isinstance(node, ast.Attribute):
            if not self.numpy and self.facts.modules(node.value):
                raise CannotTranslate(f"{ast.unparse(node)} assigned while the model runs: a module's own state", node, "keep it in the layer's cache handle")
            return f"{self.expr(node.value)}.{node.attr}"
        return f"{self.expr(node.value)}[{self.index(node.slice)}]"

    def s_Assign(self, node, indent):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript) and self.assigns_array(node.targets[0]):
            return [indent + self.store(node.targets[0], self.expr(node.value), node)]
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute) and isinstance(node.targets[0].value, ast.Name) and self.t._is_config(self, node.targets[0].value):
            config, freeze = self.target(node.targets[0].value), self.use("labkit.models.config", "freeze")
            return [f"{indent}{config} = dataclasses.replace({config}, {node.targets[0].attr}={freeze}({self.expr(node.value)}))"]
        lines = []
        if isinstance(node.value, ast.Call) and self._in_place(node.value):
            lines += [indent + self.mutation(node.value)]
            value = self.expr(node.value.func.value)
        else:
            value = self.expr(node.value)
        value, after = self.t.mutating_call(self, node.value, value)
        targets = [self.target(t) for t in node.targets]
        if after:
            targets = [f"{targets[0]}, {', '.join(after)}"]
        lines.append(f"{indent}{' = '.join([*targets, value])}")
        return lines + [f"{indent}{line}" for line in self.t.write_back(self, after)]

    def assigns_array(self, target: ast.Subscript) -> bool:
        kinds = self.facts.kinds(target.value)
        if (kinds and not self.facts.may_be_array(target.value)) or self.facts.is_a(target.slice, "str"):
            return False
        if self.facts.ran(target.value) and not self.facts.may_be_array(target.value):
            return False
        return not self.facts.is_a(target.value, "dict", "list") and not isinstance(self.t.holder(self, target.value), str)

    def store(self, target: ast.Subscript, value: str, node, method: str = "set") -> str:
        """`x[i] = v` as `x = x.at[i].set(v)`; a mask as `jnp.where`. numpy's arrays change in place."""
        base = self.target(target.value)
        if self.numpy:
            return f"{base}[{self.index(target.slice)}] {({'add': '+', 'multiply': '*'}.get(method, ''))}= {value}"
        if isinstance(target.value, ast.Subscript):
            raise CannotTranslate("assignment to an element of an element", node)
        if self._boolean_index(target.slice) and method == "set":
            if isinstance(target.slice, ast.Tuple):
                raise CannotTranslate("assignment through a mask and other indices", node)
            if isinstance(node, ast.Assign) and self.facts.may_be_array(node.value) and self.facts.rank(node.value) != 0:
                raise CannotTranslate("values put where a mask holds: how many depends on values", node, "write it with jnp.where over the whole array")
            mask, missing = self.expr(target.slice), (self.facts.rank(target.value) or 0) - (self.facts.rank(target.slice) or 0)
            mask = f"{mask}[{', '.join(['...', *['None'] * missing])}]" if missing > 0 and self.facts.rank(target.slice) else mask
            return f"{base} = jnp.where({mask}, {value}, {base})"
        numbers = {self.number(node.value), self.number(target.value)} if isinstance(node, ast.Assign) and self.facts.is_array(node.value) else set()
        if len(numbers) == 2 and numbers < {"b", "i", "f"}:
            value = f"{value}.astype({base}.dtype)"
        return f"{base} = {base}.at[{self.index(target.slice)}].{method}({value})"

    def s_AugAssign(self, node, indent):
        operators = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@"}
        load = _as_load(node.target)
        value = self.expr(node.value)
        if isinstance(node.target, ast.Subscript) and self.assigns_array(node.target):
            method = {ast.Add: "add", ast.Mult: "multiply"}.get(type(node.op))
            if method and not self._boolean_index(node.target.slice):
                return [indent + self.store(node.target, value, node, method)]
            if isinstance(node.op, ast.Sub) and not self._boolean_index(node.target.slice):
                return [indent + self.store(node.target, f"-{value}", node, "add")]
            return [indent + self.store(node.target, f"{self.expr(load)} {operators[type(node.op)]} {value}", node)]
        left, right = self.arithmetic(load, node.value, self.target(node.target), value, node.op)
        if self.facts.is_array(load) and left == self.target(node.target) and right == value and isinstance(node.target, ast.Name):
            return [f"{indent}{left} {operators[type(node.op)]}= {value}"]
        return [f"{indent}{self.target(node.target)} = {left} {operators[type(node.op)]} {right}"]

    def _read_after(self, name: str, node) -> bool:
        """Something behind the node reads the name."""
        reads = [n for n in ast.walk(self.folded.node) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) and hasattr(n, "lineno")]
        return any((n.lineno, n.col_offset) >= (node.end_lineno, node.end_col_offset) for n in reads)

    def _in_place(self, call) -> bool:
        func = call.func
        return (
            isinstance(func, ast.Attribute)
            and func.attr.endswith("_")
            and not func.attr.startswith("_")
            and func.attr not in SAME
            and func.attr[:-1] in OPS
            and (self.is_array(func.value) or not self.facts.ran(func.value))
            and isinstance(func.value, (ast.Name, ast.Subscript, ast.Attribute))
        )

    def mutation(self, call) -> str:
        """`x.add_(y)` as `x = x + y`, `x[i].add_(y)` as a store."""
        receiver = call.func.value
        value = self.operation(call.func.attr[:-1], call, [_as_load(receiver), *call.args])
        if isinstance(receiver, ast.Subscript):
            return self.store(receiver, value, call)
        if isinstance(receiver, ast.Attribute):
            raise CannotTranslate("a module's own array changed in place", call)
        return f"{self.target(receiver)} = {value}"

    def s_Expr(self, node, indent):
        value = node.value
        if isinstance(value, ast.Call) and self._in_place(value):
            receiver = value.func.value
            back = self.t.write_back(self, [receiver.id]) if isinstance(receiver, ast.Name) else []
            return [indent + self.mutation(value), *(f"{indent}{line}" for line in back)]
        text = self.expr(value)
        text, after = self.t.mutating_call(self, value, text)
        if after:
            return [f"{indent}_, {', '.join(after)} = {text}", *(f"{indent}{line}" for line in self.t.write_back(self, after))]
        return [indent + text]

    def _refuse_array_test(self, test):
        for node in ast.walk(test):
            if isinstance(node, (ast.Call, ast.Compare)) and self.facts.is_array(node):
                raise CannotTranslate(f"a branch on an array's value: {ast.unparse(test)[:80]}", node, "write both sides and choose with jnp.where")

    def s_If(self, node, indent):
        self._refuse_array_test(node.test)
        lines = [f"{indent}if {self.expr(node.test)}:", *self.side(node, True, indent + "    ")]
        if node.orelse:
            lines += [f"{indent}else:", *self.side(node, False, indent + "    ")]
        self.t.branch(self, node)
        return lines

    def side(self, node, truth: bool, indent) -> list[str]:
        """One side of a branch. What cannot be translated raises there alone when no run took that side."""
        try:
            return self.block(node.body if truth else node.orelse, indent)
        except CannotTranslate as refused:
            truths = self.facts.truths(node.test)
            if not truths or truth in truths:
                raise
            self.t.refuse(refused, self.folded)
            return [f"{indent}raise NotImplementedError({f'{refused.construct} ({refused.where})'!r})"]

    def s_For(self, node, indent):
        return [f"{indent}for {self.target(node.target)} in {self.expr(node.iter)}:", *self.block(node.body, indent + "    ")]

    def s_While(self, node, indent):
        self._refuse_array_test(node.test)
        return [f"{indent}while {self.expr(node.test)}:", *self.block(node.body, indent + "    ")]

    def s_FunctionDef(self, node, indent):
        lines = [f"{indent}def {node.name}({ast.unparse(node.args)}):"]
        return lines + self.block(node.body, indent + "    ")


def _as_load(node):
    import copy

    loaded = copy.deepcopy(node)
    if hasattr(loaded, "ctx"):
        loaded.ctx = ast.Load()
    return loaded


__all__ = ["CACHE_NAMES", "CannotTranslate", "Needs", "Rewriter"]
