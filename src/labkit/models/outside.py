"""Slices outside the package, named in the environment: which folder stands for which model type, and what keeps a folder from being a slice."""

import ast
import functools
import os
from pathlib import Path

from labkit.errors import InputError

NAMED = "LABKIT_SLICES"
"""Folders that a person names. The lab only writes their paths out in full, so that processes started in other folders find them."""
FOUND = "LABKIT_FOUND_SLICES"
"""Folders that the lab found or wrote itself, for the processes that it starts. They never go before a refined slice."""


def folders_in(variable: str) -> list[Path]:
    """The folders that an environment variable lists, absolute."""
    return [full(Path(folder)) for folder in filter(None, os.environ.get(variable, "").split(os.pathsep))]


def full(folder: Path) -> Path:
    """Absolute, without `..`, so that the last part is the model type."""
    return Path(os.path.abspath(Path(folder).expanduser()))


def put_into(variable: str, folder: Path) -> None:
    """List the folder in an environment variable, in place of another one of its name."""
    _write(variable, [*(other for other in folders_in(variable) if other.name != folder.name), folder])


def _write(variable: str, folders: list[Path]) -> None:
    text = os.pathsep.join(map(str, folders))
    if os.environ.get(variable, "") != text:
        os.environ[variable] = text


def named_folders() -> dict[str, Path]:
    """model type -> the folder that $LABKIT_SLICES names for it. Raises InputError for one that is no slice, and for two of the same name."""
    named: dict[str, Path] = {}
    for folder in folders_in(NAMED):
        if named.get(folder.name, folder) != folder:
            raise InputError(f"{NAMED} names two slices of {folder.name}", f"{named[folder.name]} and {folder}", "leave one of them out")
        check_folder(folder, f", named in {NAMED}")
        named[folder.name] = folder
    _write(NAMED, list(named.values()))
    return named


def check_folder(folder: Path, said: str = "") -> None:
    """Raises InputError where the folder is missing, lacks the files of a slice, or takes files of its own from the garden. said: who named it."""
    if not folder.is_dir():
        raise InputError("there is no such folder of a slice", f"{folder}{said}", "name the folder of the slice itself, which is called as its model type")
    wanted = ("__init__.py", f"modeling_{folder.name.replace('-', '_')}.py")
    lacking = [name for name in wanted if not (folder / name).is_file()]
    if lacking:
        inside = sorted(inner.name for inner in folder.iterdir() if (inner / "__init__.py").is_file())
        advice = "a slice has the files of src/labkit/models/llama, and its folder and files carry the model type in their names"
        if inside:
            advice = f"name a slice in it, for example {folder / inside[0]}"
        raise InputError(f"the folder is no slice of {folder.name}: it has no {' and no '.join(lacking)}", f"{folder}{said}", advice)
    check_imports(folder)


def check_imports(folder: Path) -> None:
    """Raises InputError, with file and line, where a slice outside the package imports the garden's file in place of its own: an edit would not be run."""
    files = sorted(folder.rglob("*.py"))
    found = _taken_from_garden(folder, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))
    if found is not None:
        file, line, module = found
        raise InputError(
            f"the slice of {folder.name} imports {module} from the garden, so its own file would not be used",
            f"{file}:{line}",
            "import the slice's own files relatively: `from .modeling_NAME import ...`",
        )


@functools.lru_cache(maxsize=64)
def _taken_from_garden(folder: Path, files: tuple[tuple[Path, int, int], ...]) -> tuple[Path, int, str] | None:
    """(file, line, module) of the first such import. Times and sizes are for the cache alone. A file that cannot be parsed is told of when it is imported."""
    for file, _, _ in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for module, line in _absolute_imports(tree):
            parts = module.split(".")
            if parts[:2] == ["labkit", "models"] and len(parts) > 2:
                inner = folder.joinpath(*parts[3:])
                if parts[2] == folder.name or len(parts) > 3 and (inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file()):
                    return file, line, module
    return None


def _absolute_imports(tree: ast.Module):
    """(module, line); of `from a import b` both a and a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno
