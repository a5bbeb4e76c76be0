"""What a reference's causal LM is made of: the definitions of its modeling file that the class reaches, read as a syntax tree. Nothing is imported."""

import ast
import dataclasses
import functools
from pathlib import Path

from labkit.errors import InputError
from labkit.hf import architectures

Node = ast.ClassDef | ast.FunctionDef | ast.Assign
_ENDINGS = ("ForCausalLM", "LMHeadModel", "WithLMHeadModel", "LMHead", "ForConditionalGeneration", "ForGeneration")


@dataclasses.dataclass(frozen=True)
class Definition:
    """A class, function or table at module level. role: its name without the family's prefix. bases: names of a class's bases."""

    name: str
    role: str
    node: Node
    begin: int
    end: int
    bases: tuple[str, ...] = ()

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class SourceTree:
    """The definitions that `entry` reaches, by role, in file order. outside: names they use that the file imports -> where from.

    config_class is None when the configuration file was not found.
    """

    model_type: str
    file: Path
    entry: str
    prefix: str
    definitions: dict[str, Definition]
    outside: dict[str, str]
    config_file: Path | None = None
    config_class: ast.ClassDef | None = None

    @functools.cached_property
    def originals(self) -> dict[tuple[Path, int, int], ast.stmt]:
        """Statements as the files have them, by (file, line, column): what is compared has been simplified."""
        files = [self.file] if self.config_file is None else [self.file, self.config_file]
        return {
            (file, node.lineno, node.col_offset): node
            for file in files
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.stmt)
        }

    def bases_in_file(self, definition: Definition) -> list[Definition]:
        """The chain of bases that lie in the same file, nearest first."""
        found, names = [], list(definition.bases)
        by_name = {d.name: d for d in self.definitions.values()}
        while names:
            base = by_name.get(names.pop(0))
            if base is not None and base not in found:
                found.append(base)
                names += base.bases
        return found


def short(file: Path) -> str:
    """`transformers/models/llama/modeling_llama.py`; the bare name for a file outside the package."""
    root = architectures.transformers_folder().parent
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name


def source_tree(model_type: str) -> SourceTree:
    """The tree of an installed model type. Raises InputError when transformers has no causal LM of that type."""
    return _installed(model_type)


@functools.lru_cache(maxsize=256)
def _installed(model_type: str) -> SourceTree:
    known = architectures.causal_lm_classes()
    if model_type not in known:
        raise InputError(
            f"The installed transformers has no causal LM of type {model_type!r}",
            next=architectures.suggestion(model_type, known) or "Install a newer transformers",
        )
    entry = known[model_type]
    file = _modeling_file(model_type, entry)
    if file is None:
        raise InputError(f"No modeling file of the installed transformers defines {entry}", architectures.transformers_folder() / "models")
    config_name = architectures.config_classes().get(model_type)
    return read_tree(file, entry, model_type=model_type, config_file=_config_file(model_type, file, config_name), config_name=config_name)


def read_tree(file: Path, entry: str, *, model_type: str = "", config_file: Path | None = None, config_name: str | None = None) -> SourceTree:
    """The tree below class `entry` of any modeling file. Raises InputError when the file does not define it."""
    module = ast.parse(Path(file).read_text(encoding="utf-8"))
    nodes = {name: node for node in module.body for name in _names_bound(node)}
    if entry not in nodes:
        raise InputError(f"The modeling file does not define {entry}", file)
    prefix = next((entry.removesuffix(ending) for ending in _ENDINGS if entry.endswith(ending)), "")
    imported = {
        alias.asname or alias.name: "." * node.level + (node.module or "") for node in module.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    reached, outside, open_ = {entry}, {}, [entry]
    while open_:
        for name in _names_used(nodes[open_.pop()]):
            if name in nodes and name not in reached:
                reached.add(name)
                open_.append(name)
            elif name in imported:
                outside[name] = imported[name]
    definitions: dict[str, Definition] = {}
    for name in sorted(reached, key=lambda n: nodes[n].lineno):
        node = nodes[name]
        bases = tuple(ast.unparse(base) for base in node.bases) if isinstance(node, ast.ClassDef) else ()
        role = role_of(name, prefix)
        definitions[name if role in definitions else role] = Definition(name, role, node, node.lineno, node.end_lineno, bases)
    config_class = None
    if config_file is not None:
        classes = [n for n in ast.parse(config_file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        config_class = next((c for c in classes if c.name == config_name), None)
    return SourceTree(model_type, Path(file), entry, prefix, definitions, outside, config_file if config_class is not None else None, config_class)


def role_of(name: str, prefix: str) -> str:
    """`Qwen3MoeTopKRouter` -> `TopKRouter`; the text towers' `Text` goes too."""
    if prefix and name.startswith(prefix) and name != prefix:
        bare = name[len(prefix) :]
        return bare[4:] if bare.startswith("Text") and len(bare) > 4 else bare
    return name


def _names_bound(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name) and target.id not in ("logger", "__all__")]
    return []


def _names_used(node: ast.AST) -> set[str]:
    """Names loaded anywhere but in annotations and decorators."""
    found: set[str] = set()
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Name):
                found.add(child.id)
            elif isinstance(child, ast.AST):
                found |= _names_used(child)
    return found


def _folder(model_type: str) -> Path:
    return architectures.transformers_folder() / "models" / architectures.special_modules().get(model_type, model_type).replace("-", "_")


def _defining(files, class_name: str) -> Path | None:
    return next((file for file in files if f"class {class_name}(" in file.read_text(encoding="utf-8")), None)


def _modeling_file(model_type: str, entry: str) -> Path | None:
    """The type's own file, or, for a type that borrows another's class, the file of that class."""
    own = architectures.modeling_file(model_type)
    lenders = (architectures.modeling_file(other) for other, name in architectures.causal_lm_classes().items() if name == entry and other != model_type)
    return _defining([*([own] if own else []), *sorted(_folder(model_type).glob("modeling_*.py")), *filter(None, lenders)], entry)


def _config_file(model_type: str, modeling: Path, config_name: str | None) -> Path | None:
    if config_name is None:
        return None
    near = [*sorted(_folder(model_type).glob("configuration_*.py")), *sorted(modeling.parent.glob("configuration_*.py"))]
    return _defining(near, config_name)
