"""What config classes make of a config.json, kept between processes: importing them means importing torch, several seconds in every kernel and command."""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from labkit.hf.scratch import scratch_dir

_READERS = ("config.py", "config_cache.py", "rope_spellings.py")


def remembered(raw: dict, name: str, compute: Callable[[], dict]) -> dict:
    """`compute()` as plain JSON data, from the scratch folder when the same config was asked for the same thing before.

    The key holds the config, the transformers version and this package's code that reads configs. A scratch folder that cannot be written costs the time only.
    """
    seed = [raw, name, importlib.metadata.version("transformers"), *(Path(__file__).with_name(reader).read_text() for reader in _READERS)]
    key = hashlib.sha256(json.dumps(seed, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = scratch_dir() / "configs" / f"{key}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        text = json.dumps(compute(), default=str)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        pass
    return json.loads(text)
