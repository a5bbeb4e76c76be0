"""Where a class or function stands: `file:line`, found in the source by name, whatever decorators wrap it."""

import ast
import inspect
import sys
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=64)
def _definitions(file: str) -> dict[str, int]:
    """Qualified name -> line of every class and function of a file."""
    lines = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{child.name}"
                lines[name] = child.lineno
                visit(child, f"{name}.")

    visit(ast.parse(Path(file).read_text(encoding="utf-8")), "")
    return lines


def short_path(file: str) -> str:
    """A file's path from its package's folder on: `transformers/models/llama/modeling_llama.py`."""
    path = Path(file).resolve()
    for entry in sorted((Path(p).resolve() for p in sys.path if p), key=lambda p: -len(p.parts)):
        if path.is_relative_to(entry) and entry != Path(path.anchor):
            return path.relative_to(entry).as_posix()
    return path.name


def cite(thing, method: str | None = None) -> str:
    """`file:line` of a class's method, looked up along its bases, or of a function; empty when there is no source."""
    if inspect.isclass(thing):
        owner = next((c for c in thing.__mro__ if method in vars(c)), thing) if method else thing
        name = f"{owner.__qualname__}.{method}" if method else owner.__qualname__
    else:
        owner, name = inspect.unwrap(thing), inspect.unwrap(thing).__qualname__
    try:
        file = inspect.getsourcefile(owner)
        line = _definitions(file).get(name)
    except (TypeError, OSError, SyntaxError, UnicodeDecodeError):
        return ""
    return f"{short_path(file)}:{line}" if line else ""
