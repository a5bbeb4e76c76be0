"""What the installed transformers knows, read from its source files: no import of transformers or torch."""
import ast
import difflib
import functools
import importlib.util
from pathlib import Path

from labkit.errors import InputError


@functools.cache
def transformers_folder() -> Path:
    """The folder of the installed package. Raises InputError when transformers is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        raise InputError("The package transformers is not installed", next="Install labkit with its dependencies into this environment")
    return Path(spec.origin).parent


def _mapping(file: str, name: str) -> dict[str, str]:
    tree = ast.parse((transformers_folder() / "models" / "auto" / file).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            if isinstance(node.value, ast.Call) and node.value.args:
                return {key: value for key, value in ast.literal_eval(node.value.args[0])}
    raise InputError(f"This version of transformers has no table {name}", transformers_folder() / "models" / "auto" / file, "Install the version that pyproject.toml names")


@functools.cache
def config_classes() -> dict[str, str]:
    """model_type -> name of the config class, every type of the installed transformers."""
    return _mapping("auto_mappings.py", "CONFIG_MAPPING_NAMES")


@functools.cache
def causal_lm_classes() -> dict[str, str]:
    """model_type -> name of the class that AutoModelForCausalLM builds."""
    return _mapping("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def near(name: str, known) -> list[str]:
    """Up to five known names that look like `name`."""
    return difflib.get_close_matches(str(name), list(known), 5, 0.6)


def suggestion(name: str, known) -> str:
    """"Did you mean a, b?", or an empty string."""
    found = near(name, known)
    return f"Did you mean {', '.join(found)}?" if found else ""


@functools.cache
def special_modules() -> dict[str, str]:
    """model_type -> folder under transformers/models where the two differ."""
    return _mapping("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


def modeling_file(model_type: str) -> Path | None:
    """The reference's modeling file, or None when the type has none of its own (it borrows another's class)."""
    if model_type not in config_classes():
        return None
    folder = special_modules().get(model_type, model_type).replace("-", "_")
    file = transformers_folder() / "models" / folder / f"modeling_{folder}.py"
    return file if file.is_file() else None


@functools.cache
def optional_keys(model_type: str) -> frozenset[str]:
    """Config keys that the reference reads by `getattr(config, "key", ...)`: a checkpoint may set them although the config class does not declare them."""
    file = modeling_file(model_type)
    if file is None:
        return frozenset()
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr")
    found = set()
    for call in calls:
        if len(call.args) >= 2 and ast.unparse(call.args[0]) in ("config", "self.config") and isinstance(call.args[1], ast.Constant):
            found.add(call.args[1].value)
    return frozenset(key for key in found if isinstance(key, str) and not key.startswith("_"))
