"""Mixtures: the reference's loop over experts as grouped products. Recognised by what it does: tokens of one expert picked, their results added back."""

import ast
import dataclasses

from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Rewriter
from labkit.port.trim import names_in


@dataclasses.dataclass
class ExpertLoop:
    """What a loop over experts is made of. chosen: the array of chosen experts. token, choice: names of a row's token and of its place among the token's
    choices. total: what results are added to. add: the statement that does."""

    chosen: ast.expr
    expert: str
    token: str
    choice: str
    total: str
    add: ast.Expr
    problem: str = ""


def mark_expert_loops(folded) -> None:
    """Find the loops over experts that some token chose, and cut them loose from the masks that said which tokens: the groups say it."""
    for node in ast.walk(folded.node):
        if not isinstance(node, ast.For) or not isinstance(node.target, (ast.Name, ast.Tuple)):
            continue
        picked = next((s for s in node.body if isinstance(s, ast.Assign) and _is_where(s.value)), None)
        if picked is None or not isinstance(picked.targets[0], ast.Tuple) or not isinstance(node.target, ast.Name):
            continue
        first, second = (t.id for t in picked.targets[0].elts)
        adds = [s for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and ast.unparse(s.value.func).endswith(".index_add_")]
        chosen = _chosen(folded.node, picked)
        if len(adds) != 1 or chosen is None:
            continue
        token = ast.unparse(adds[0].value.args[1])
        loop = ExpertLoop(chosen, node.target.id, token, first if token == second else second, ast.unparse(adds[0].value.func.value), adds[0])
        for statement in node.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and names_in(statement.value) - {"int"} == {loop.expert}:
                loop.expert = statement.targets[0].id
        node.body = [s for s in node.body if s is not picked and not _only_about(s, loop.expert)]
        node.iter, node.experts = chosen, loop


def mark_split_loops(folded, facts) -> None:
    """Rows that lie by expert, split by counts, one product each, put together again: one grouped product over all rows."""
    for node in ast.walk(folded.node):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for loop in [s for s in body if isinstance(s, ast.For)]:
            found = _split_loop(body, loop)
            if found is None:
                continue
            parts, outputs, weight, together, split = found
            together.value.args, together.value.keywords, together.value.by_counts = [split.func.value, split.args[0], weight], [], True
            body[:] = [s for s in body if s is not loop and not (isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) in (parts, outputs))]
            folded.by_counts = True


def _split_loop(body, loop):
    """(name of the parts, name of the outputs, stacked weight, the statement that concatenates, the call that splits), or None."""
    if len(loop.body) != 1 or not isinstance(loop.target, ast.Name) or not isinstance(loop.body[0], ast.Expr) or not isinstance(loop.body[0].value, ast.Call):
        return None
    append = loop.body[0].value
    if not ast.unparse(append.func).endswith(".append") or not isinstance(append.args[0], ast.Call) or not ast.unparse(append.args[0].func).endswith("linear"):
        return None
    product = append.args[0]
    index = loop.target.id
    if len(product.args) != 2 or not all(isinstance(a, ast.Subscript) and ast.unparse(a.slice) == index for a in product.args):
        return None
    parts, outputs = ast.unparse(product.args[0].value), ast.unparse(append.func.value)
    assigns = {ast.unparse(s.targets[0]): s for s in body if isinstance(s, ast.Assign)}
    split = assigns[parts].value if parts in assigns else None
    if not (isinstance(split, ast.Call) and isinstance(split.func, ast.Attribute) and split.func.attr == "split"):
        return None
    if [ast.unparse(k.value) for k in split.keywords if k.arg == "dim"] not in ([], ["0"]) or len(split.args) != 1:
        return None
    for statement in assigns.values():
        if isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == "torch.cat" and ast.unparse(statement.value.args[0]) == outputs:
            return parts, outputs, product.args[1].value, statement, split
    return None


