"""Checkpoints with one thing changed."""

import json
import shutil

import numpy as np
import pytest

from labkit.hf import open_source
from labkit.hf.safetensors_io import NAMES, Slot, write_safetensors


@pytest.fixture(autouse=True, scope="session")
def _scratch(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        yield


@pytest.fixture(scope="session")
def tiny(_scratch):
    """tiny(name) -> Source, opened once."""
    opened = {}

    def get(name):
        if name not in opened:
            opened[name] = open_source(f"tiny:{name}")
        return opened[name]

    return get


def rewritten(source, out, tensors=None, config=None, max_shard_size=5_000_000_000):
    """A copy of a source. tensors: dict name -> array changed in place; config: the same for config.json."""
    out.mkdir(parents=True)
    for path in source.path.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    raw = json.loads((out / "config.json").read_text())
    if config is not None:
        config(raw)
        (out / "config.json").write_text(json.dumps(raw))
    arrays = {name: np.array(source.tensors.read(name)) for name in source.tensors}
    if tensors is not None:
        tensors(arrays)
    write_safetensors(out, [Slot(n, NAMES[a.dtype], a.shape) for n, a in arrays.items()], arrays.values(), max_shard_size=max_shard_size)
    return open_source(out)


def numbered(array):
    """Values that are all different in any float dtype that holds the array's size."""
    return (np.arange(array.size, dtype=np.float32).reshape(array.shape) % 251).astype(array.dtype)
