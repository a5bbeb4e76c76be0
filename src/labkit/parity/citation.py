"""Where something stands, `file:line`: a class or function, found in the source by name whatever wraps it, and the statement of a slice that is running."""

import ast
import inspect
import sys
from dataclasses import dataclass
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


@lru_cache(maxsize=256)
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


LONGEST_STATEMENT = 160


@dataclass(frozen=True)
class Line:
    """One line of our source. file: its path; through: `file:line` inside the layer that the line calls, where the value was recorded, or empty."""

    file: str
    number: int
    through: str = ""

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.number}"

    @property
    def statement(self) -> str:
        """The statement that holds the line, on one line and not longer than readers bear."""
        text = " ".join(_statement(self.file, self.number).split())
        return text if len(text) <= LONGEST_STATEMENT else text[: LONGEST_STATEMENT - 4] + " ..."


@lru_cache(maxsize=256)
def in_slice(file: str) -> bool:
    """True for a file in a slice's folder, in the garden or outside: a folder with rules in it."""
    return any(Path(file).parent.glob("checkpoint_mappings_*.py"))


def running_line(frame) -> Line | None:
    """The innermost line of a slice among a frame and its callers; where that is not the frame itself, the frame is what the line runs through."""
    first = frame
    while frame is not None and not in_slice(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    through = "" if frame is first else f"{short_path(first.f_code.co_filename)}:{first.f_lineno}"
    return Line(frame.f_code.co_filename, frame.f_lineno, through)


def construction(cls, attribute: str) -> Line | None:
    """Where a slice's class sets `self.<attribute>`, looked up along its bases; None when no slice does."""
    for owner in cls.__mro__:
        try:
            file = inspect.getsourcefile(owner)
            tree = _tree(file) if file and in_slice(file) else None
        except (TypeError, OSError, SyntaxError, UnicodeDecodeError):
            continue
        holder = next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner.__name__), None) if tree else None
        for node in ast.walk(holder) if holder else ():
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if any(isinstance(part, ast.Attribute) and part.attr == attribute and ast.unparse(part.value) == "self" for part in ast.walk(target)):
                    return Line(file, node.lineno)
    return None


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _statement(file: str, number: int) -> str:
    """The source of the smallest statement that spans a line; of one that holds others, its head."""
    try:
        tree, lines = _tree(file), Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)]
    if not around:
        return ""
    node = max(around, key=lambda node: (node.lineno, -(node.end_lineno or node.lineno)))
    return lines[node.lineno - 1] if getattr(node, "body", None) else "\n".join(lines[node.lineno - 1 : node.end_lineno])