def rewrite_by_counts(rewriter, node) -> str | None:
    """What `mark_split_loops` left of a loop."""
    if not getattr(node, "by_counts", False):
        return None
    rows, counts, weight = (rewriter.expr(e) for e in node.args)
    return f"{rewriter.use('labkit.layers.grouping', 'linear_by_counts')}({rows}, {counts}, {weight})"


def rewrite_experts(context, rewriter, node: ast.For, indent: str) -> list[str] | None:
    """A marked loop as grouped products, or None for any other loop.

    Raises CannotTranslate where the body does something else than this: pick rows, compute on them with the expert's weights, add them back.
    """
    loop = getattr(node, "experts", None)
    if loop is None:
        return None
    picked = [n for s in node.body for n in ast.walk(s) if isinstance(n, ast.Subscript) and loop.expert in names_in(n.slice)]
    picked.sort(key=lambda n: (n.lineno, n.col_offset))
    weights = [n for n in picked if rewriter.facts.is_parameter(n.value)] or [n for n in picked if rewriter.facts.is_array(n.value)]
    if not weights:
        raise CannotTranslate("a loop over experts without stacked weights", node)
    grouped = GroupedRewriter(rewriter, loop.expert, loop.token, loop.choice)
    groups = rewriter.use("labkit.layers.grouping", "group_tokens")
    lines = [f"{indent}groups = {groups}({rewriter.expr(loop.chosen)}, {grouped.all_experts(weights[0].value)})"]
    for statement in node.body:
        if isinstance(statement, ast.Expr) and ast.unparse(statement.value.func).endswith(".index_add_"):
            lines.append(f"{indent}{loop.total} = groups.sum({grouped.expr(statement.value.args[2])})")
        else:
            lines += grouped.statement(statement, indent)
    return lines


