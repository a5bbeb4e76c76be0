"""The engine adapter: a loss function of a family, its value and its gradients with respect to `nnx.Param` and nothing else."""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from labkit.errors import BlockedError
from labkit.layers.stack import REMAT_POLICIES
from labkit.models.registry import MODEL_ENGINE_CONFIG_REGISTRY


@dataclasses.dataclass(frozen=True)
class TrainingEngine:
    """loss_fn(model, batch) -> loss, or (loss, aux) with has_aux. A family's `configure_<family>_engine` returns an engine with its own loss.

    scan, remat: how the model runs its layers, handed to every call of the model that the loss makes.
    """

    loss_fn: Callable | None = None
    has_aux: bool = False
    scan: bool = True
    remat: str | None = None

    def with_loss_fn(self, loss_fn: Callable, *, has_aux: bool = False) -> "TrainingEngine":
        """The engine with this loss."""
        return dataclasses.replace(self, loss_fn=loss_fn, has_aux=has_aux)

    def with_forward(self, *, scan: bool = True, remat: str | None = None) -> "TrainingEngine":
        """The engine whose model runs its layers so. remat: a name in `REMAT_POLICIES` or None; raises ValueError for another one."""
        if remat is not None and remat not in REMAT_POLICIES:
            raise ValueError(f"remat policy {remat!r}: choose one of {', '.join(REMAT_POLICIES)}, or None")
        return dataclasses.replace(self, scan=scan, remat=remat)

    def loss(self, model: nnx.Module, batch: dict):
        """(loss, aux) of one batch; aux is {} without has_aux. Raises ValueError before a loss was given."""
        if self.loss_fn is None:
            raise ValueError("the engine has no loss; pass it through configure_<family>_engine first")
        called = model if self.scan and self.remat is None else _Called(model, scan=self.scan, remat=self.remat)
        result = self.loss_fn(called, batch)
        return result if self.has_aux else (result, {})

    def loss_and_gradients(self, model: nnx.Module, batch: dict):
        """(loss, aux, gradients): gradients is an `nnx.State` of the model's Params. Raises ValueError before a loss was given."""
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: self.loss(nnx.merge(graphdef, params, rest), batch)
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, aux, gradients


class _Called:
    """A model whose calls get further keywords; everything else is the model's own."""

    def __init__(self, model, **keywords):
        self._model, self._keywords = model, keywords

    def __call__(self, *args, **keywords):
        return self._model(*args, **{**self._keywords, **keywords})

    def __getattr__(self, name):
        return getattr(self._model, name)


def family_engine(model_type: str, *, scan: bool = True, remat: str | None = None) -> TrainingEngine:
    """The engine of a family, by MODEL_ENGINE_CONFIG_REGISTRY. Raises BlockedError when the garden has no such family."""
    try:
        configure = MODEL_ENGINE_CONFIG_REGISTRY[model_type]
    except KeyError:
        raise BlockedError(f"the garden has no slice for model type {model_type!r}", next="register one, or call ensure_slice first") from None
    return configure(TrainingEngine()).with_forward(scan=scan, remat=remat)
