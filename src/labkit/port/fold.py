"""Simplify: what no configuration can change is folded away, across functions, until nothing changes.

Values are followed from the entry's defaults through every call: arguments that no caller gives, training, dropout, output capture, gradient checkpointing,
other attention backends. Branches that the configuration chooses stay.
"""

import ast
import dataclasses

from labkit.port.facts import Facts
from labkit.port.program import Program, Symbol, clone


class _Unknown:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


VARIES = _Unknown("VARIES")
GIVEN = _Unknown("GIVEN")
"""Any value but None."""


@dataclasses.dataclass(frozen=True)
class Const:
    value: object

    def __eq__(self, other):
        return isinstance(other, Const) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self):
        return hash((type(self.value), repr(self.value)))


@dataclasses.dataclass(frozen=True)
class Ref:
    """A function or class of the program."""

    symbol: Symbol


def join(a, b):
    if a == b:
        return a
    if all(v is GIVEN or isinstance(v, Ref) or (isinstance(v, Const) and v.value is not None) for v in (a, b)):
        return GIVEN
    return VARIES


@dataclasses.dataclass
class Folded:
    """One function after simplification. arguments: what every caller gives; extras: keywords that reach it through **kwargs."""

    key: str
    node: ast.FunctionDef
    original: ast.FunctionDef
    file: str
    cls: str | None
    arguments: dict = dataclasses.field(default_factory=dict)
    extras: dict = dataclasses.field(default_factory=dict)
    callees: set = dataclasses.field(default_factory=set)


GIVEN_AT_ENTRY = {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "past_key_value", "cache_params", "layer_past"}
CACHE_NAMES = {"cache", "past_key_values", "past_key_value", "cache_params", "layer_past"}
DEAD_ATTRIBUTES = {"is_cuda": False, "return_dict": True, "use_return_dict": True, "output_attentions": False, "output_hidden_states": False, "training": False, "gradient_checkpointing": False, "_attn_implementation": "eager", "is_gradient_checkpointing": False, "add_cross_attention": False, "is_encoder_decoder": False}
DEAD_CALLS = {
    "is_torchdynamo_compiling": False,
    "is_flash_attention_requested": False,
    "is_tracing": False,
    "torch.is_grad_enabled": False,
    "torch.jit.is_tracing": False,
    "is_torchdynamo_exporting": False,
    "is_fx_tracing": False,
    "torch.is_autocast_enabled": False,
    "is_deepspeed_zero3_enabled": False,
    "is_fsdp_managed_module": False,
    "torch.compiler.is_compiling": False,
}
_LOADING = ("self._keys_to_ignore_on_load", "self._tied_weights_keys")
_NO_EFFECT_ROOTS = ("logger", "warnings", "torch._assert", "torch._check", "warn_if", "torch._dynamo", "use_kernel", "gc")


