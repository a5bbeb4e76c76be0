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


def _auto(file: str) -> Path:
    return transformers_folder() / "models" / "auto" / file


def _mapping(file: str, name: str) -> dict[str, str]:
    """A literal table `NAME = OrderedDict([(key, value), ...])`."""
    for node in ast.parse(_auto(file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call) and node.value.args:
            return dict(ast.literal_eval(node.value.args[0]))
    raise InputError(f"This version of transformers has no table {name}", _auto(file), "Install the version that pyproject.toml names")


def _additions(file: str, name: str) -> dict[str, str]:
    """What a file adds to a table: `NAME.update({...})` and `NAME = OrderedDict(**{...}, **NAME)`."""
    found: dict[str, str] = {}
    for node in ast.parse(_auto(file).read_text()).body:
        call = node.value if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call) else None
        if call is None:
            continue
        if ast.unparse(call.func) == f"{name}.update":
            found |= ast.literal_eval(call.args[0])
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            for keyword in call.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                    found |= ast.literal_eval(keyword.value)
    return found


@functools.cache
def config_classes() -> dict[str, str]:
    """model_type -> name of the config class, every type of the installed transformers."""
    return _mapping("auto_mappings.py", "CONFIG_MAPPING_NAMES") | _additions("configuration_auto.py", "CONFIG_MAPPING_NAMES")


@functools.cache
def causal_lm_classes() -> dict[str, str]:
    """model_type -> name of the class that AutoModelForCausalLM builds."""
    return _mapping("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def near(name: str, known) -> list[str]:
    """Up to five known names that look like `name`."""
    return difflib.get_close_matches(str(name), list(known), 5, 0.6)


def suggestion(name: str, known) -> str:
    """ "Did you mean a, b?", or an empty string."""
    found = near(name, known)
    return f"Did you mean {', '.join(found)}?" if found else ""


def owners(class_name: str | None) -> list[str]:
    """The model types whose causal LM is this class: first those whose own modeling file defines it, then those that borrow it."""
    found = [kind for kind, name in causal_lm_classes().items() if name == class_name]
    return sorted(found, key=lambda kind: (not _defines(kind, class_name), kind))


def definers(class_name: str | None) -> list[str]:
    """The owners that define the class themselves; all owners where none does."""
    found = owners(class_name)
    return [kind for kind in found if _defines(kind, class_name)] or found


def _defines(model_type: str, class_name: str | None) -> bool:
    file = modeling_file(model_type)
    return file is not None and f"class {class_name}(" in file.read_text()


@functools.cache
def special_modules() -> dict[str, str]:
    """model_type -> folder under transformers/models where the two differ."""
    name = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
    return _mapping("auto_mappings.py", name) | _additions("configuration_auto.py", name)


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
    calls = (
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    )
    found = set()
    for call in calls:
        if len(call.args) >= 2 and ast.unparse(call.args[0]) in ("config", "self.config") and isinstance(call.args[1], ast.Constant):
            found.add(call.args[1].value)
    return frozenset(key for key in found if isinstance(key, str) and not key.startswith("_"))
