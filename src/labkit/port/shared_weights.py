"""Plan: modules that layers share. A constructor that fills the reference's table of tied weights itself ties more than a head to an embedding."""

import ast

from labkit.port.program import Symbol

TABLE = "_tied_weights_keys"


def fills_table(program, path: str, cls: str | None) -> bool:
    """Some method of the class, or of its bases in the program, gives the table a computed entry: its layers share modules and are no stack."""
    if cls is None:
        return False
    for symbol in (Symbol("class", path, cls), *program.bases(path, cls)):
        for method in program.node(symbol).body:
            if isinstance(method, ast.FunctionDef) and any(_fills(node) for node in ast.walk(method)):
                return True
    return False


def _fills(node) -> bool:
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        entry = isinstance(target, ast.Subscript) and _is_table(target.value)
        return entry or _is_table(target) and isinstance(node.value, ast.Dict) and bool(node.value.keys)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update" and _is_table(node.func.value)


def _is_table(node) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == TABLE and ast.unparse(node.value) == "self"


def table_text(rewriter, node) -> str | None:
    """What a constructor gives to the table, None for another attribute."""
    if not _is_table(node.targets[0]) or not isinstance(node.value, (ast.Dict, ast.Constant)):
        return None
    if isinstance(node.value, ast.Constant):
        return repr(node.value.value)
    return f"{rewriter.use('labkit.layers.building', 'Table')}({rewriter.expr(node.value) if getattr(node.value, 'keys', None) else ''})"


def sharing_lines(rewriter, indent: str) -> list[str]:
    """Where the reference ties its weights, at the end of a constructor: where the config ties them."""
    config = "config" if "config" in rewriter.folded.parameters else "self.config"
    rewriter.t.config_attributes.setdefault("tie_word_embeddings", None)
    share = rewriter.use("labkit.layers.sharing", "share_modules")
    return [f"{indent}if {config}.tie_word_embeddings:", f"{indent}    {share}(self, self.{TABLE})"]
