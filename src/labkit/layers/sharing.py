"""Modules that several layers share: one object at several paths, its parameters in the state once."""

import re

from flax import nnx


def share_modules(model: nnx.Module, table: dict | None) -> None:
    """Every module whose whole path matches a key of the table becomes the module at the path that the value gives.

    table: regular expression or path below `model` ("layers.5.block") -> the path of the module that is kept, as transformers writes the weights it ties.
    Raises ValueError when an entry matches no module.
    """
    for pattern, source in (table or {}).items():
        paths = {".".join(map(str, path)): path for path, _ in nnx.iter_modules(model)}
        found = [path for name, path in paths.items() if re.fullmatch(pattern, name) and name != source]
        if source not in paths or not found:
            raise ValueError(f"no modules to share: {pattern!r} as {source!r}")
        kept = _at(model, paths[source])
        for path in found:
            parent = _at(model, path[:-1])
            if isinstance(path[-1], int):
                parent[path[-1]] = kept
            else:
                setattr(parent, path[-1], kept)


def _at(model, path):
    for part in path:
        model = model[part] if isinstance(part, int) else getattr(model, part)
    return model
