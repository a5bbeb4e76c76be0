"""Controls that must fail: ports that are wrong in one known way."""

import dataclasses

import numpy as np
from flax import nnx

from labkit.errors import InputError
from labkit.models import get_family


def has_eps(config) -> bool:
    """True when `with_wrong_eps` has something to get wrong."""
    return bool(_eps_keys(config))


def _eps_keys(config) -> list[str]:
    return [f.name for f in dataclasses.fields(config) if f.name.endswith(("_eps", "_epsilon")) and isinstance(getattr(config, f.name), float)]


def with_wrong_weight(model) -> tuple[object, str, float, float]:
    """(model, name, right, wrong): a copy whose largest parameter beside the embedding is multiplied by 1.001 instead of 1."""
    graphdef, state = nnx.split(model)
    leaves = dict(nnx.to_flat_state(state))
    inner = {path: leaf for path, leaf in leaves.items() if "embed" not in ".".join(map(str, path)) and np.issubdtype(leaf.get_raw_value().dtype, np.floating)}
    path = max(inner, key=lambda path: inner[path].get_raw_value().size)
    leaves[path] = leaves[path].replace(leaves[path].get_raw_value() * np.asarray(1.001, leaves[path].get_raw_value().dtype))
    return nnx.merge(graphdef, nnx.from_flat_state(list(leaves.items()))), f"{'.'.join(map(str, path))} x", 1.0, 1.001


def with_wrong_eps(config) -> tuple[object, str, float, float]:
    """(config, key, right, wrong): the norms' eps 1e-6 where it is 1e-5, and 1e-5 elsewhere. Raises InputError when the config has no eps."""
    keys = _eps_keys(config)
    if not keys:
        raise InputError("the config has no eps to get wrong", type(config).__name__, "choose another control for this family")
    right = getattr(config, keys[0])
    wrong = 1e-6 if right == 1e-5 else 1e-5
    return dataclasses.replace(config, **dict.fromkeys(keys, wrong)), keys[0], right, wrong


def rebuild(model, model_type: str, config):
    """The parameters of `model` in a model of another config of the same family, whose parameters have the same paths and shapes."""
    abstract = nnx.eval_shape(lambda: get_family(model_type).create(config, rngs=nnx.Rngs(0), mesh=model.mesh))
    graphdef, wanted = nnx.split(abstract)
    _, state = nnx.split(model)
    shapes = [{".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(part)} for part in (wanted, state)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
        raise InputError(f"the configs have different parameters: {', '.join(differing[:3])}", next="a control changes numbers, not shapes")
    return nnx.merge(graphdef, state)
