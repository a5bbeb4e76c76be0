"""The engine adapter: a loss function of a family, its value and its gradients with respect to `nnx.Param` and nothing else."""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class TrainingEngine:
    """loss_fn(model, batch) -> loss, or (loss, aux) with has_aux. A family's `configure_<family>_engine` returns an engine with its own loss."""

    loss_fn: Callable | None = None
    has_aux: bool = False

    def with_loss_fn(self, loss_fn: Callable, *, has_aux: bool = False) -> "TrainingEngine":
        """The engine with this loss."""
        return dataclasses.replace(self, loss_fn=loss_fn, has_aux=has_aux)

    def loss_and_gradients(self, model: nnx.Module, batch: dict):
        """(loss, aux, gradients): gradients is an `nnx.State` of the model's Params. Raises ValueError before a loss was given."""
        if self.loss_fn is None:
            raise ValueError("the engine has no loss; pass it through configure_<family>_engine first")
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            result = self.loss_fn(nnx.merge(graphdef, params, rest), batch)
            return result if self.has_aux else (result, {})

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, aux, gradients
