"""Simplify: calls. What every caller gives reaches the function called; calls that give their argument, or a constant, go."""

import ast

from labkit.port.program import clone
from labkit.port.values import CACHE_NAMES, DEAD_ATTRIBUTES, DEAD_CALLS, GIVEN, VARIES, Const, Dtype, Ref, join


class FoldCalls:
    """The call methods of the folder."""

    def _see_Call(self, node, env):
        name, of_cache = ast.unparse(node.func), False
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
            of_cache = True
        if name.split(".")[-1] == "dropout" and name.startswith(("F.", "nn.functional.", "torch.")):
            return self._expr(node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "input"), env)
        if node.args and self._identity(node):
            return self._expr(node.args[0], env)
        if name in ("partial", "functools.partial") and node.args and self.program.resolve(self._current.file, name.split(".")[0]).file == "functools":
            return self._partial(node, env)
        node = clone(node)
        dropped = {"device", "non_blocking", "memory_format", "pin_memory", "requires_grad"}
        if ast.unparse(node.func).rpartition(".")[2] == "Parameter":
            dropped.remove("requires_grad")  # what is not trained is a buffer
        node.keywords = [k for k in node.keywords if k.arg not in dropped]
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
        if name == "hasattr" and len(node.args) == 2 and self.facts.is_array(node.args[0]) and self.facts.constant(node) == (True, False):
            return self._constant(node, False)
        # What a cache gave in the runs says nothing of what it gives once it holds tokens.
        if not callees and not of_cache and any(c.startswith("external::") for c in self.facts.callees(node)):
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
        """`cache.get_x(layer_idx)`, `cache.set_x(layer_idx, value)` of a cache class of the file that keeps one array per layer: the layer's
        recurrent state."""
        if len(node.args) not in (1, 2) or node.keywords:
            return node
        for definition in self.program.file(self._current.file).definitions.values():
            if not isinstance(definition, ast.ClassDef) or not any(ast.unparse(b).endswith("Cache") for b in definition.bases):
                continue
            method = next((m for m in definition.body if isinstance(m, ast.FunctionDef) and m.name == node.func.attr), None)
            names = [a.arg for a in method.args.args[1:]] if method is not None else []
            if len(names) != len(node.args):
                continue
            slots = [
                n for n in ast.walk(method) if isinstance(n, ast.Subscript) and ast.unparse(n.value).startswith("self.") and ast.unparse(n.slice) == names[0]
            ]
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
        if self.by_index and node.func.attr in (
            "update",
            "update_conv_state",
            "update_recurrent_state",
            "update_indexer",
            "get_conv_state",
            "get_recurrent_state",
        ):
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
        if len(truths) == 1 and not self._reads_config(node) and not self._bound_twice(node.args[0]):
            return self._constant(node, truths.pop())
        return node, VARIES

    def _bound_twice(self, node) -> bool:
        """A local that the function gives several values: what the runs saw of it is not all there is."""
        stores = [
            n
            for n in ast.walk(self._current.original)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and isinstance(node, ast.Name) and n.id == node.id
        ]
        return len(stores) > 1 and not self._is_parameter(node.id)

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

    def _partial(self, node, env):
        """`partial(f, key=value)` as a call of f that the rewriter writes as a partial one: f is given these arguments, and those of the calls to come."""
        made = ast.copy_location(ast.Call(clone(node.args[0]), [self._expr(a, env)[0] for a in node.args[1:]], []), node)
        made.keywords = [ast.keyword(k.arg, self._expr(k.value, env)[0]) for k in node.keywords]
        made.func, target = self._expr(made.func, env)
        made.partial, made.callees = True, []
        target = target if isinstance(target, Ref) else self._function_held(made.func)
        if isinstance(target, Ref) and target.symbol.kind == "function" and not made.args:
            folded = self._open(target.symbol.key)
            made.callees = [folded.key]
            self._deliver(folded.key, made, env, method=False, partial=True)
        return made, GIVEN

    def _function_held(self, node):
        """The function of the program that the constructor gives to `self.name`."""
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and self._current.cls):
            return None
        init = self.program.method(self._current.file, self._current.cls, "__init__")
        values = [s.value for s in ast.walk(init[1]) if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == f"self.{node.attr}"] if init else []
        if len(values) != 1 or not isinstance(values[0], ast.Name):
            return None
        symbol = self.program.resolve(self._current.file, values[0].id)
        return Ref(symbol) if symbol.kind == "function" else None

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

    def _deliver(self, key, node, env, method, partial=False):
        """Merge the arguments of one call into what is known of the function called. partial: the others come with later calls."""
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
        for name in given if partial else everything:
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
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and isinstance(self._literal(node), Dtype):
            return self._literal(node)
        return self._observed(node)
