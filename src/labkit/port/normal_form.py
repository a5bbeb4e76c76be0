"""One form for equal maths: what two families' methods are compared in.

Dropped: docstrings, annotations, decorators, dropout, gradient checkpointing, losses, checks that raise, logging, devices, keyword noise. Attributes that only
copy a config key or an argument (`self.num_heads = config.num_attention_heads`) are read through. Line numbers stay those of the file.
"""

import ast
import copy
import dataclasses
import re
from pathlib import Path

from labkit.port.source_tree import Definition, SourceTree, role_of

_TRAINING = {"labels", "loss", "aux_loss", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "all_hidden_states"}
_TRAINING |= {"all_self_attns", "all_self_attentions", "all_router_logits", "cache_position", "gradient_checkpointing", "device_type", "loss_kwargs"}
_KEYWORDS = _TRAINING | {"dropout", "device", "kwargs", "padding_idx", "persistent"}
_POSITIONAL = {"padding_idx", "config.pad_token_id", "use_cache", "output_attentions", "output_hidden_states"}
_METHODS = {
    "_init_weights",
    "extra_repr",
    "reset_parameters",
    "prepare_inputs_for_generation",
    "get_input_embeddings",
    "set_input_embeddings",
    "_reorder_cache",
}
_METHODS |= {"get_output_embeddings", "set_output_embeddings", "create_masks_for_generate", "set_decoder", "get_decoder", "prune_heads"}
_KEPT = {"head_dim"}  # copied by some families, computed by others: read through, it would differ wherever it is used
_RESULTS = {"last_hidden_state", "logits"}
_PLAIN_BASES = {"GradientCheckpointingLayer", "GenerationMixin", "nn.Module", "PreTrainedModel", "Module"}
_SYNONYMS = {"past_key_values": "cache", "past_key_value": "cache", "layer_past": "cache"}
_DROPOUT = re.compile(r"dropout|drop_path|_p?drop$")


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement, compound ones by their header. key: what is compared. node: the simplified tree."""

    key: tuple[int, str]
    node: ast.AST
    line: int
    end: int
    column: int
    file: Path

    @property
    def depth(self) -> int:
        return self.key[0]

    @property
    def text(self) -> str:
        return self.key[1]


def methods(tree: SourceTree, definition: Definition) -> dict[str, list[Statement]]:
    """Method name -> statements; a function or table has the one name ""; what a class says outside its methods has the name "class"."""
    node = definition.node
    if not definition.is_class:
        simple = _Simplify(tree.prefix, {})
        if isinstance(node, ast.Assign):
            return {"": _flat(simple.block([copy.deepcopy(node)]), tree.file)}
        return {"": _body(node, simple, tree.file)}
    copies: dict[str, ast.expr] = {}
    for base in reversed([definition, *tree.bases_in_file(definition)]):
        if base.is_class:
            copies |= _copied_attributes(base.node)
    simple = _Simplify(tree.prefix, copies)
    found = {}
    bases = sorted({role_of(b, tree.prefix) for b in definition.bases} - _PLAIN_BASES)
    if bases:
        found["class"] = [Statement((0, f"class ({', '.join(bases)})"), node, node.lineno, node.lineno, node.col_offset, tree.file)]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name not in _METHODS:
            found[item.name] = _body(item, simple, tree.file)
        elif isinstance(item, (ast.Assign, ast.AnnAssign)) and _kept_attribute(item):
            found.setdefault("class", []).extend(_flat(simple.block([copy.deepcopy(item)]), tree.file))
    return {name: statements for name, statements in found.items() if statements}


def config_methods(tree: SourceTree) -> dict[str, list[Statement]]:
    """What the config class computes after its fields are set."""
    if tree.config_class is None:
        return {}
    simple = _Simplify(tree.prefix, {})
    kept = [
        m
        for m in tree.config_class.body
        if isinstance(m, ast.FunctionDef) and not m.name.startswith(("validate", "convert_rope")) and m.name not in ("to_dict", "__init__")
    ]
    found = {m.name: [s for s in _body(m, simple, tree.config_file) if "super()" not in s.text] for m in kept}
    return {name: statements for name, statements in found.items() if statements}


def _kept_attribute(item) -> bool:
    target = item.targets[0] if isinstance(item, ast.Assign) else item.target
    name = ast.unparse(target)
    noise = {"base_model_prefix", "supports_gradient_checkpointing", "config_class", "config", "input_modalities", "main_input_name"}
    return item.value is not None and (name == "_tied_weights_keys" or not (name.startswith("_") or name in noise))


def _body(function: ast.FunctionDef, simple: "_Simplify", file: Path) -> list[Statement]:
    """Argument defaults that are values, then the statements."""
    found = []
    named = function.args.posonlyargs + function.args.args
    pairs = [*zip(named[len(named) - len(function.args.defaults) :], function.args.defaults), *zip(function.args.kwonlyargs, function.args.kw_defaults)]
    for arg, default in pairs:
        if isinstance(default, ast.Constant) and default.value not in (None, False) and arg.arg not in _KEYWORDS:
            found.append(Statement((0, f"argument {arg.arg} = {default.value!r}"), arg, arg.lineno, arg.lineno, arg.col_offset, file))
    return found + _flat(simple.block(copy.deepcopy(function.body)), file)


def _flat(statements: list[ast.stmt], file: Path, depth: int = 0) -> list[Statement]:
    found = []
    for node in statements:
        header, blocks = _header(node)
        last = node.end_lineno if not blocks else max(node.lineno, blocks[0][1][0].lineno - 1) if blocks[0][1] else node.lineno
        found.append(Statement((depth, header), node, node.lineno, last, node.col_offset, file))
        for label, block in blocks:
            if label and block:
                found.append(Statement((depth, label), block[0], block[0].lineno, block[0].lineno, block[0].col_offset, file))
            found += _flat(block, file, depth + 1)
    return found


def _header(node: ast.stmt) -> tuple[str, list[tuple[str, list[ast.stmt]]]]:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}:", [("", node.body), ("else:", node.orelse)]
    if isinstance(node, ast.For):
        return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:", [("", node.body), ("else:", node.orelse)]
    if isinstance(node, ast.While):
        return f"while {ast.unparse(node.test)}:", [("", node.body)]
    if isinstance(node, ast.With):
        return f"with {', '.join(ast.unparse(item) for item in node.items)}:", [("", node.body)]
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}({', '.join(a.arg for a in node.args.args)}):", [("", node.body)]
    if isinstance(node, ast.Try):
        return "try:", [("", node.body), ("finally:", node.finalbody)]
    return ast.unparse(node), []


def _is_config(node: ast.expr) -> bool:
    """`config.key`, `self.config.key`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")


