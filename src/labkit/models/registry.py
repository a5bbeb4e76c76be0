"""What a family is, and where it is found: refined slices by name, others by registration. Nothing is imported before it is asked for."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from labkit.errors import BlockedError


@dataclasses.dataclass(frozen=True)
class Family:
    """One slice's public face (design, "Family slice").

    name: the model_type. source: "refined" or "translated". config, sharding, model: classes. create(config, *, rngs, mesh=None, quant_mode_str=None) -> model.
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
_registered: dict[str, tuple[Callable[[], Family], str]] = {}


def refined_families() -> list[str]:
    """Model types whose slice lies in the package."""
    return sorted(folder.name for folder in _GARDEN.iterdir() if (folder / f"modeling_{folder.name}.py").is_file())


def register_family(model_type: str, loader: Callable[[], Family], source: str = "translated") -> None:
    """Make a slice from outside the package known: `loader()` is called when the family is first asked for. A refined slice of the same name goes first."""
    _registered[model_type] = (loader, source)


def register_folder(folder: Path, source: str = "translated") -> None:
    """Register a slice that lies in a folder of its own, named after its model type, with the files of a refined slice."""
    folder = Path(folder)

    def load() -> Family:
        name = f"labkit_slices.{folder.name}"
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return dataclasses.replace(module.FAMILY, source=source, path=folder)

    register_family(folder.name, load, source)


def _register_from_environment() -> None:
    """Folders named in $LABKIT_SLICES: so kernels and workers, which are processes of their own, know them too."""
    for folder in filter(None, os.environ.get("LABKIT_SLICES", "").split(os.pathsep)):
        if (Path(folder) / "__init__.py").is_file() and Path(folder).name not in _registered:
            register_folder(Path(folder))


def get_family(model_type: str) -> Family:
    """The slice of a model type: refined, or registered (by a call, or by $LABKIT_SLICES). Raises BlockedError when the garden has none."""
    _register_from_environment()
    if model_type in refined_families():
        return importlib.import_module(f"labkit.models.{model_type}").FAMILY
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
        return iter(sorted({*refined_families(), *_registered}))

    def __len__(self) -> int:
        return len(set(self))


MODEL_REGISTRY = _Registry("create")
MODEL_FLOPS_REGISTRY = _Registry("tflops")
MODEL_ENGINE_CONFIG_REGISTRY = _Registry("configure_engine")
