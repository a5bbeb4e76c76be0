"""Simplify: what no configuration can change is folded away, across functions, until nothing changes.

Values are followed from the entry's defaults through every call: arguments that no caller gives, training, dropout, output capture, gradient checkpointing,
other attention backends. Branches that the configuration chooses stay.
"""

import ast

from labkit.port.dtypes import DTYPES, WIDE_DTYPES
from labkit.port.facts import Facts
from labkit.port.fold_calls import FoldCalls
from labkit.port.fold_expressions import FoldExpressions
from labkit.port.program import Program, Symbol, clone
from labkit.port.shared_weights import TABLE, fills_table
from labkit.port.values import _LOADING, _NO_EFFECT_ROOTS, CACHE_NAMES, GIVEN, GIVEN_AT_ENTRY, VARIES, Const, Dtype, Folded, Ref, join
from labkit.port.without_gradients import after_block, chosen, gradients_enter, stops, without

ALL_DTYPES = {*DTYPES, *WIDE_DTYPES}


class Folder(FoldExpressions, FoldCalls):
    """Folds every function that the entry reaches. `run()` -> key -> Folded."""

    def __init__(self, program: Program, facts: Facts):
        self.program, self.facts = program, facts
        self.functions: dict[str, Folded] = {}
        self._queue: list[str] = []
        self._attribute_cache: dict = {}
        self.by_index = False
        self._done: set[str] = set()
        self._contexts: dict[tuple[str, str], ast.expr | bool] = {}
        self._inference = 0

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
        if ast.unparse(node) in ALL_DTYPES:
            return Dtype(ast.unparse(node))
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
            original = self._current.original
            if any(stops(d) for d in original.decorator_list) and gradients_enter(original, self.facts):
                node.value = without(node.value, self.facts)
        return [node], True

    def _on_Expr(self, node, env):
        value = node.value
        if isinstance(value, ast.Constant) or self._about_loading(value):
            return [], False
        if ast.unparse(value) == "self.post_init()" and fills_table(self.program, self._current.file, self._current.cls):
            node.keep = True
            return [node], False
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func)
            if name.startswith(_NO_EFFECT_ROOTS) or name.split(".")[-1].startswith("warn"):
                return [], False
        if isinstance(value, ast.Yield):
            return [node], False
        node = clone(node)
        node.value, _ = self._expr(value, env)
        return ([] if isinstance(node.value, (ast.Constant, ast.Name)) else [node]), False

    def _about_loading(self, node) -> bool:
        """What only loading reads; a table of tied weights that the class fills itself says what its layers share."""
        text = ast.unparse(node)
        return text.startswith(_LOADING) and not (text.startswith(f"self.{TABLE}") and fills_table(self.program, self._current.file, self._current.cls))

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
        if any(self._about_loading(target) for target in node.targets):
            return [], False
        if isinstance(node.targets[0], ast.Name) and (when := True if stops(node.value) else chosen(node.value)) is not None:
            self._contexts[self._current.key, node.targets[0].id] = when
            return [], False
        if isinstance(node.value, ast.Constant) and isinstance(node.targets[0], ast.Attribute) and self._is_cache(node.targets[0].value, env):
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
        inference = "not self.training" in ast.unparse(node.test)
        node.test, value = self._expr(node.test, env)
        truth = True if isinstance(node.test, ast.Name) and node.test.id in CACHE_NAMES and value is GIVEN else self._truth(value)
        if truth is not None:
            self._inference += inference and truth
            body, ended = self._block(node.body if truth else node.orelse, env)
            self._inference -= inference and truth
            return [*prelude, *body], ended
        env_then, env_else = dict(env), dict(env)
        self._assume(node.test, env_then, env_else)
        self._inference += inference  # what inference alone takes says nothing of training
        node.body, ended_then = self._block(node.body, env_then)
        self._inference -= inference
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
        body, ended = self._block(node.body, env)
        whens = [self._without_gradients(item.context_expr) for item in node.items]
        when = next((w for w in whens if w is not None), None)
        if when is None or self._inference or not node.body:
            return body, ended
        after = after_block(body, node.body, self._current.original, self.facts, when is True)
        if when is not True:
            test, value = self._expr(when, env)
            truth = self._truth(value)
            if truth is None and after:
                after = [ast.copy_location(ast.If(test, after, []), node)]
            elif truth is False:
                after = []
        return [*body, *after], ended

    def _without_gradients(self, context):
        """None, True, or the condition under which the context has no gradients."""
        if isinstance(context, ast.Name):
            return self._contexts.get((self._current.key, context.id))
        return True if stops(context) else chosen(context)

    def _on_Try(self, node, env):
        return self._block(node.body, env)
