"""Translate: statements. What torch changes in place is bound anew."""

import ast
import copy

from labkit.port.ops import OPS, SAME
from labkit.port.refusal import CannotTranslate


class Statements:
    """The `s_*` methods of the rewriter: (statement, indent) -> lines."""

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
        if (
            len(node.targets) == 1
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.targets[0].value, ast.Name)
            and self.t._is_config(self, node.targets[0].value)
        ):
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
            return f"{base}[{self.index(target.slice)}] { ({'add': '+', 'multiply': '*'}.get(method, '')) }= {value}"
        if isinstance(target.value, ast.Subscript) and not self.facts.is_a(target.value.value, "list"):
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
        operators = {
            ast.Add: "+",
            ast.Sub: "-",
            ast.Mult: "*",
            ast.Div: "/",
            ast.FloorDiv: "//",
            ast.Mod: "%",
            ast.Pow: "**",
            ast.BitAnd: "&",
            ast.BitOr: "|",
            ast.MatMult: "@",
        }
        load = as_load(node.target)
        value = self.expr(node.value)
        if isinstance(node.target, ast.Subscript) and self.assigns_array(node.target):
            method = {ast.Add: "add", ast.Mult: "multiply"}.get(type(node.op))
            if method and not self._boolean_index(node.target.slice):
                return [indent + self.store(node.target, value, node, method)]
            if isinstance(node.op, ast.Sub) and not self._boolean_index(node.target.slice):
                return [indent + self.store(node.target, f"-{value}", node, "add")]
            return [indent + self.store(node.target, f"{self.expr(load)} {operators[type(node.op)]} {value}", node)]
        number = self.by_number(ast.copy_location(ast.BinOp(load, node.op, node.value), node), self.target(node.target), value)
        if number is not None:
            return [f"{indent}{self.target(node.target)} = {number}"]
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
        if getattr(call, "fresh", False) and call.func.attr in ("div_", "mul_") and isinstance(receiver, ast.Attribute) and (held := self.held(receiver)):
            return f"{held}[...] = {held}[...] {'/' if call.func.attr == 'div_' else '*'} {self.expr(call.args[0])}"
        value = self.operation(call.func.attr[:-1], call, [as_load(receiver), *call.args])
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


def as_load(node):
    loaded = copy.deepcopy(node)
    if hasattr(loaded, "ctx"):
        loaded.ctx = ast.Load()
    return loaded
