"""Where a slice implements a delta: the class that answers to the reference's, found by its name in the slice's file and through its imports."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import labkit
from labkit.port.compare import Delta

# Roles of the reference that the layer library serves, with its name there; the first that the slice uses is taken.
_LIBRARY = {
    "RMSNorm": r"\w*RMSNorm$", "LayerNorm": r"\w*LayerNorm$", "RotaryEmbedding": r"rope_table$", "apply_rotary_pos_emb": r"apply_\w*rope$|apply_rope\w*$",
    "rotate_half": r"apply_\w*rope$|apply_rope\w*$", "eager_attention_forward": r"attend$", "repeat_kv": r"attend$", "ForCausalLM": r"\w+Model$",
    "load_balancing_loss_func": r"load_balancing_loss$",
}  # fmt: skip
_RENAMED = {"weight": ("weight", "kernel", "embedding", "scale")}  # NNX's own names of a single parameter


@functools.lru_cache(maxsize=64)
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=64)
def _names(file: Path) -> dict[str, ast.stmt | tuple[str, str]]:
    """name -> its definition in the file, or (module, name) where it is imported from."""
    found: dict[str, ast.stmt | tuple[str, str]] = {}
    for node in _module(file).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: ("." * node.level + node.module, alias.name) for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
    return found


def _file_of(module: str, file: Path) -> Path | None:
    """The file of a module inside labkit, or of one that `file` imports relatively."""
    if module.startswith("."):
        inner = module.lstrip(".")
        path = file.parents[len(module) - len(inner) - 1].joinpath(*inner.split("."))
        return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)
    spec = importlib.util.find_spec(module) if module.startswith("labkit.") else None
    return Path(spec.origin) if spec and spec.origin else None


def resolve(name: str, file: Path) -> tuple[ast.stmt, Path] | None:
    """The definition behind a name of a slice's file, followed through imports inside labkit and inside the slice."""
    found = _names(file).get(name)
    if isinstance(found, ast.stmt):
        return found, file
    origin = _file_of(found[0], file) if found is not None else None
    return resolve(found[1], origin) if origin is not None else None


def answer(row: Delta, family: str, prefix: str, file: Path) -> tuple[str, str]:
    """(`file:line` of what answers to the row, "") or ("", why nothing does). A class answers only if it, or what it inherits, names the submodules that the
    row brings in, and if the slice reads the config keys that the row brings in."""
    if row.component == "config":
        return _config_answer(row, prefix, file)
    name, found = _class_of(row.role, prefix, file)
    if row.kind == "removed" and not row.method:
        return "", f"N/A: {family} has no {row.role}, see the reference"
    if found is None:
        return "", f"the slice has no class for {row.role}"
    node, where = found
    text = "\n".join(_source_with_bases(node, where))
    whole = file.read_text(encoding="utf-8")
    for wanted in row.names:
        owner, _, attribute = wanted.partition(".")
        spellings = _RENAMED.get(attribute, (attribute,))
        if owner == "self" and not any(re.search(rf"\b{s}\b", text) for s in spellings):
            return "", f"{name} has no {attribute}"
        if owner == "config" and not any(re.search(rf"\b{attribute}\b", part) for part in (whole, text)):
            return "", f"the slice does not read {attribute}"
    return f"{_place(where)}:{node.lineno}", ""


def _config_answer(row: Delta, prefix: str, file: Path) -> tuple[str, str]:
    if row.kind == "removed":
        return "", f"N/A: the family's config {'does not compute this' if row.method.startswith('__') else f'has no {row.method}'}"
    found = resolve(f"{prefix}Config", file)
    if found is None:
        return "", "the slice has no config class"
    node, where = found
    if not row.names:
        return f"{_place(where)}:{node.lineno}", ""
    key = row.method if f"config.{row.method}" in row.names else row.names[0].partition(".")[2]
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == key:
            return f"{_place(where)}:{part.lineno}", ""
        if isinstance(part, ast.Constant) and part.value == key:
            return f"{_place(where)}:{part.lineno}", ""
    if row.role == "config.json":
        return "", "N/A: the slice does not name the key; the config table says whether it is refused"
    return "", f"the slice's config does not name {key}"


def _class_of(role: str, prefix: str, file: Path):
    """(name, (definition, file)): the reference's own name, then the library's, then any name the slice uses that ends in the role."""
    names = _names(file)
    own = [n for n in names if n.startswith(prefix) and n in (f"{prefix}{role}", f"{prefix}Text{role}")]
    library = [n for n in names if role in _LIBRARY and re.fullmatch(_LIBRARY[role], n)]
    if role == "ForCausalLM":
        library = [f"{prefix}Model"]
    other = [n for n in names if n.endswith(role) and n != role] if role[:1].isupper() else []
    for name in [*own, *library, *other]:
        found = resolve(name, file)
        if found is not None:
            return name, found
    return _inside_layers(role, prefix, file)


def _inside_layers(role: str, prefix: str, file: Path):
    """What the slice does not name itself but its classes inherit or call: looked for in the files of the slices it imports from."""
    if role not in _LIBRARY:
        return "", None
    for found in _names(file).values():
        if isinstance(found, tuple) and found[0].startswith(("labkit.models.", ".")):
            origin = _file_of(found[0], file)
            name, inner = _class_of(role, "\0", origin) if origin is not None else ("", None)
            if inner is not None:
                return name, inner
    return "", None


def _source_with_bases(node: ast.stmt, file: Path) -> list[str]:
    found = [ast.unparse(node)]
    for base in getattr(node, "bases", []):
        inner = resolve(ast.unparse(base), file)
        if inner is not None:
            found += _source_with_bases(*inner)
    return found


def _place(file: Path) -> str:
    root = Path(labkit.__file__).parent.parent
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
