"""Rewrites the syntax tree of a modeling file so that running it tells what every expression held.

The copy computes what the original computes: every expression is passed through a function that returns it. Positions stay those of the original, so that
tracebacks and `inspect.getsource` still find the original text.
"""

import ast
from collections.abc import Callable

REPORT, TEST, CALLEE, ENTER = "_record_value_", "_record_test_", "_record_callee_", "_record_enter_"

# Expressions whose kind the text alone does not tell. A slice is no value, and an f-string's inner positions are not those of the file.
_REPORTED = (
    ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Dict, ast.Set,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr,
)  # fmt: skip
_COMPILING = ("torch.jit.script", "torch.jit.script_if_tracing", "torch.compile", "jit.script")


def position_key(node: ast.AST) -> str:
    """ "line:col:endline:endcol" of a node, as `ast` counts: lines from 1, columns in UTF-8 bytes from 0."""
    return f"{node.lineno}:{node.col_offset}:{node.end_lineno}:{node.end_col_offset}"


def instrument(tree: ast.Module, allocate: Callable[[str, str], int]) -> ast.Module:
    """The tree rewritten in place. allocate(what, key): the number of a place to report to; what is "node", "test", "callee" or "function".

    For "function" the key is the qualified name and the keys of its parameters, separated by spaces. Decorators, defaults, annotations, base classes and
    patterns of match statements stay as they are, except that decorators which compile are dropped.
    """
    rewritten = _Instrumenter(allocate).visit(tree)
    return ast.fix_missing_locations(rewritten)


class _Instrumenter(ast.NodeTransformer):
    def __init__(self, allocate):
        self.allocate, self.scopes = allocate, []

    def _call(self, function: str, what: str, node: ast.AST, value: ast.expr) -> ast.expr:
        name = ast.copy_location(ast.Name(function, ast.Load()), node)
        number = ast.copy_location(ast.Constant(self.allocate(what, position_key(node))), node)
        return ast.copy_location(ast.Call(name, [number, value], []), node)

    def _test(self, node: ast.expr) -> ast.expr:
        return self._call(TEST, "test", node, self.visit(node))

    def visit(self, node):
        if isinstance(node, ast.JoinedStr):
            return node
        if isinstance(node, ast.Name) and node.id in ("super", "__class__"):
            return node
        if not isinstance(node, _REPORTED) or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return super().visit(node)
        visited = super().visit(node)
        if isinstance(node, ast.Tuple) and any(isinstance(element, ast.Slice) for element in node.elts):
            return visited
        return self._call(REPORT, "node", node, visited)

    def visit_Call(self, node):
        callee = self._call(CALLEE, "callee", node, self.visit(node.func))
        node.func = node.func if isinstance(node.func, ast.Name) and node.func.id == "super" else callee
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        return node

    def visit_BoolOp(self, node):
        node.values = [self._test(value) for value in node.values]
        return node

    def visit_UnaryOp(self, node):
        node.operand = self._test(node.operand) if isinstance(node.op, ast.Not) else self.visit(node.operand)
        return node

    def _tested(self, node):
        test, node.test = self._test(node.test), ast.Constant(None)
        node = self.generic_visit(node)
        node.test = test
        return node

    visit_If = visit_While = visit_IfExp = visit_Assert = _tested

    def visit_comprehension(self, node):
        node.iter = self.visit(node.iter)
        node.target = self.visit(node.target)
        node.ifs = [self._test(test) for test in node.ifs]
        return node

    def visit_match_case(self, node):
        node.guard = node.guard and self._test(node.guard)
        node.body = self._statements(node.body)
        return node

    def visit_AnnAssign(self, node):
        names = _stored_names(node.target)
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        return self._with_reports(node, names if node.value else [])

    def visit_Assign(self, node):
        # A single target holds the value, which reports itself.
        names = [name for target in node.targets if not isinstance(target, ast.Name) for name in _stored_names(target)]
        return self._with_reports(self.generic_visit(node), names)

    def visit_AugAssign(self, node):
        before = self._reports(_stored_names(node.target)) if self.scopes else []
        return [*before, self.generic_visit(node)]

    def visit_For(self, node):
        names = _stored_names(node.target)
        node = self.generic_visit(node)
        node.body = [*self._reports(names), *node.body]
        return node

    def visit_With(self, node):
        names = [name for item in node.items if item.optional_vars for name in _stored_names(item.optional_vars)]
        node = self.generic_visit(node)
        node.body = [*self._reports(names), *node.body]
        return node

    def _with_reports(self, node, names):
        return [node, *self._reports(names)] if names and self.scopes else node

    def _reports(self, names: list[ast.Name]) -> list[ast.stmt]:
        """Statements that report what names hold, under the positions where they are bound."""
        return [ast.copy_location(ast.Expr(self._call(REPORT, "node", name, ast.copy_location(ast.Name(name.id, ast.Load()), name))), name) for name in names]

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        done = []
        for statement in body:
            result = self.visit(statement)
            done += result if isinstance(result, list) else [result]
        return done

    def visit_Lambda(self, node):
        self.scopes += ["<lambda>", "<locals>"]
        node.body = self.visit(node.body)
        del self.scopes[-2:]
        return node

    def visit_ClassDef(self, node):
        self.scopes.append(node.name)
        node.body = self._statements(node.body)
        self.scopes.pop()
        return node

    def visit_FunctionDef(self, node):
        node.decorator_list = [decorator for decorator in node.decorator_list if ast.unparse(decorator).split("(")[0] not in _COMPILING]
        arguments = _parameters(node.args)
        qualname = ".".join([*self.scopes, node.name])
        number = self.allocate("function", " ".join([qualname, *(position_key(argument) for argument in arguments)]))
        self.scopes += [node.name, "<locals>"]
        documented = 1 if ast.get_docstring(node, clean=False) is not None else 0
        body = self._statements(node.body[documented:])
        del self.scopes[-2:]
        where = node.body[0]
        values = [ast.Name(argument.arg, ast.Load()) for argument in arguments]
        enter = ast.Expr(ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(number), *values], []))
        for inner in ast.walk(enter):
            ast.copy_location(inner, where)
        node.body = [*node.body[:documented], enter, *body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _stored_names(target: ast.expr) -> list[ast.Name]:
    """The plain names that a target binds."""
    if isinstance(target, ast.Name):
        return [target]
    if isinstance(target, ast.Starred):
        return _stored_names(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for element in target.elts for name in _stored_names(element)]
    return []
