"""The layer plan of a translated decoder, read off its layers: each is built without numbers, and layers that come out alike are of one kind."""

from flax import nnx

from labkit.layers.building import Build
from labkit.layers.plan import LayerPlan
from labkit.layers.sharding import Sharding

_plans: dict = {}


def plan_layers(count: int, make_layer, config, labels=None) -> LayerPlan:
    """The plan of `count` layers made by make_layer(layer_idx, build).

    Two layers are of one kind when graph definition (static attributes included), paths, shapes and dtypes agree, and their `labels` (one per layer, when
    given: what the decoder's loop reads by layer index). A kind is named by `config.layer_types` where that tells the kinds apart, else
    `layer_<index of its first>`. Kept per config.
    """
    key = (config, count, labels)
    if key not in _plans:
        signatures = layer_signatures(count, make_layer, config)
        if labels is not None:
            signatures = list(zip(signatures, labels, strict=True))
        _plans[key] = LayerPlan.from_kinds(kind_names(signatures, getattr(config, "layer_types", None)))
    return _plans[key]


class _NoRandomness:
    """Stands in for `nnx.Rngs` where no number is drawn: counting keys under a trace costs more than everything else."""

    def params(self):
        return None


def layer_signatures(count: int, make_layer, config) -> list:
    """One hashable signature per layer: equal exactly where layers can be stacked."""

    def build_all():
        with nnx.use_eager_sharding(False):
            build = Build(_NoRandomness(), Sharding(), config.dtype, config.param_dtype, plain=True)
            return nnx.List([make_layer(index, build) for index in range(count)])

    return [_signature(layer) for layer in nnx.eval_shape(build_all)]


def _signature(layer):
    graphdef, state = nnx.split(layer)
    return graphdef, tuple((path, leaf.get_raw_value().shape, str(leaf.get_raw_value().dtype)) for path, leaf in nnx.to_flat_state(state))


def kind_names(signatures: list, layer_types=None) -> list[str]:
    """A readable name per layer, one per distinct signature."""
    first: dict = {}
    for index, signature in enumerate(signatures):
        first.setdefault(signature, index)
    numbers = [first[signature] for signature in signatures]
    if layer_types is not None and len(layer_types) >= len(signatures):
        types = [str(kind) for kind in layer_types[: len(signatures)]]
        pairs = set(zip(numbers, types))
        if len(pairs) == len(set(numbers)) == len({kind for _, kind in pairs}):
            return types
    return ["layer"] * len(numbers) if len(set(numbers)) == 1 else [f"layer_{number}" for number in numbers]
