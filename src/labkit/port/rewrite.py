"""Translate: expressions and statements of a folded function, from torch to jax.numpy, as text. Names, order and structure stay.

What a name holds comes from the record, never from a method's name, unless no run saw it and only arrays have the method.
"""

import ast
import re

from labkit.port.attributes import Attributes
from labkit.port.dtypes import DTYPES, WIDE_DTYPES
from labkit.port.facts import Facts
from labkit.port.numbers import Numbers
from labkit.port.operations import Operations
from labkit.port.ops import FLOATING, HELPERS, OPS, SAME, TENSOR_METHODS
from labkit.port.program import Program
from labkit.port.refusal import CannotTranslate
from labkit.port.statements import Statements
from labkit.port.subscripts import Subscripts


def _literal_part(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', "'").replace("{", "{{").replace("}", "}}")


TORCH_ROOTS = ("torch.nn.functional.", "nn.functional.", "F.", "torch.special.", "torch.linalg.", "torch.")


class Needs:
    """What an emitted file must import; a name that the code itself uses is imported under another."""

    def __init__(self, taken: set[str]):
        self.taken, self.names = taken, {}

    def use(self, module: str, name: str) -> str:
        alias = name if name not in self.taken else f"{name}_"
        self.names[(module, name)] = alias
        return alias


_MADE = re.compile(r"(?:torch\.)?nn\.(Softmax|Sigmoid|Tanh|ReLU|SiLU|GELU)")


class Rewriter(Operations, Statements, Numbers, Subscripts, Attributes):
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
        return 'f"' + "".join(_literal_part(v.value) if isinstance(v, ast.Constant) else f"{{{self.expr(v.value)}}}" for v in node.values) + '"'

    def x_Lambda(self, node):
        return f"(lambda {ast.unparse(node.args)}: {self.expr(node.body)})"

    def _comprehension(self, node, element, left, right):
        clauses = "".join(f" for {ast.unparse(g.target)} in {self.expr(g.iter)}" + "".join(f" if {self.expr(i)}" for i in g.ifs) for g in node.generators)
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
        return self.by_number(node, left, right) or f"({left} {operators[type(node.op)]} {right})"

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
        """ "f", "i", "b", "c" of an array; "float" or "int" of a plain number."""
        if self.facts.may_be_array(node):
            return self.facts.dtype(node)
        if isinstance(node, ast.Constant):
            return type(node.value).__name__
        kinds = set(self.facts.kinds(node)) - {"none"}
        return kinds.pop() if len(kinds) == 1 else None

    def is_array(self, node) -> bool:
        return self.facts.is_array(node)

    # calls

    def x_Call(self, node):
        if getattr(node, "partial", False):
            arguments = self.arguments(node)
            return f"{self.use('labkit.layers.functional', 'Partial')}({self.expr(node.func)}{', ' if arguments else ''}{arguments})"
        special = self.t.call(self, node)
        if special is not None:
            return special
        if isinstance(node.func, ast.Call) and len(node.args) == 1 and (made := _MADE.fullmatch(ast.unparse(node.func.func))):
            # A module without parameters, made where it is called: its function.
            call = ast.copy_location(ast.Call(node.func.func, [*node.args, *node.func.args], node.func.keywords), node)
            return self.operation(made[1].lower(), call, call.args)
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
            cast = method in ("to", "type") and any(
                ast.unparse(a) in {*DTYPES, *WIDE_DTYPES} or ast.unparse(a).endswith(".dtype") for a in [*node.args, *(k.value for k in node.keywords)]
            )
            arrays = self.is_array(receiver) or (
                not self.facts.ran(receiver) and (base in TENSOR_METHODS or base in SAME or cast) and not self._plain(receiver)
            )
            if arrays:
                if method != base and isinstance(receiver, ast.Name) and method not in SAME and self._read_after(receiver.id, node):
                    raise CannotTranslate(f"an array changed in place within an expression ({method})", node, "write it as a statement of its own")
                if method == "detach" and self.facts.dtype(receiver) not in ("i", "b") and not self._from_buffer(receiver):
                    return f"jax.lax.stop_gradient({self.expr(receiver)})"
                if method in SAME:
                    return self.expr(receiver)
                if base in OPS:
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

    def _from_buffer(self, node) -> bool:
        """A view of a buffer, which has no gradient anyway."""
        while not self.facts.is_parameter(node) and isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return all(k.split(":")[0] == "buffer" for k in self.facts.kinds(node)) and self.facts.is_parameter(node)

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
            if keyword.arg in (
                "device",
                "layout",
                "requires_grad",
                "non_blocking",
                "memory_format",
                "pin_memory",
                "copy",
                "out",
                "generator",
                "inplace",
                "training",
                "output_size",
            ):
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
