"""Simplify: a function that gives back what it was given as `*args`, and names that hold such a tuple to be spread over a call."""

import ast


def expand_starred(functions: dict) -> None:
    """Calls of such functions become tuples, and `f(*name)` takes the elements of the tuple that the name holds."""
    passing = {key: args.vararg.arg for key, folded in functions.items() if (args := folded.original.args).vararg and _gives_back(folded.node, args.vararg.arg)}
    for folded in functions.values():
        _Tuples(functions, passing).visit(folded.node)
        _spread(folded.node)


def _gives_back(function, name: str) -> bool:
    (statement,) = function.body if len(function.body) == 1 else (None,)
    return isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name) and statement.value.id == name


class _Tuples(ast.NodeTransformer):
    def __init__(self, functions, passing):
        self.functions, self.passing = functions, passing

    def visit_Call(self, node):
        self.generic_visit(node)
        callees = getattr(node, "callees", [])
        if len(callees) == 1 and callees[0] in self.passing and not node.keywords:
            args = self.functions[callees[0]].original.args
            return ast.copy_location(ast.Tuple(node.args[len([*args.posonlyargs, *args.args]) :], ast.Load()), node)
        return node


def _spread(function) -> None:
    assigns = [s for s in ast.walk(function) if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and isinstance(s.value, ast.Tuple)]
    names = [n.id for n in ast.walk(function) if isinstance(n, ast.Name)]
    for assign in assigns:
        name = assign.targets[0].id
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
        uses = [call for call in calls for a in call.args if isinstance(a, ast.Starred) and ast.unparse(a.value) == name]
        if len(uses) == 1 and names.count(name) == 2:
            call = uses[0]
            call.args = [e for a in call.args for e in (assign.value.elts if isinstance(a, ast.Starred) and ast.unparse(a.value) == name else [a])]
