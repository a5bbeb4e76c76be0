"""What a family is, and where it is found: folders that a person names, the garden's slices, what the lab found. Nothing is imported before it is asked for."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from labkit.errors import BlockedError, InputError
from labkit.models.outside import FOUND, NAMED, check_folder, check_imports, folders_in, full, named_folders, put_into


@dataclasses.dataclass(frozen=True)
class Family:
    """One slice's public face (design, "Family slice").

    name: the model_type. source: "refined", "translated" or "edited" (translated, and changed since by a person).
    config, sharding, model: classes. create(config, *, rngs, mesh=None, quant_mode_str=None) -> model.
    rules(config) -> RuleTable. tflops(config, *, batch, length, log) -> TrainingFlops. configure_engine(engine) -> engine.
    """

    name: str
    config: type
    sharding: type
    model: type
    create: Callable
    rules: Callable
    tflops: Callable
    configure_engine: Callable
    path: Path
    source: str = "refined"


_GARDEN = Path(__file__).parent
PROVENANCE = "provenance.json"
"""The file beside a translated slice that says what it was made from."""
_registered: dict[str, tuple[Callable[[], Family], str]] = {}
_folders: dict[str, Path] = {}


def refined_families() -> list[str]:
    """Model types whose slice lies in the package."""
    return sorted(folder.name for folder in _GARDEN.iterdir() if (folder / f"modeling_{folder.name}.py").is_file())


def register_family(model_type: str, loader: Callable[[], Family], source: str = "translated") -> None:
    """Make a slice from outside the package known: `loader()` is called when the family is first asked for. A refined slice of the same name goes first."""
    _registered[model_type] = (functools.cache(loader), source)
    _folders.pop(model_type, None)


def register_folder(folder: Path, source: str | None = None) -> None:
    """Name a slice that lies in a folder of its own, called as its model type, with the files of a refined slice.

    It goes before a refined slice of the same name, here and, through $LABKIT_SLICES, in every process started from here. source: by its provenance when None.
    Raises InputError for a folder that is no slice.
    """
    folder = full(folder)
    check_folder(folder)
    put_into(NAMED, folder)
    _register(folder, source)


def register_found(folder: Path, source: str | None = None) -> None:
    """Make a slice known that the lab found or wrote itself, here and in the processes started from here. A refined slice of the same name goes first."""
    check_imports(full(folder))
    put_into(FOUND, full(folder))
    _register(full(folder), source)


def _register(folder: Path, source: str | None = None) -> None:
    source = source or folder_source(folder) or "refined"

    def load() -> Family:
        name = f"labkit_slices.{folder.name}"
        for stale in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[stale]
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            family = module.FAMILY
        except Exception as error:
            del sys.modules[name]
            text = f"the slice cannot be imported: {type(error).__name__}: {error}"
            raise InputError(text, folder, "mend the file that it names, or remove the folder to have it written anew") from error
        return dataclasses.replace(family, source=source, path=folder)

    register_family(folder.name, load, source)
    _folders[folder.name] = folder


def registered_folder(model_type: str) -> Path | None:
    """The folder that a model type was last registered from."""
    return _folders.get(model_type)


def registered_source(model_type: str) -> str | None:
    """What a registered slice is called: "refined", "translated" or "edited"."""
    return _registered[model_type][1] if model_type in _registered else None


def folder_source(folder: Path) -> str | None:
    """ "translated" for a slice whose files are as its provenance says they were written, "edited" where one differs, None (a person wrote it) without one."""
    try:
        files = json.loads((Path(folder) / PROVENANCE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return None
    same = all((Path(folder) / name).is_file() and hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() == digest for name, digest in files.items())
    return "translated" if same else "edited"


def _register_from_environment() -> dict[str, Path]:
    """The named folders, registered as the found ones are: kernels and workers, which are processes of their own, know them by the environment."""
    named = named_folders()
    found = {folder.name: folder for folder in folders_in(FOUND) if (folder / "__init__.py").is_file()}
    for name, folder in (found | named).items():
        if name not in _registered or (name in named or name in _folders) and _folders.get(name) != folder:
            _register(folder)
    for name in [name for name in _folders if name not in found | named]:
        _registered.pop(name, None)
        del _folders[name]
    return named


def prefers_translated() -> bool:
    """True with LABKIT_PREFER=translated: slices that the lab translated go before refined ones of the same name, to compare the two."""
    return os.environ.get("LABKIT_PREFER") == "translated"


def get_family(model_type: str) -> Family:
    """The slice of a model type: one that a person named (by `register_folder`, or in $LABKIT_SLICES), else a refined one, else one that is registered.

    Raises BlockedError when there is none; InputError when $LABKIT_SLICES names a folder that is no slice.
    """
    named = _register_from_environment()
    if model_type in refined_families() and model_type not in named and not (prefers_translated() and model_type in _registered):
        family = importlib.import_module(f"labkit.models.{model_type}").FAMILY
        return dataclasses.replace(family, source=folder_source(_GARDEN / model_type) or family.source)
    if model_type in _registered:
        return _registered[model_type][0]()
    raise BlockedError(
        f"the garden has no slice for model type {model_type!r}",
        f"refined slices: {', '.join(refined_families())}" + (f"; registered: {', '.join(sorted(_registered))}" if _registered else ""),
        "write a slice under src/labkit/models or register one with labkit.models.register_folder",
    )


class _Registry(Mapping):
    """One attribute of each family, by model type; a family is imported when its entry is read."""

    def __init__(self, attribute: str):
        self._attribute = attribute

    def __getitem__(self, model_type: str):
        if model_type not in set(self):
            raise KeyError(model_type)
        return getattr(get_family(model_type), self._attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*refined_families(), *named_folders(), *_registered}))

    def __len__(self) -> int:
        return len(set(self))


MODEL_REGISTRY = _Registry("create")
MODEL_FLOPS_REGISTRY = _Registry("tflops")
MODEL_ENGINE_CONFIG_REGISTRY = _Registry("configure_engine")
