"""Outputs that the reference records by hooks (`_can_record_outputs`: router logits) are reported by the module itself: the auxiliary loss needs them."""

import ast

REPORT = "__report__"
_WANTED = ("router_logits",)


def mark_reports(program, functions: dict) -> set[str]:
    """Insert `report(name, value)` before the returns of the modules whose output is recorded. Returns the names."""
    entry = program.entry
    table = program.class_value(entry.file, entry.name, "_can_record_outputs")
    found = set()
    for key, value in zip(table.keys, table.values) if isinstance(table, ast.Dict) else ():
        name = getattr(key, "value", None)
        if name not in _WANTED:
            continue
        recorder = value if not isinstance(value, (ast.List, ast.Tuple)) else value.elts[0]
        cls, index = recorder, 0
        if isinstance(recorder, ast.Call):
            cls = recorder.args[0] if recorder.args else None
            index = next((k.value.value for k in recorder.keywords if k.arg == "index"), 0)
            if any(k.arg == "layer_name" for k in recorder.keywords) and not isinstance(cls, ast.Name):
                continue
        if not isinstance(cls, ast.Name):
            continue
        symbol = program.resolve(entry.file, cls.id)
        method = program.method(symbol.file, symbol.name, "forward") if symbol.kind == "class" else None
        folded = functions.get(f"{method[0].key}.forward") if method else None
        if folded is not None and _insert(folded, name, index):
            found.add(name)
    return found


def _insert(folded, name: str, index: int) -> bool:
    done = False

    class Insert(ast.NodeTransformer):
        def visit_FunctionDef(inner, node):
            return inner.generic_visit(node) if node is folded.node else node

        def visit_Return(inner, node):
            nonlocal done
            value = node.value
            if isinstance(value, ast.Tuple):
                value = value.elts[index]
            if not isinstance(value, ast.Name):
                return node
            call = ast.Expr(ast.Call(ast.Name(REPORT, ast.Load()), [ast.Constant(name), ast.Name(value.id, ast.Load())], []))
            call.keep = True
            done = True
            return [call, node]

    folded.node = Insert().visit(folded.node)
    return done
