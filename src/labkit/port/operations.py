"""Translate: torch operations whose jax.numpy form depends on their arguments."""

import ast

from labkit.port.dtypes import DTYPES, WIDE_DTYPES
from labkit.port.refusal import CannotTranslate


class Operations:
    """The `op_*` methods of the rewriter: (name, bound arguments, call) -> expression."""

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
        return f"{self.helper('gelu')}({self.expr(b['input'])}{', approximate=True' if approximate else ''})"

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
        if self._is_wide(dtype):
            return f"jax.nn.softmax({self.helper('widen')}({x}), axis={dim})"
        return f"{self.helper('softmax')}({x}.astype({self.dtype(dtype)}), axis={dim})"

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
            return (
                f"jnp.trunc({left} / {right})"
                if "f" in (self.number(b["input"]), self.number(b["other"]))
                else f"jax.lax.div({left}, jnp.asarray({right}, {left}.dtype))"
            )
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
            e
            for s in ast.walk(self.folded.node)
            if isinstance(s, ast.Assign)
            for t in s.targets
            for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])
            if isinstance(e, ast.Name) and e.id == name
        ]
        assigned = [
            s.value for s in ast.walk(self.folded.node) if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)
        ]
        return bool(values) and all(self.facts.is_array(v) for v in assigned)

    def op_solve_triangular(self, name, b, node):
        unit = f", unitriangular={self.expr(b['unitriangular'])}" if "unitriangular" in b else ""
        return f"{self.helper('solve_triangular')}({self.expr(b['A'])}, {self.expr(b['B'])}, upper={self.expr(b['upper'])}{unit})"
