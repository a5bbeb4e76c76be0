"""Trim: dead statements, parameters and return values go, across functions, until nothing changes."""

import ast

from labkit.port.facts import Facts
from labkit.port.values import CACHE_NAMES, Folded

MUTATORS = {
    "update",
    "append",
    "extend",
    "insert",
    "setdefault",
    "add",
    "clear",
    "update_conv_state",
    "update_recurrent_state",
    "update_indexer",
    "keep_state",
    "register_buffer",
}


def names_in(node) -> set[str]:
    """Names read anywhere in a node."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def sets_attributes(function) -> bool:
    """The method gives `self` an attribute."""
    found = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return any(isinstance(n.value, ast.Name) and n.value.id == "self" for n in found)


def in_place(call: ast.Call) -> bool:
    """`x.add_(...)`: an array method that changes its receiver."""
    func = call.func
    return isinstance(func, ast.Attribute) and func.attr.endswith("_") and not func.attr.endswith("__")


def _changes_weights(function, facts: Facts) -> bool:
    """The function changes a parameter or buffer of a module in place."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and in_place(n)]
    return any(isinstance(c.func.value, ast.Attribute) and facts.is_parameter(c.func.value) for c in calls)


def impure(node, facts: Facts) -> bool:
    """Whether evaluating the expression may change something besides its value."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        if in_place(call):
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr in MUTATORS and not facts.is_array(call.func.value):
            return True
        if getattr(call, "callees", None) and any(
            isinstance(a, ast.Name) and (a.id in CACHE_NAMES or facts.is_a(a, "cache", "dict", "list")) for a in [*call.args, *(k.value for k in call.keywords)]
        ):
            return True
        if getattr(call, "mutates", None):
            return True
        if set(getattr(call, "callees", ())) & (getattr(facts, "setters", set()) | getattr(facts, "changers", set())):
            return True
        if ast.unparse(call.func) == "super().__init__" and (call.args or call.keywords):
            return True
    return False


def live_block(body, live: set[str], facts: Facts):
    """(statements that matter, names live before them), from the names live after them."""
    kept = []
    for statement in reversed(body):
        statement, live = _live_statement(statement, live, facts)
        if statement is not None:
            kept.append(statement)
    return kept[::-1], live


def _targets(target) -> list[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return [t for e in target.elts for t in _targets(e)]
    return _targets(target.value) if isinstance(target, ast.Starred) else [target]


def _sets_dead(target, value, facts) -> bool:
    """`self.x = value` where nothing reads x and the value is neither a module nor a parameter."""
    if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"):
        return False
    if target.attr not in getattr(facts, "dead_attributes", ()):
        return False
    modules = facts.modules(value) or ([ast.unparse(value.func).split(".")[-1]] if isinstance(value, ast.Call) else [])
    if modules and all(m in ("Dropout", "Identity", "Dropout1d", "Dropout2d") for m in modules):
        return True
    return not (any(k.split(":")[0] in ("param", "buffer", "module", "modulelist") for k in facts.kinds(value)) or isinstance(value, ast.Call))


def _live_statement(node, live, facts):
    if isinstance(node, ast.Return):
        return node, names_in(node) if node.value is not None else set()
    if isinstance(node, ast.Raise):
        return node, names_in(node)
    if isinstance(node, ast.Assign):
        targets = [t for each in node.targets for t in _targets(each)]
        if all(isinstance(t, ast.Name) for t in targets):
            bound = {t.id for t in targets}
            if not bound & live and not impure(node.value, facts):
                return None, live
            if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name) and node.value.id == node.targets[0].id:
                return None, live
            for t in targets:
                if t.id not in live and len(targets) > 1:
                    t.id = "_"
            return node, (live - bound) | names_in(node.value)
        if len(targets) == 1 and _sets_dead(targets[0], node.value, facts):
            return None, live
        used = set().union(*(names_in(t) for t in targets)) | names_in(node.value)
        used |= {n.id for t in targets if isinstance(t, (ast.Subscript, ast.Attribute)) for n in ast.walk(t) if isinstance(n, ast.Name)}
        return node, live | used
    if isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name) and node.target.id not in live and not impure(node.value, facts):
            return None, live
        return node, live | names_in(node.value) | {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
    if isinstance(node, ast.Expr):
        return (node, live | names_in(node)) if impure(node.value, facts) or getattr(node, "keep", False) else (None, live)
    if isinstance(node, ast.If):
        node.body, live_then = live_block(node.body, set(live), facts)
        node.orelse, live_else = live_block(node.orelse, set(live), facts)
        if not node.body and not node.orelse:
            return None, live
        if not node.body:
            node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, []
        return node, live_then | live_else | names_in(node.test)
    if isinstance(node, (ast.For, ast.While)):
        before = set(live)
        inner = set(live)
        for _ in range(4):
            probe = [_copy(s) for s in node.body]
            _, live_in = live_block(probe, inner, facts)
            bound = {t.id for t in _targets(node.target) if isinstance(t, ast.Name)} if isinstance(node, ast.For) else set()
            wider = inner | (live_in - bound)
            if wider == inner:
                break
            inner = wider
        node.body, live_in = live_block(node.body, inner, facts)
        if not node.body:
            return None, before
        head = node.iter if isinstance(node, ast.For) else node.test
        return node, before | inner | names_in(head)
    if isinstance(node, ast.FunctionDef):
        return (node, (live - {node.name}) | names_in(node)) if node.name in live else (None, live)
    return node, live | names_in(node)


def _copy(node):
    import copy

    return copy.deepcopy(node)


def parameters(folded: Folded) -> list[str]:
    """The names a function takes, `self` aside, those that came through **kwargs last."""
    args = folded.original.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs] if a.arg not in ("self", "cls", "ctx")]
    return names + [e for e in folded.extras if e not in names]


class Trimmer:
    """Trims the functions of a folded program in place. After `run()` each Folded has `.parameters`: what its emitted form takes."""

    def __init__(self, functions: dict[str, Folded], facts: Facts, entries: set[str]):
        self.functions, self.facts, self.entries = functions, facts, entries
        self.keep_caches: set[str] = set()

    def run(self):
        for folded in self.functions.values():
            folded.parameters = parameters(folded)
            self._outputs_to_tuples(folded)
        self._field_reads()
        for _ in range(12):
            before = self._size()
            self.facts.dead_attributes = self._dead_attributes()
            self.facts.changers = {f.key for f in self.functions.values() if f.node.name != "__init__" and _changes_weights(f.node, self.facts)}
            setters = {f.key for f in self.functions.values() if f.node.name != "__init__" and sets_attributes(f.node)}
            for folded in self.functions.values():
                # Only a constructor calls a method for what it sets: nothing in a model changes afterwards.
                self.facts.setters = setters if folded.node.name == "__init__" else set()
                folded.node.body, folded.live = live_block(folded.node.body, set(), self.facts)
                folded.node.body = folded.node.body or [ast.Pass()]
            self._trim_parameters()
            self._trim_returns()
            if self._size() == before:
                return

    def _size(self):
        return sum(len(ast.unparse(f.node)) + len(f.parameters) for f in self.functions.values())

    # outputs with names become tuples

    def _outputs_to_tuples(self, folded):
        folded.fields = None
        for node in ast.walk(folded.node):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and _is_output_class(node.value):
                call = node.value
                kept = [k for k in call.keywords if k.arg and not (isinstance(k.value, ast.Constant) and k.value.value is None)]
                if folded.key in self.entries:
                    kept = [k for k in kept if k.arg == "logits"] or kept[:1]
                folded.fields = [k.arg for k in kept]
                node.value = kept[0].value if folded.key in self.entries else ast.Tuple([k.value for k in kept], ast.Load())

    def _field_reads(self):
        for folded in self.functions.values():
            sources = {}
            for node in ast.walk(folded.node):
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
                    fields = [self.functions[c].fields for c in getattr(node.value, "callees", []) if c in self.functions]
                    if fields and fields[0]:
                        sources[node.targets[0].id] = fields[0]

            class Reads(ast.NodeTransformer):
                def visit_Attribute(inner, node, sources=sources):
                    inner.generic_visit(node)
                    if isinstance(node.value, ast.Name) and node.value.id in sources:
                        fields = sources[node.value.id]
                        if node.attr in fields:
                            return ast.Subscript(node.value, ast.Constant(fields.index(node.attr)), ast.Load())
                        return ast.Constant(None)
                    return node

            folded.node = Reads().visit(folded.node)

    # parameters

    def _calls(self):
        for folded in self.functions.values():
            for node in ast.walk(folded.node):
                if isinstance(node, ast.Call) and getattr(node, "callees", None):
                    yield folded, node, [self.functions[c] for c in node.callees if c in self.functions]

    def _trim_parameters(self):
        used = {f.key: f.live for f in self.functions.values()}
        keep = {f.key: [p for p in f.parameters if p in used[f.key]] for f in self.functions.values()}
        changed = True
        calls = list(self._calls())
        while changed:
            changed = False
            for _, _, targets in calls:
                if len(targets) < 2:
                    continue
                wanted = {p for t in targets for p in keep[t.key]}
                for target in targets:
                    names = [p for p in target.parameters if p in wanted]
                    if names != keep[target.key]:
                        keep[target.key], changed = names, True
        for key, folded in self.functions.items():
            if key in self.entries:
                keep[key] = folded.parameters
            elif key in self.keep_caches:
                keep[key] = [p for p in folded.parameters if p in keep[key] or p in CACHE_NAMES]
            elif key.endswith(".compute_default_rope_parameters"):
                keep[key] = [p for p in folded.parameters if p in ("config", "layer_type")]
        for _, node, targets in calls:
            if not targets:
                continue
            self._drop_arguments(node, targets, keep)
        for key, folded in self.functions.items():
            folded.parameters = keep[key]

    def _dead_attributes(self) -> set[str]:
        """Attributes that constructors set and nothing reads."""
        read, written = set(), set()
        for folded in self.functions.values():
            for node in ast.walk(folded.node):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("config", "self.config"):
                    (written if isinstance(node.ctx, ast.Store) else read).add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value)
        return written - read - {"config"}

    def _drop_arguments(self, node, targets, keep):
        before, after = targets[0].parameters, keep[targets[0].key]
        if not any(isinstance(a, ast.Starred) for a in node.args):
            node.args = [a for i, a in enumerate(node.args) if i >= len(before) or before[i] in after]
        wanted = {p for t in targets for p in keep[t.key]}
        known = {p for t in targets for p in t.parameters}
        node.keywords = [k for k in node.keywords if k.arg is None or k.arg in wanted or (k.arg not in known and not _absorbs(targets))]

    # returns

    def _returns(self, folded):
        found = []

        class Collect(ast.NodeVisitor):
            def visit_FunctionDef(inner, node):
                if node is folded.node:
                    inner.generic_visit(node)

            def visit_Lambda(inner, node):
                pass

            def visit_Return(inner, node):
                found.append(node)

        Collect().visit(folded.node)
        return found

    def _trim_returns(self):
        sizes = {}
        for folded in self.functions.values():
            returns = self._returns(folded)
            lengths = {
                len(r.value.elts) if isinstance(r.value, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in r.value.elts) else 0 for r in returns
            }
            if len(lengths) == 1 and lengths != {0} and folded.key not in self.entries and not folded.key.endswith(".compute_default_rope_parameters"):
                sizes[folded.key] = lengths.pop()
        used: dict[str, set[int]] = {key: set() for key in sizes}
        sites: list = []
        for folded in self.functions.values():
            self._scan_uses(folded, sizes, used, sites)
        groups = [[t.key for t in targets] for _, _, targets in self._calls() if len(targets) > 1]
        for _ in range(4):
            for group in groups:
                if any(key in sizes for key in group):
                    if all(key in sizes and sizes[key] == sizes[group[0]] for key in group):
                        union = set().union(*(used[key] for key in group))
                        for key in group:
                            used[key] = union
                    else:
                        for key in group:
                            if key in sizes:
                                used[key] = set(range(sizes[key]))
        shrink = {key: sorted(used[key] or {0}) for key in sizes if len(used[key] or {0}) < sizes[key] or sizes[key] == 1}
        if not shrink:
            return
        for apply, key in sites:
            if key in shrink:
                apply(shrink[key])
        for key, kept in shrink.items():
            for node in self._returns(self.functions[key]):
                elements = [node.value.elts[i] for i in kept]
                node.value = elements[0] if len(elements) == 1 else ast.Tuple(elements, ast.Load())

    def _scan_uses(self, folded, sizes, used, sites):
        """Which elements of each call's tuple this function reads, and how to rewrite the reading."""
        handled = set()
        parents = {child: node for node in ast.walk(folded.node) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(folded.node):
            if not isinstance(node, ast.Call):
                continue
            keys = [c for c in getattr(node, "callees", []) if c in sizes]
            if not keys or id(node) in handled:
                continue
            key, size, parent = keys[0], sizes[keys[0]], parents.get(node)
            if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Tuple) and len(parent.targets[0].elts) == size:
                target = parent.targets[0]
                if not any(isinstance(e, ast.Starred) for e in target.elts):
                    for k in keys:
                        used[k] |= {i for i, e in enumerate(target.elts) if not (isinstance(e, ast.Name) and e.id == "_")}

                    def unpack(kept, parent=parent):
                        elements = [parent.targets[0].elts[i] for i in kept]
                        parent.targets = [elements[0] if len(elements) == 1 else ast.Tuple(elements, ast.Store())]

                    sites.append((unpack, key))
                    continue
            if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant) and isinstance(parent.slice.value, int):
                index = parent.slice.value % size
                for k in keys:
                    used[k] |= {index}

                def subscript(kept, parent=parent, node=node, index=index, parents=parents):
                    _replace(parents[parent], parent, node) if len(kept) == 1 else setattr(parent, "slice", ast.Constant(kept.index(index)))

                sites.append((subscript, key))
                continue
            if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
                name = parent.targets[0].id
                loads = [n for n in ast.walk(folded.node) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
                assigns = [n for n in ast.walk(folded.node) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
                reads = [parents.get(n) for n in loads]
                if len(assigns) == 1 and all(
                    isinstance(r, ast.Subscript) and isinstance(r.slice, ast.Constant) and isinstance(r.slice.value, int) for r in reads
                ):
                    for k in keys:
                        used[k] |= {r.slice.value % size for r in reads}

                    def through_name(kept, reads=reads, parents=parents, size=size):
                        for read in reads:
                            if len(kept) == 1:
                                _replace(parents[read], read, read.value)
                            else:
                                read.slice = ast.Constant(kept.index(read.slice.value % size))

                    sites.append((through_name, key))
                    continue
            for k in keys:
                used[k] |= set(range(sizes[k]))


def _absorbs(targets) -> bool:
    return any(t.original.args.kwarg for t in targets)


def _replace(parent, old, new):
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list):
            setattr(parent, field, [new if v is old else v for v in value])


def _is_output_class(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.split(".")[-1]
    return bool(call.keywords) and not call.args and "Output" in last and ("_" not in last or last[:1].isupper())