def _copied_attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Attributes that `__init__` sets once, and the class nowhere else, to a config key or to an argument as it is."""
    stored: dict[str, int] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name) and part.value.id == "self":
            stored[part.attr] = stored.get(part.attr, 0) + 1
    init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
    if init is None:
        return {}
    arguments = {a.arg for a in [*init.args.args, *init.args.kwonlyargs]} - {"self"}
    found = {}
    for item in init.body:
        if not (isinstance(item, ast.Assign) and len(item.targets) == 1 and isinstance(item.targets[0], ast.Attribute)):
            continue
        target, value = item.targets[0], item.value
        if ast.unparse(target.value) == "self" and stored.get(target.attr) == 1 and target.attr not in _KEPT:
            if _is_config(value) or (isinstance(value, ast.Name) and value.id in arguments):
                found[target.attr] = (
                    ast.Attribute(ast.Name("config", ast.Load()), value.attr, ast.Load()) if _is_config(value) else ast.Name(value.id, ast.Load())
                )
    return found


class _Simplify(ast.NodeTransformer):
    """Works on a copy. A visit that returns None drops the statement."""

    def __init__(self, prefix: str, copies: dict[str, ast.expr]):
        self.prefix, self.copies = prefix, copies

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            found += result if isinstance(result, list) else [] if result is None else [result]
        return found

    def visit_Name(self, node):
        node.id = _SYNONYMS.get(node.id, role_of(node.id, self.prefix))
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = role_of(node.value, self.prefix)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if node.attr == "config":
                return ast.copy_location(ast.Name("config", node.ctx), node)
            if node.attr in self.copies and isinstance(node.ctx, ast.Load):
                return ast.copy_location(copy.deepcopy(self.copies[node.attr]), node)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = ast.unparse(node.func)
        last = name.rsplit(".", 1)[-1]
        if (last.endswith(("dropout", "_drop")) or last in ("drop", "drop_path", "dropout1d", "Dropout")) and node.args and not name.startswith("nn.Dropout"):
            return node.args[0]
        if last == "contiguous" and isinstance(node.func, ast.Attribute):
            return node.func.value
        if name == "getattr" and len(node.args) == 3 and ast.unparse(node.args[0]) == "config" and ast.unparse(node.args[2]) == "None":
            return ast.copy_location(ast.Attribute(node.args[0], node.args[1].value, ast.Load()), node) if isinstance(node.args[1], ast.Constant) else node
        node.args = [a for a in node.args if not (isinstance(a, ast.Starred) and ast.unparse(a.value) == "args") and ast.unparse(a) not in _POSITIONAL]
        kept = [k for k in node.keywords if k.arg is not None and k.arg not in _KEYWORDS or k.arg is None and "kwargs" != ast.unparse(k.value)]
        if last.endswith(("OutputWithPast", "Output", "OutputWithPastAndCrossAttentions", "Outputs")) or "OutputWith" in last:
            node.func = ast.copy_location(ast.Name("Output", ast.Load()), node.func)
            kept = [k for k in kept if k.arg in _RESULTS]
        for keyword in kept:
            keyword.arg = _SYNONYMS.get(keyword.arg, keyword.arg)
        same = [k for k in kept if isinstance(k.value, ast.Name) and k.value.id == k.arg]
        node.args += [k.value for k in sorted(same, key=lambda k: k.arg)]
        node.keywords = sorted((k for k in kept if k not in same), key=lambda k: k.arg or "")
        if last == "to" and isinstance(node.func, ast.Attribute) and not node.keywords and (not node.args or ast.unparse(node.args[0]).endswith("device")):
            return node.func.value
        return node

    def visit_IfExp(self, node):
        self.generic_visit(node)
        return node.body if ast.unparse(node.test) in _TRAINING else node

    def visit_Expr(self, node):
        text = ast.unparse(node.value)
        if isinstance(node.value, ast.Constant) or text.startswith(("logger.", "super().__init__(", "self.post_init(", "warnings.", "self.register_load")):
            return None
        return self.generic_visit(node)

    def visit_Raise(self, node):
        return None

    visit_Assert = visit_Pass = visit_Import = visit_ImportFrom = visit_Raise

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Assign(self, node):
        targets = [ast.unparse(t) for t in node.targets]
        bare = [t.removeprefix("self.") for t in targets]
        if all(b in _TRAINING or _DROPOUT.search(b) for b in bare) or targets == ["self.config"]:
            return None
        if targets[0].startswith("self.") and bare[0] in self.copies:
            return None
        self.generic_visit(node)
        return None if ast.unparse(node.targets[0]) == ast.unparse(node.value) else node

    def visit_AugAssign(self, node):
        return None if ast.unparse(node.target) in _TRAINING else self.generic_visit(node)

    def visit_If(self, node):
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
        orelse = self.block(node.orelse)
        if names & (_TRAINING | {"training"}) and not isinstance(node.test, ast.UnaryOp):
            return orelse
        body = self.block(node.body)
        if not body and not orelse:
            return None
        node.test = self.visit(node.test)
        if not body:
            node.test, body, orelse = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test), orelse, []
        node.body, node.orelse = body, orelse
        return node

    def visit_With(self, node):
        body = self.block(node.body)
        if all(re.search(r"autocast|no_grad|deepspeed|set_default", ast.unparse(item)) for item in node.items):
            return body
        node.items, node.body = [self.visit(item) for item in node.items], body
        return node if body else None

    def visit_For(self, node):
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        node.target, node.iter = self.visit(node.target), self.visit(node.iter)
        return node if node.body else None

    def visit_While(self, node):
        node.body, node.test = self.block(node.body), self.visit(node.test)
        return node if node.body else None

    def visit_Try(self, node):
        node.body, node.finalbody = self.block(node.body), self.block(node.finalbody)
        return node if node.body else node.finalbody

    def visit_FunctionDef(self, node):
        node.body, node.decorator_list, node.returns = self.block(node.body), [], None
        return node if node.body else None
