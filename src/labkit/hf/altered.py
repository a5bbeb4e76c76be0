"""A checkpoint directory with config keys or tensors changed, beside the one it was made from: what both sides of an attack load."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from labkit.errors import InputError
from labkit.hf.safetensors_io import write_safetensors
from labkit.hf.tensors import read_table


def altered_directory(
    directory: str | os.PathLike, out: str | os.PathLike, *, config: Mapping | None = None, tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """`out`, a new checkpoint directory: that of `directory` with keys of config.json set (None is written as null) and tensors of the same shapes replaced.

    tensors: name -> array in the tensor's dtype and shape. Raises InputError for a tensor that the checkpoint lacks.
    """
    directory, out = Path(directory), Path(out)
    out.mkdir(parents=True)
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    values.update(config or {})
    (out / "config.json").write_text(json.dumps(values, indent=1, default=_plain), encoding="utf-8")
    if not tensors:
        for file in directory.glob("*.safetensors*"):
            shutil.copyfile(file, out / file.name)
        return out
    table = read_table(directory)
    unknown = sorted(set(tensors) - set(table))
    if unknown:
        raise InputError(f"The checkpoint has no tensor {unknown[0]}", directory)
    write_safetensors(out, table.values(), (np.ascontiguousarray(tensors[name]) if name in tensors else table.read(name) for name in table))
    return out


def _plain(value):
    """Numpy numbers, and sets of names, as JSON has them."""
    return value.item() if isinstance(value, np.generic) else sorted(value)
