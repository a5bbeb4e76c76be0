"""Simplify: expressions, to (node, what is known of its value)."""

import ast

from labkit.port.program import Symbol, clone
from labkit.port.values import DEAD_ATTRIBUTES, GIVEN, VARIES, Const, Dtype, Ref


class FoldExpressions:
    """The expression methods of the folder."""

    @staticmethod
    def _truth(value):
        if isinstance(value, Const):
            return bool(value.value)
        return True if isinstance(value, Ref) else None

    def _constant(self, node, value):
        made = ast.Constant(value)
        return ast.copy_location(made, node), Const(value)

    def _expr(self, node, env):
        if node is None:
            return None, Const(None)
        method = getattr(self, f"_see_{type(node).__name__}", None)
        if method:
            return method(node, env)
        node = clone(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, field, self._expr(value, env)[0])
            elif isinstance(value, list):
                setattr(node, field, [self._expr(v, env)[0] if isinstance(v, ast.expr) else v for v in value])
        return node, self._observed(node)

    def _observed(self, node):
        kinds = self.facts.kinds(node)
        return GIVEN if kinds and "none" not in kinds and self.facts.is_array(node) else VARIES

    def _see_Constant(self, node, env):
        return node, Const(node.value)

    def _see_Lambda(self, node, env):
        return node, GIVEN

    def _see_ListComp(self, node, env):
        node = clone(node)
        inner = dict(env)
        for generator in node.generators:
            generator.iter = self._expr(generator.iter, inner)[0]
            self._bind(generator.target, VARIES, inner)
            generator.ifs = [self._expr(i, inner)[0] for i in generator.ifs]
        if isinstance(node, ast.DictComp):
            node.key, node.value = self._expr(node.key, inner)[0], self._expr(node.value, inner)[0]
        else:
            node.elt = self._expr(node.elt, inner)[0]
        return node, GIVEN

    _see_GeneratorExp = _see_SetComp = _see_DictComp = _see_ListComp

    def _see_Name(self, node, env):
        if node.id in env:
            value = env[node.id]
            if isinstance(value, Const) and isinstance(node.ctx, ast.Load):
                return self._constant(node, value.value)
            if isinstance(value, Dtype) and isinstance(node.ctx, ast.Load):
                return ast.copy_location(ast.parse(value.text, mode="eval").body, node), value
            if isinstance(value, Ref):
                owner, _, method = value.symbol.name.rpartition(".")
                made = ast.Attribute(ast.Name("self", ast.Load()), method, ast.Load()) if owner else ast.Name(method, ast.Load())
                return ast.copy_location(made, node), value
            return node, value if value is GIVEN else self._or_observed(node, value)
        symbol = self.program.resolve(self._current.file, node.id)
        if symbol.kind in ("function", "class"):
            return node, Ref(symbol)
        if symbol.kind == "value":
            definition = self.program.node(symbol)
            literal = self._literal(definition.value) if definition.value is not None else VARIES
            if isinstance(literal, Const):
                return self._constant(node, literal.value)
        return node, VARIES

    def _or_observed(self, node, value):
        return self._observed(node) if value is VARIES and not self._is_parameter(node.id) else value

    def _is_parameter(self, name):
        return name in self._current.arguments

    def _see_Attribute(self, node, env):
        if node.attr in DEAD_ATTRIBUTES:
            return self._constant(node, DEAD_ATTRIBUTES[node.attr])
        node = clone(node)
        node.value, base = self._expr(node.value, env)
        if isinstance(node.value, ast.Constant) and node.value.value is None:
            return node, VARIES
        if isinstance(node.value, ast.Name) and node.value.id == "self" and self._current.cls is not None:
            literal = self._fixed_attribute(self._current.file, self._current.cls, node.attr)
            if literal is not None:
                return self._constant(node, literal.value)
            found = self.program.method(self._current.file, self._current.cls, node.attr)
            if found is not None:
                key = f"{found[0].key}.{node.attr}"
                if not any(ast.unparse(d) == "property" for d in found[1].decorator_list):
                    return node, Ref(Symbol("function", found[0].file, f"{found[0].name}.{node.attr}"))
                opened = self._open(key)
                if opened is not None and opened.key not in self._done:
                    self._done.add(opened.key)
                    self._queue.append(opened.key)
        return node, self._observed(node)

    def _fixed_attribute(self, path, cls, name):
        """The literal that the constructor always gives to an attribute, when it is None, a bool or a string."""
        key = (path, cls, name)
        if key not in self._attribute_cache:
            self._attribute_cache[key] = self._find_fixed(path, cls, name)
        return self._attribute_cache[key]

    def _find_fixed(self, path, cls, name):
        values = []
        for symbol in (Symbol("class", path, cls), *self.program.bases(path, cls)):
            for method in self.program.node(symbol).body:
                for node in ast.walk(method):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
                    flat = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
                    for target in flat:
                        if isinstance(target, ast.Attribute) and target.attr == name and ast.unparse(target.value) == "self":
                            values.append(self._literal(node.value) if isinstance(node, ast.Assign) and len(flat) == 1 else VARIES)
                    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "self.register_buffer", "self.register_parameter"):
                        values += [VARIES] if len(node.args) > 1 and name in ast.unparse(node) else []
        if len(values) == 1 and isinstance(values[0], Const) and (values[0].value is None or isinstance(values[0].value, (bool, str))):
            observed = self.facts.attribute(path, cls, name).get("kinds", [])
            return values[0] if len(set(observed)) <= 1 else None
        return None

    def _see_Subscript(self, node, env):
        """`TABLE[key]` with a known key, in a table of classes or functions at module level, is its entry; `kwargs["name"]` what reaches it."""
        kwarg = self._current.original.args.kwarg
        if (
            kwarg
            and isinstance(node.value, ast.Name)
            and node.value.id == kwarg.arg
            and isinstance(node.slice, ast.Constant)
            and node.slice.value in self._current.extras
        ):
            return ast.copy_location(ast.Name(node.slice.value, ast.Load()), node), self._current.extras[node.slice.value]
        if isinstance(node.value, ast.Attribute) and node.value.attr == "layers" and self._is_cache(node.value.value, env):
            return self._expr(node.value.value, env)[0], GIVEN
        node = clone(node)
        node.value, _ = self._expr(node.value, env)
        node.slice, key = self._expr(node.slice, env)
        if isinstance(node.value, ast.Name) and node.value.id not in env and isinstance(key, Const):
            symbol = self.program.resolve(self._current.file, node.value.id)
            table = self.program.node(symbol).value if symbol.kind == "value" else None
            for name, entry in zip(table.keys, table.values) if isinstance(table, ast.Dict) else ():
                if isinstance(name, ast.Constant) and name.value == key.value and isinstance(entry, ast.Name):
                    found = self.program.resolve(symbol.file, entry.id)
                    if found.kind in ("class", "function"):
                        return ast.copy_location(ast.Name(entry.id, ast.Load()), node), Ref(found)
        return node, self._observed(node)

    def _see_UnaryOp(self, node, env):
        node = clone(node)
        node.operand, value = self._expr(node.operand, env)
        if isinstance(node.op, ast.Not) and self._truth(value) is not None:
            return self._constant(node, not self._truth(value))
        if isinstance(node.op, ast.USub) and isinstance(value, Const) and isinstance(value.value, (int, float)):
            return node, Const(-value.value)
        return node, GIVEN

    def _see_BoolOp(self, node, env):
        stop = isinstance(node.op, ast.Or)
        kept = []
        inner = dict(env)
        for operand in node.values:
            folded, value = self._expr(operand, inner)
            truth = self._truth(value)
            if truth is None:
                kept.append((folded, value))
                if not stop:
                    self._assume(folded, inner, {})
                else:
                    self._assume(folded, {}, inner)
            elif truth == stop:
                kept.append((folded, value))
                break
            elif operand is node.values[-1]:
                kept.append((folded, value))
        if len(kept) == 1:
            return kept[0]
        node = clone(node)
        if not stop and self._truth(kept[-1][1]) is False:
            return self._constant(node, False)
        if self._truth(kept[-1][1]) == (not stop) and self._is_test(node):
            kept = kept[:-1]
            if len(kept) == 1:
                return kept[0]
        node.values = [k[0] for k in kept]
        return node, VARIES

    def _is_test(self, node):
        return bool(self.facts.truths(node))

    def _see_Compare(self, node, env):
        before, node = node, clone(node)
        node.left, left = self._expr(node.left, env)
        seen = [self._expr(c, env) for c in node.comparators]
        node.comparators = [s[0] for s in seen]
        if len(node.ops) == 1:
            op, right = node.ops[0], seen[0][1]
            if isinstance(op, (ast.Eq, ast.NotEq)) and all(isinstance(e, ast.Attribute) and e.attr == "device" for e in (before.left, *before.comparators)):
                return self._constant(node, isinstance(op, ast.Eq))  # arrays are where XLA puts them
            if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                equal = None
                if isinstance(left, Const) and isinstance(right, Const):
                    equal = left == right if left.value is None or right.value is None else left.value == right.value
                elif isinstance(right, Const) and right.value is None and (left is GIVEN or isinstance(left, (Ref, Dtype))):
                    equal = False
                if equal is not None:
                    return self._constant(node, equal == isinstance(op, (ast.Is, ast.Eq)))
            elif isinstance(left, Const) and isinstance(right, Const):
                try:
                    return self._constant(node, _compare(op, left.value, right.value))
                except TypeError:
                    pass
            elif isinstance(left, Const) and isinstance(op, (ast.In, ast.NotIn)):
                try:
                    members = ast.literal_eval(node.comparators[0])
                    return self._constant(node, (left.value in members) == isinstance(op, ast.In))
                except (ValueError, TypeError, SyntaxError):
                    pass
        return node, VARIES

    def _see_BinOp(self, node, env):
        node = clone(node)
        node.left, left = self._expr(node.left, env)
        node.right, right = self._expr(node.right, env)
        if isinstance(left, Const) and isinstance(right, Const) and isinstance(node.op, ast.BitXor):
            return self._constant(node, left.value ^ right.value)
        return node, GIVEN

    def _see_IfExp(self, node, env):
        test, value = self._expr(node.test, env)
        truth = self._truth(value)
        if truth is not None:
            return self._expr(node.body if truth else node.orelse, env)
        node = clone(node)
        env_then, env_else = dict(env), dict(env)
        self._assume(test, env_then, env_else)
        node.test = test
        node.body, a = self._expr(node.body, env_then)
        node.orelse, b = self._expr(node.orelse, env_else)
        return node, a if a is GIVEN and b is GIVEN else VARIES


def _compare(op, left, right):
    table = {
        ast.Lt: lambda: left < right,
        ast.LtE: lambda: left <= right,
        ast.Gt: lambda: left > right,
        ast.GtE: lambda: left >= right,
        ast.In: lambda: left in right,
        ast.NotIn: lambda: left not in right,
    }
    return table[type(op)]()
