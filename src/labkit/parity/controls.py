"""Controls that must fail: ports that are wrong in one known way."""

import dataclasses

from flax import nnx

from labkit.errors import InputError
from labkit.models import get_family


def with_wrong_eps(config) -> tuple[object, str, float, float]:
    """(config, key, right, wrong): the norms' eps 1e-6 where it is 1e-5, and 1e-5 elsewhere. Raises InputError when the config has no eps."""
    keys = [field.name for field in dataclasses.fields(config) if field.name.endswith(("_eps", "_epsilon")) and isinstance(getattr(config, field.name), float)]
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
