"""The reference's source as one program: modeling files as syntax trees, names resolved across files, methods through bases. Nothing is imported."""

import ast
import copy
import dataclasses
import functools
import hashlib
from pathlib import Path

from labkit.errors import InputError
from labkit.hf.architectures import transformers_folder


@dataclasses.dataclass(frozen=True)
class Symbol:
    """What a name in a file means. kind: "class", "function", "value" (a module-level assignment), "external" (defined outside the modeling files), "unknown".

    file and name say where it is defined; for an external name they are the module it comes from and its name there.
    """

    kind: str
    file: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.file}::{self.name}"


def node_key(node: ast.AST) -> str:
    """The position of a node in its file, as the record writes it."""
    return f"{node.lineno}:{node.col_offset}:{node.end_lineno}:{node.end_col_offset}"


class SourceFile:
    """One modeling file. path: relative to the transformers package, or absolute for code that came with a model. Every node knows its file and its key."""

    def __init__(self, path: str, folder: Path):
        self.path = path
        self.text = (folder / path).read_text(encoding="utf-8")
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()
        self.tree = ast.parse(self.text)
        for node in ast.walk(self.tree):
            if hasattr(node, "lineno"):
                node.origin = (path, node_key(node))
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self._read(self.tree.body)

    def _read(self, body):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.definitions.setdefault(target.id, node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.definitions.setdefault(node.target.id, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (self._module(node), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = (alias.name if alias.asname else alias.name.split(".")[0], "")
            elif isinstance(node, (ast.If, ast.Try)):
                self._read(node.body)
                for other in getattr(node, "orelse", []), getattr(node, "finalbody", []):
                    self._read(other)

    def _module(self, node: ast.ImportFrom) -> str:
        """`..llama.modeling_llama` in `models/x/modeling_x.py` -> `models/llama/modeling_llama`; an absolute import stays dotted."""
        if not node.level:
            return node.module or ""
        parts = self.path.split("/")[: -node.level]
        return "/".join([*parts, *(node.module or "").split(".")]).strip("/")


class Program:
    """The files that a model's class reaches, read on demand."""

    def __init__(self, entry_file: str, entry: str, folder: Path | None = None):
        self.folder = folder or transformers_folder()
        self.files: dict[str, SourceFile] = {}
        self.entry = Symbol("class", entry_file, entry)
        if entry not in self.file(entry_file).definitions:
            raise InputError(f"The modeling file does not define {entry}", entry_file)

    def file(self, path: str) -> SourceFile:
        if path not in self.files:
            self.files[path] = SourceFile(path, self.folder)
        return self.files[path]

    @functools.cache  # noqa: B019 - one program lives as long as one translation
    def resolve(self, path: str, name: str) -> Symbol:
        """What `name` means at module level of a file."""
        source = self.file(path)
        if name in source.definitions:
            node = source.definitions[name]
            kind = "class" if isinstance(node, ast.ClassDef) else "function" if isinstance(node, ast.FunctionDef) else "value"
            return Symbol(kind, path, name)
        if name in source.imports:
            module, original = source.imports[name]
            if module.startswith("models/") and "/modeling_" in module and (self.folder / f"{module}.py").is_file():
                return self.resolve(f"{module}.py", original)
            if module.startswith("models/") and "/configuration_" in module and (self.folder / f"{module}.py").is_file():
                symbol = self.resolve(f"{module}.py", original)
                if symbol.kind == "function":
                    return symbol
            return Symbol("external", module, original or module)
        return Symbol("unknown", path, name)

    def node(self, symbol: Symbol) -> ast.stmt:
        return self.file(symbol.file).definitions[symbol.name]

    @functools.cache  # noqa: B019
    def bases(self, path: str, name: str) -> tuple[Symbol, ...]:
        """The classes of the program that a class derives from, nearest first (depth first, as written)."""
        found: list[Symbol] = []
        for base in self.node(Symbol("class", path, name)).bases:
            symbol = self.resolve(path, base.id) if isinstance(base, ast.Name) else None
            if symbol is not None and symbol.kind == "class":
                for each in (symbol, *self.bases(symbol.file, symbol.name)):
                    if each not in found:
                        found.append(each)
        return tuple(found)

    def base_names(self, path: str, name: str) -> list[str]:
        """The bases of a class as written, and those of its bases."""
        own = [Symbol("class", path, name), *self.bases(path, name)]
        return [ast.unparse(base) for symbol in own for base in self.node(symbol).bases]

    def method(self, path: str, cls: str, name: str) -> tuple[Symbol, ast.FunctionDef] | None:
        """The class that defines a method, looked up as Python would, and the method."""
        for symbol in (Symbol("class", path, cls), *self.bases(path, cls)):
            for node in self.node(symbol).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return symbol, node
        return None

    def class_value(self, path: str, cls: str, name: str) -> ast.expr | None:
        """The value that a class body (or its bases') gives to a name."""
        for symbol in (Symbol("class", path, cls), *self.bases(path, cls)):
            for node in self.node(symbol).body:
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    return node.value
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name and node.value is not None:
                    return node.value
        return None

    def function(self, key: str) -> ast.FunctionDef | None:
        """The function behind `file::qualname` (`Class.method` or `function`), looked up through bases; None when it is not of the program."""
        path, _, qualname = key.partition("::")
        if not (self.folder / path).is_file():
            return None
        parts = qualname.split(".")
        definitions = self.file(path).definitions
        if len(parts) == 1:
            node = definitions.get(qualname)
            return node if isinstance(node, ast.FunctionDef) else None
        if len(parts) == 2 and isinstance(definitions.get(parts[0]), ast.ClassDef):
            found = self.method(path, parts[0], parts[1])
            return found[1] if found else None
        return None


def clone(node):
    """A deep copy of a node that keeps what is known of it."""
    return copy.deepcopy(node)