class Folder:
    """Folds every function that the entry reaches. `run()` -> key -> Folded."""

    def __init__(self, program: Program, facts: Facts):
        self.program, self.facts = program, facts
        self.functions: dict[str, Folded] = {}
        self._queue: list[str] = []
        self._attribute_cache: dict = {}
        self.by_index = False
        self._done: set[str] = set()

    def run(self, key: str, cls: Symbol) -> dict[str, Folded]:
        """Fold from the entry's forward method on."""
        entry = self._open(key)
        names = entry.original.args
        defaults = self._defaults(entry)
        for arg in [*names.args, *names.kwonlyargs]:
            if arg.arg == "self":
                continue
            if arg.arg in GIVEN_AT_ENTRY:
                entry.arguments[arg.arg] = GIVEN
            elif arg.arg == "use_cache":
                entry.arguments[arg.arg] = Const(True)
            elif arg.arg in defaults:
                entry.arguments[arg.arg] = defaults[arg.arg]
            else:
                entry.arguments[arg.arg] = VARIES
        self._queue.append(key)
        while self._queue:
            self._fold(self.functions[self._queue.pop(0)])
        return self.functions

    def add(self, key: str, arguments: dict) -> Folded | None:
        """Fold one more function (a method that another pass needs), its arguments unknown unless given."""
        folded = self._open(key)
        if folded is None:
            return None
        for arg in [*folded.original.args.args, *folded.original.args.kwonlyargs]:
            if arg.arg not in ("self", "ctx"):
                folded.arguments.setdefault(arg.arg, arguments.get(arg.arg, VARIES))
        self._queue.append(key)
        while self._queue:
            self._fold(self.functions[self._queue.pop(0)])
        return folded

    def _open(self, key: str) -> Folded | None:
        if key in self.functions:
            return self.functions[key]
        node = self.program.function(key)
        if node is None:
            return None
        path, _, qualname = key.partition("::")
        cls = qualname.split(".")[0] if "." in qualname else None
        if cls is not None:
            owner, node = self.program.method(path, cls, qualname.split(".")[1])
            key = f"{owner.key}.{qualname.split('.')[1]}"
            path, cls = owner.file, owner.name
            if key in self.functions:
                return self.functions[key]
        self.functions[key] = Folded(key, clone(node), node, path, cls)
        return self.functions[key]

    def _defaults(self, folded: Folded) -> dict:
        args = folded.original.args
        positional = [*args.posonlyargs, *args.args]
        pairs = list(zip(positional[len(positional) - len(args.defaults) :], args.defaults)) + [
            (a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None
        ]
        return {arg.arg: self._literal(default) for arg, default in pairs}

    def _literal(self, node):
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            return VARIES
        return Const(value) if value is None or isinstance(value, (bool, int, float, str)) else GIVEN

    # one function

    def _fold(self, folded: Folded):
        self._current = folded
        env = dict(folded.arguments)
        if folded.original.args.vararg:
            env[folded.original.args.vararg.arg] = VARIES
        node = clone(folded.original)
        node.body = self._block(node.body, env)[0] or [ast.Pass()]
        folded.node = node

    def _block(self, body, env):
        """(statements, whether control never passes the end)."""
        out = []
        for statement in body:
            added, ended = self._statement(statement, env)
            out += added
            if ended:
                return out, True
        return out, False

    def _statement(self, node, env):
        method = getattr(self, f"_on_{type(node).__name__}", None)
        return method(node, env) if method else ([node], False)

    def _on_Pass(self, node, env):
        return [], False

    def _on_Import(self, node, env):
        return [], False

    _on_ImportFrom = _on_Import
    _on_Assert = _on_Global = _on_Nonlocal = _on_Import

    def _on_Delete(self, node, env):
        return [], False

    def _on_FunctionDef(self, node, env):
        env[node.name] = GIVEN
        inner = dict(env) | {a.arg: VARIES for a in [*node.args.args, *node.args.kwonlyargs]}
        node = clone(node)
        node.body = self._block(node.body, inner)[0] or [ast.Pass()]
        return [node], False

    def _on_Raise(self, node, env):
        return [node], True

    def _on_Break(self, node, env):
        return [node], True

    _on_Continue = _on_Break

    def _on_Return(self, node, env):
        node = clone(node)
        if node.value is not None:
            node.value = self._expr(node.value, env)[0]
        return [node], True

    def _on_Expr(self, node, env):
        value = node.value
        if isinstance(value, ast.Constant) or ast.unparse(value).startswith(_LOADING):
            return [], False
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func)
            if name.startswith(_NO_EFFECT_ROOTS) or name.split(".")[-1].startswith("warn"):
                return [], False
        if isinstance(value, ast.Yield):
            return [node], False
        node = clone(node)
        node.value, _ = self._expr(value, env)
        return ([] if isinstance(node.value, (ast.Constant, ast.Name)) else [node]), False

    def _bind(self, target, value, env):
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._bind(element.value if isinstance(element, ast.Starred) else element, VARIES, env)

    def _target(self, target, env):
        if isinstance(target, ast.Subscript):
            target = clone(target)
            target.value = self._expr(target.value, env)[0]
            target.slice = self._expr(target.slice, env)[0]
        return target

    def _on_Assign(self, node, env):
        if any(ast.unparse(target).startswith(_LOADING) for target in node.targets):
            return [], False
        node = clone(node)
        prelude = self._walrus(node, env)
        node.value, value = self._expr(node.value, env)
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
            targets, values = node.targets[0].elts, node.value.elts
            if len(targets) == len(values) and not any(isinstance(e, ast.Starred) for e in [*targets, *values]):
                found = [self._expr(v, env)[1] for v in values]
                for target, each in zip(targets, found):
                    self._bind(target, each, env)
                return [*prelude, node], False
        node.targets = [self._target(t, env) for t in node.targets]
        for target in node.targets:
            self._bind(target, value, env)
        if isinstance(value, Ref) and all(isinstance(t, ast.Name) for t in node.targets):
            return prelude, False
        return [*prelude, node], False

    def _on_AnnAssign(self, node, env):
        if node.value is None:
            return [], False
        plain = ast.Assign(targets=[node.target], value=node.value)
        ast.copy_location(plain, node)
        return self._on_Assign(plain, env)

    def _on_AugAssign(self, node, env):
        if isinstance(node.target, ast.Attribute) and self._is_cache(node.target.value, env):
            return [], False
        node = clone(node)
        node.value = self._expr(node.value, env)[0]
        node.target = self._target(node.target, env)
        self._bind(node.target, GIVEN, env)
        return [node], False

    def _on_If(self, node, env):
        node = clone(node)
        self._keep_masks(node)
        prelude = self._walrus(node, env, only="test")
        node.test, value = self._expr(node.test, env)
        truth = self._truth(value)
        if truth is not None:
            body, ended = self._block(node.body if truth else node.orelse, env)
            return [*prelude, *body], ended
        env_then, env_else = dict(env), dict(env)
        self._assume(node.test, env_then, env_else)
        node.body, ended_then = self._block(node.body, env_then)
        node.orelse, ended_else = self._block(node.orelse, env_else)
        if self._only_raises(node.body):
            env.clear()
            env.update(env_else)
            return [*prelude, *node.orelse], ended_else
        if self._only_raises(node.orelse):
            node.orelse, env_else, ended_else = [], None, True
        if ended_then and ended_else:
            env.update(env_then)
        elif ended_then:
            env.clear()
            env.update(env_else)
        elif ended_else:
            env.clear()
            env.update(env_then)
        else:
            merged = {k: join(env_then[k], env_else[k]) if k in env_then and k in env_else else VARIES for k in {*env_then, *env_else}}
            env.clear()
            env.update(merged)
        if not node.body and not node.orelse:
            return prelude, False
        if not node.body:
            node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, []
        return [*prelude, node], ended_then and ended_else and bool(node.orelse)

    @staticmethod
    def _keep_masks(node):
        """`if seq_len == 1 or ...: return x, None`: a single token leaves out a mask, as a cache that grows allows. One of fixed size needs it."""
        leaves = len(node.body) == 1 and isinstance(node.body[0], ast.Return) and isinstance(node.body[0].value, ast.Tuple)
        if leaves and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
            one = [v for v in node.test.values if isinstance(v, ast.Compare) and isinstance(v.ops[0], ast.Eq) and ast.unparse(v.comparators[0]) == "1"]
            rest = [v for v in node.test.values if v not in one]
            if one and rest and any(isinstance(e, ast.Constant) and e.value is None for e in node.body[0].value.elts):
                node.test = rest[0] if len(rest) == 1 else ast.copy_location(ast.BoolOp(ast.Or(), rest), node.test)

    def _assume(self, test, env_then, env_else):
        """`x is not None` makes x given where it holds."""
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and len(test.ops) == 1:
            other = test.comparators[0]
            if isinstance(other, ast.Constant) and other.value is None:
                given, none = (env_then, env_else) if isinstance(test.ops[0], ast.IsNot) else (env_else, env_then)
                given[test.left.id], none[test.left.id] = GIVEN, Const(None)

    @staticmethod
    def _only_raises(body):
        return bool(body) and isinstance(body[-1], ast.Raise) and all(isinstance(s, (ast.Raise, ast.Assign, ast.Expr)) for s in body)

    def _walrus(self, node, env, only=None):
        """Assignments written inside an expression, as statements before it."""
        out = []

        class Hoist(ast.NodeTransformer):
            def visit_NamedExpr(inner, found):
                assign = ast.Assign(targets=[ast.Name(found.target.id, ast.Store())], value=found.value)
                ast.copy_location(assign, found)
                out.append(assign)
                name = ast.Name(found.target.id, ast.Load())
                if hasattr(found, "origin"):
                    name.origin = found.origin
                return ast.copy_location(name, found)

            def visit_Lambda(inner, found):
                return found

            visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_Lambda

        if only:
            setattr(node, only, Hoist().visit(getattr(node, only)))
        else:
            node.value = Hoist().visit(node.value)
        result = []
        for assign in out:
            result += self._on_Assign(assign, env)[0]
        return result

    def _assigned(self, body) -> set[str]:
        return {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))}

    def _on_For(self, node, env):
        node = clone(node)
        node.iter, _ = self._expr(node.iter, env)
        for name in self._assigned([*node.body, ast.Expr(node.target)]):
            env[name] = VARIES if name not in env or env[name] is not GIVEN else GIVEN
        self._bind(node.target, VARIES, env)
        node.body, _ = self._block(node.body, env)
        for name in self._assigned(node.body):
            env[name] = join(env.get(name, VARIES), VARIES) if env.get(name) is not GIVEN else GIVEN
        node.orelse = []
        return ([node] if node.body else []), False

    def _on_While(self, node, env):
        node = clone(node)
        for name in self._assigned(node.body):
            env[name] = VARIES
        node.test, value = self._expr(node.test, env)
        if self._truth(value) is False:
            return [], False
        node.body, _ = self._block(node.body, env)
        return [node], False

    def _on_With(self, node, env):
        return self._block(node.body, env)

    def _on_Try(self, node, env):
        return self._block(node.body, env)

    # expressions: (node, value)

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
        if kwarg and isinstance(node.value, ast.Name) and node.value.id == kwarg.arg and isinstance(node.slice, ast.Constant) and node.slice.value in self._current.extras:
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
        node = clone(node)
        node.left, left = self._expr(node.left, env)
        seen = [self._expr(c, env) for c in node.comparators]
        node.comparators = [s[0] for s in seen]
        if len(node.ops) == 1:
            op, right = node.ops[0], seen[0][1]
            if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                equal = None
                if isinstance(left, Const) and isinstance(right, Const):
                    equal = left == right if left.value is None or right.value is None else left.value == right.value
                elif isinstance(right, Const) and right.value is None and (left is GIVEN or isinstance(left, Ref)):
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

    # calls

    def _see_Call(self, node, env):
        name = ast.unparse(node.func)
        if name in DEAD_CALLS or name.split(".")[-1] in DEAD_CALLS and "." not in name:
            return self._constant(node, DEAD_CALLS.get(name, DEAD_CALLS.get(name.split(".")[-1])))
        if name == "isinstance" and len(node.args) == 2:
            return self._isinstance(node, env)
        if name == "typing.cast" or name == "cast" and len(node.args) == 2:
            return self._expr(node.args[1], env)
        if name == "ALL_ATTENTION_FUNCTIONS.get_interface" and len(node.args) == 2:
            return self._expr(node.args[1], env)
        if name == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant) and node.args[1].value in DEAD_ATTRIBUTES:
            return self._constant(node, DEAD_ATTRIBUTES[node.args[1].value])
        if isinstance(node.func, ast.Attribute) and self._is_cache(node.func.value, env):
            if node.func.attr == "is_recording_past":
                return self._constant(node, True)
            node = self._cache_call(self._own_state(node))
        if name.split(".")[-1] == "dropout" and name.startswith(("F.", "nn.functional.", "torch.")):
            return self._expr(node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "input"), env)
        if node.args and self._identity(node):
            return self._expr(node.args[0], env)
        node = clone(node)
        node.keywords = [k for k in node.keywords if k.arg not in ("device", "non_blocking", "memory_format", "pin_memory", "requires_grad")]
        kwarg = self._current.original.args.kwarg.arg if self._current.original.args.kwarg else None
        if kwarg and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == kwarg:
            return self._from_kwargs(node, env)
        node.func, target = self._expr(node.func, env)
        node.args = [self._expr(a, env)[0] if not isinstance(a, ast.Starred) else self._starred(a, env) for a in node.args]
        keywords = []
        for keyword in node.keywords:
            if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == kwarg:
                given = {k.arg for k in node.keywords}
                for extra in self._current.extras:
                    if extra not in given:
                        made = ast.keyword(extra, ast.Name(extra, ast.Load()))
                        made.value, _ = self._expr(made.value, {**env, extra: env.get(extra, self._current.extras[extra])})
                        keywords.append(made)
                continue
            keyword.value, _ = self._expr(keyword.value, env)
            keywords.append(keyword)
        node.keywords = keywords
        callees = self._callees(node, target)
        node.callees = [f.key for f in map(self._open, callees) if f is not None]
        for key in node.callees:
            self._deliver(key, node, env, method=self._is_method(node, target, key))
        if not callees and any(c.startswith("external::") for c in self.facts.callees(node)):
            known, value = self.facts.constant(node)
            if known and (isinstance(value, bool) or value is None) and not self._reads_config(node) and name != "super().__init__" and not self._fills(node):
                return self._constant(node, value)
        return node, self._observed(node)

    def _fills(self, node) -> bool:
        """A method of a list or a dictionary, or of a module that gets a buffer: called for what it changes."""
        return isinstance(node.func, ast.Attribute) and (self.facts.is_a(node.func.value, "list", "dict") or node.func.attr == "register_buffer")

    def _is_cache(self, node, env):
        return isinstance(node, ast.Name) and node.id in CACHE_NAMES or "cache" in self.facts.kinds(node)

    def _own_state(self, node):
        """`cache.get_x(layer_idx)`, `cache.set_x(layer_idx, value)` of a cache class of the file that keeps one array per layer: the layer's recurrent state."""
        if len(node.args) not in (1, 2) or node.keywords:
            return node
        for name, definition in self.program.file(self._current.file).definitions.items():
            if not isinstance(definition, ast.ClassDef) or not any(ast.unparse(b).endswith("Cache") for b in definition.bases):
                continue
            method = next((m for m in definition.body if isinstance(m, ast.FunctionDef) and m.name == node.func.attr), None)
            names = [a.arg for a in method.args.args[1:]] if method is not None else []
            if len(names) != len(node.args):
                continue
            slots = [n for n in ast.walk(method) if isinstance(n, ast.Subscript) and ast.unparse(n.value).startswith("self.") and ast.unparse(n.slice) == names[0]]
            given = [n for n in ast.walk(method) if isinstance(n, ast.Return) and n.value in slots]
            stored = [n for n in ast.walk(method) if isinstance(n, ast.Assign) and n.targets[0] in slots and ast.unparse(n.value) == names[-1]]
            if len(names) == 1 and given or len(names) == 2 and stored:
                made = clone(node)
                made.func.attr, made.args = ("get_recurrent_state", []) if given else ("update_recurrent_state", [made.args[1]])
                if hasattr(made, "origin"):
                    del made.origin
                return made
        return node

    def _cache_call(self, node):
        """Without the layer's index: the handle that a layer is given is its own. Layers that do not run as one stack keep it."""
        keep = {"update": 2, "update_conv_state": 1, "update_recurrent_state": 1, "update_indexer": 1, "get_mask_sizes": 1}.get(node.func.attr, 0)
        node = clone(node)
        if self.by_index and node.func.attr in ("update", "update_conv_state", "update_recurrent_state", "update_indexer", "get_conv_state", "get_recurrent_state"):
            node.keywords = [k for k in node.keywords if k.arg in ("layer_idx", "state_idx", "conv_kernel_size")]
            return node
        extra = node.args[keep + 1 :] if node.func.attr.startswith(("get_conv", "get_rec")) else []
        node.args = node.args[:keep]
        node.keywords = [k for k in node.keywords if k.arg in ("state_idx", "conv_kernel_size", "query_length")]
        node.keywords += [ast.keyword("state_idx", extra[0])] if extra else []
        return node

    def _identity(self, node):
        """Modules and functions that give their argument in evaluation."""
        func, cls = node.func, self._current.cls
        modules = self.facts.modules(func)
        if not modules and cls and isinstance(func, ast.Attribute) and ast.unparse(func.value) == "self":
            kinds = self.facts.attribute(self._current.file, cls, func.attr).get("kinds", [])
            modules = [k.split(":")[1] for k in kinds if k.startswith("module:")]
        if modules and all(m in ("Dropout", "Identity", "Dropout1d", "Dropout2d") for m in modules):
            return True
        return isinstance(node.func, ast.Name) and node.func.id in ("slice_logits_to_keep", "nested_checkpoint")

    def _reads_config(self, node):
        return "config" in ast.unparse(node) or "hasattr" in ast.unparse(node.func) or "getattr" in ast.unparse(node.func)

    def _starred(self, node, env):
        node = clone(node)
        node.value = self._expr(node.value, env)[0]
        return node

    def _isinstance(self, node, env):
        node = clone(node)
        node.args[0], value = self._expr(node.args[0], env)
        wanted = ast.unparse(node.args[1])
        kinds = self.facts.kinds(node.args[0])
        if isinstance(value, Const):
            return self._constant(node, type(value.value).__name__ in wanted.replace("(", "").replace(")", "").split(", "))
        if kinds and any(k.startswith(("array", "param", "module", "cache")) for k in kinds) and not any(k == "dict" for k in kinds) and wanted == "dict":
            return self._constant(node, False)
        truths = set(self.facts.truths(node)) or ({self.facts.constant(node)[1]} if self.facts.constant(node)[0] else set())
        if len(truths) == 1 and not self._reads_config(node):
            return self._constant(node, truths.pop())
        return node, VARIES

    def _from_kwargs(self, node, env):
        """`kwargs.get("name", default)` and `kwargs.pop(...)`."""
        if node.func.attr in ("get", "pop") and node.args and isinstance(node.args[0], ast.Constant):
            name = node.args[0].value
            if name in self._current.extras:
                return ast.copy_location(ast.Name(name, ast.Load()), node), self._current.extras[name]
            return self._expr(node.args[1], env) if len(node.args) > 1 else self._constant(node, None)
        if node.func.attr in ("get", "pop") and node.args and not self._current.extras:
            return self._expr(node.args[1], env) if len(node.args) > 1 else self._constant(node, None)
        return node, VARIES

    def _callees(self, node, target) -> list[str]:
        if isinstance(target, Ref):
            if target.symbol.kind == "class":
                return [f"{target.symbol.key}.__init__"]
            return [target.symbol.key]
        func = node.func
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call) and ast.unparse(func.value.func) == "super" and self._current.cls:
            for base in self.program.bases(self._current.file, self._current.cls):
                if self.program.method(base.file, base.name, func.attr):
                    return [f"{base.key}.{func.attr}"]
            return []
        return [self._constructor(c) for c in self.facts.callees(node) if not c.startswith("external::") and "<" not in c]

    def _constructor(self, key: str) -> str:
        """The constructor when a class was called: one out of a table of classes, or chosen by a condition."""
        path, _, name = key.partition("::")
        if "." not in name and (self.program.folder / path).is_file() and isinstance(self.program.file(path).definitions.get(name), ast.ClassDef):
            return f"{key}.__init__"
        return key

    @staticmethod
    def _is_method(node, target, key):
        return "." in key.partition("::")[2]

    def _deliver(self, key, node, env, method):
        """Merge the arguments of one call into what is known of the function called."""
        folded = self._open(key)
        if folded is None:
            return
        self._current.callees.add(folded.key)
        args = folded.original.args
        static = any(ast.unparse(d) == "staticmethod" for d in folded.original.decorator_list)
        names = [a.arg for a in [*args.posonlyargs, *args.args]]
        if method and names and (names[0] == "ctx" or not static and names[0] in ("self", "cls")):
            names = names[1:]
        defaults = self._defaults(folded)
        given: dict = {}
        extras: dict = {}
        unknown = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        for name, arg in zip(names, node.args):
            if isinstance(arg, ast.Starred):
                break
            given[name] = self._value(arg, env)
        everything = {*names, *(a.arg for a in args.kwonlyargs)}
        for keyword in node.keywords:
            if keyword.arg in everything:
                given[keyword.arg] = self._value(keyword.value, env)
            elif keyword.arg is not None and args.kwarg:
                extras[keyword.arg] = self._value(keyword.value, env)
        changed = False
        for name in everything:
            value = given.get(name, VARIES if unknown else defaults.get(name, VARIES))
            before = folded.arguments.get(name)
            merged = value if before is None else join(before, value)
            if merged != before:
                folded.arguments[name], changed = merged, True
        for name, value in extras.items():
            before = folded.extras.get(name)
            merged = value if before is None else join(before, value)
            if merged != before:
                folded.extras[name], changed = merged, True
        if changed or folded.key not in self._done:
            self._done.add(folded.key)
            if folded.key not in self._queue:
                self._queue.append(folded.key)

    def _value(self, node, env):
        if isinstance(node, ast.Constant):
            return Const(node.value)
        if isinstance(node, ast.Name) and node.id in env:
            value = env[node.id]
            return value if value is not VARIES else self._or_observed(node, VARIES)
        if isinstance(node, ast.Name):
            symbol = self.program.resolve(self._current.file, node.id)
            return Ref(symbol) if symbol.kind in ("function", "class") else VARIES
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.Lambda)):
            return GIVEN
        return self._observed(node)


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