def _is_missing(test) -> bool:
    """`self.weight is None`: without weights there are no groups either."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and ast.unparse(test.left).startswith("self.")


def _is_where(value) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "torch.where" and len(value.args) == 1


def _only_about(statement, expert) -> bool:
    """`expert_idx = expert_idx[0]`, `if expert_idx == self.num_experts: continue`."""
    if isinstance(statement, ast.If):
        return all(isinstance(s, ast.Continue) for s in statement.body) and not statement.orelse
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == expert


def _chosen(function, picked):
    """The array of chosen experts, from the one-hot mask that the loop reads."""
    mask = picked.value.args[0]
    while isinstance(mask, (ast.Subscript, ast.Call)):
        mask = (
            mask.value
            if isinstance(mask, ast.Subscript)
            else (mask.func.value if isinstance(mask.func, ast.Attribute) and not ast.unparse(mask.func).startswith(("torch", "nn", "F.")) else mask.args[0])
        )
    name = ast.unparse(mask)
    for _ in range(6):
        assigns = [s for s in ast.walk(function) if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
        for assign in assigns:
            for call in ast.walk(assign.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("one_hot"):
                    return call.args[0] if call.args else next(k.value for k in call.keywords if k.arg in ("input", "tensor"))
        if not assigns:
            return None
    return None


class GroupedRewriter(Rewriter):
    """Rewrites one expert's computation on its tokens as the computation on all rows, sorted by expert."""

    def __init__(self, outer: Rewriter, expert: str, token: str, choice: str):
        super().__init__(outer.t, outer.folded, numpy=outer.numpy, wide=outer._wide)
        self.renames = dict(outer.renames)
        self.expert, self.token, self.choice = expert, token, choice

    def _weight(self, node):
        """The stacked weight in `self.weight[expert]`, or None."""
        if isinstance(node, ast.Subscript) and self.expert in names_in(node.slice):
            if ast.unparse(node.slice) != self.expert:
                raise CannotTranslate(f"an expert's weight indexed as {ast.unparse(node)}", node)
            return self.all_experts(node.value)
        return None

    def all_experts(self, node) -> str:
        """Weights of all experts: a parameter as it is, which knows how it is cut over a mesh; an array that was made from one otherwise."""
        return ast.unparse(node) if self.facts.is_parameter(node) and isinstance(node, ast.Attribute) else self.expr(node)

    def _way(self, node) -> str:
        """What a product or a bias is told when gates and ups lie in turn."""
        local = self.t.local_experts.get(f"{self.folded.file}::{self.folded.cls}")
        attribute = getattr(node.value, "attr", None)
        return ", interleaved=True" if local is not None and local.interleaved and attribute in local.halves else ""

    def x_Subscript(self, node):
        used = names_in(node.slice)
        weight = self._weight(node)
        if weight is not None:
            return f"groups.expert({weight})" if self.facts.rank(node) == 2 else f"groups.take({weight}{self._way(node)})"
        if self._weight(node.value) is not None:
            raise CannotTranslate(f"a part of an expert's weight: {ast.unparse(node)}", node)
        if self.token in used or self.choice in used:
            elements = [ast.unparse(e) for e in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
            if elements == [self.token]:
                return f"groups.rows({self.expr(node.value)})"
            if elements == [self.token, self.choice, "None"]:
                return f"groups.weights({self.expr(node.value)})"
            if elements == [self.token, self.choice]:
                return f"groups.weights({self.expr(node.value)})[:, 0]"
            raise CannotTranslate(f"rows of an expert picked as {ast.unparse(node)}", node)
        return super().x_Subscript(node)

    def s_Assign(self, node, indent):
        weight = self._weight(node.value)
        if weight is not None and self.facts.rank(node.value) == 2:
            return [f"{indent}{self.target(node.targets[0])} = groups.expert({weight})"]
        return super().s_Assign(node, indent)

    def s_If(self, node, indent):
        """`if expert >= n: x = a else: ...`: both for all rows, then each row's own."""
        if self.expert not in names_in(node.test):
            return super().s_If(node, indent)
        tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or) else [node.test]
        tests = [t for t in tests if not _is_missing(t)]
        if len(tests) != 1 or not isinstance(tests[0], ast.Compare) or ast.unparse(tests[0].left) != self.expert or len(tests[0].ops) != 1:
            raise CannotTranslate(f"an expert chosen by {ast.unparse(node.test)}", node)
        then = node.body[0]
        stored = {n.id for s in node.orelse for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if len(node.body) != 1 or not isinstance(then, ast.Assign) or ast.unparse(then.targets[0]) not in stored or names_in(then.value) & stored:
            raise CannotTranslate("experts of two kinds that do more than give one value", node)
        name, operators = ast.unparse(then.targets[0]), {ast.GtE: ">=", ast.Gt: ">", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
        test = f"groups.experts[:, None] {operators[type(tests[0].ops[0])]} {self.expr(tests[0].comparators[0])}"
        return [*self.block(node.orelse, indent), f"{indent}{name} = jnp.where({test}, {self.expr(then.value)}, {name})"]

    def op_linear(self, name, b, node):
        weight = self._weight(b["weight"])
        if weight is None:
            return super().op_linear(name, b, node)
        text = f"groups.linear({self.expr(b['input'])}, {weight}{self._way(b['weight'])})"
        return f"({text} + {self.expr(b['bias'])})" if "bias" in b else text

    def x_BinOp(self, node):
        if isinstance(node.op, ast.MatMult):
            weight = self._weight(node.right)
            if weight is not None:
                return f"groups.matmul({self.expr(node.left)}, {weight}{self._way(node.right)})"
        return super().x_BinOp(node)

    def operation(self, name, node, args):
        if name in ("matmul", "mm") and len(args) == 2:
            weight = self._weight(args[1])
            if weight is not None:
                return f"groups.matmul({self.expr(args[0])}, {weight}{self._way(args[1])})"
        return super().operation(name, node, args)
