"""One update as one program: loss, gradients over parts of the batch, clipping, the optimiser. State in, state out, its buffers donated."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from labkit.layers.precision import wide_dtype
from labkit.layers.sharding import Sharding, TensorType
from labkit.train.engine import TrainingEngine
from labkit.train.metrics import router_metrics
from labkit.train.parts import ModelParts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes. step: int32 scalar, updates done. params: name -> array. opt_state: optax's, its arrays shaped and sharded as the params."""

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optax.OptState


def new_state(params: dict[str, jax.Array], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update (traceable)."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def state_shardings(parts: ModelParts, optimizer: optax.GradientTransformation, state: TrainState, mesh: Mesh) -> TrainState:
    """Where everything of a (possibly abstract) state lies: optimiser arrays beside their parameters, numbers on every device."""
    whole, own = NamedSharding(mesh, PartitionSpec()), parts.shardings(mesh)
    opt_state = optax.tree_map_params(optimizer, lambda _, sharding: sharding, state.opt_state, own, transform_non_params=lambda _: whole)
    return TrainState(whole, own, opt_state)


def batch_shardings(sharding: Sharding, batch: dict, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where a batch lies, arrays [parts, sequences, length]: sequences over the batch axes, or on every device where they do not divide."""
    spec = sharding.spec("tokens", ("batch", "length"), TensorType.ACTIVATION)
    names = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
    shards = 1
    for name in names:
        shards *= mesh.shape[name]
    return {key: NamedSharding(mesh, PartitionSpec(None, *spec) if array.shape[1] % shards == 0 else PartitionSpec()) for key, array in batch.items()}


def train_step(state: TrainState, frozen, batch: dict, *, parts: ModelParts, engine: TrainingEngine, optimizer: optax.GradientTransformation, schedule=None):
    """(state after one update, metrics).

    batch: arrays [parts, sequences, length] (inputs, targets, and as the loss takes them). The parts run one after the other and the update is that of the
    whole batch: each part's loss counts by its counted tokens (`targets_segmentation` != 0, or all). A mixture's auxiliary loss is, as in every trainer, that
    of each part. Gradients are summed in at least float32. metrics: loss, gradient_norm (before clipping), tokens (counted), learning_rate with a schedule,
    and what the router reports.
    """

    def loss(params, part):
        value, aux = engine.loss(parts.merge(params, frozen), part)
        return value, _reported(aux)

    def weighed(part, total):
        (value, reported), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, part)
        weight = _counted(part).astype(value.dtype) / total.astype(value.dtype)
        scale = lambda x: x.astype(wide_dtype(x.dtype)) * weight.astype(wide_dtype(x.dtype))
        return jax.tree.map(scale, (value, reported, gradients))

    count = next(iter(batch.values())).shape[0]
    total = jnp.maximum(_counted(batch), 1)
    if count == 1:
        (value, reported), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, {name: array[0] for name, array in batch.items()})
    else:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(weighed, {name: array[0] for name, array in batch.items()}, total))
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, weighed(part, total)), None)
        value, reported, gradients = jax.lax.scan(add, empty, batch)[0]
    gradients = {name: gradient.astype(wide_dtype(gradient.dtype)) for name, gradient in gradients.items()}
    metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients), "tokens": _counted(batch), **reported}
    if schedule is not None:
        metrics["learning_rate"] = schedule(state.step)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics


def _counted(batch: dict):
    """How many tokens of a batch the loss counts: int32."""
    if "targets_segmentation" in batch:
        return jnp.sum(batch["targets_segmentation"] != 0, dtype=jnp.int32)
    return jnp.asarray(batch["targets"].size, jnp.int32)


def _reported(aux: dict) -> dict:
    found = router_metrics(aux)
    return found | ({"moe_lb_loss": aux["moe_lb_loss"]} if "moe_lb_loss" in aux else {})
