"""One tiny checkpoint under test: the reference and our model in float64, one batch, and the training step in every form that a slice offers."""

import contextlib
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.converters.filling import dotted
from labkit.converters.placement import Placement, placements
from labkit.errors import BlockedError
from labkit.parity.gradients import batch_of, through_rules
from labkit.train.engine import TrainingEngine

BATCH, LENGTH = 4, 48
MESH = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 1}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Tiny models: compiling takes longer than running."""


@contextlib.contextmanager
def exactly():
    """float64 on, strict dtype promotion, full precision of products: what every exact comparison runs under."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        yield


@dataclass(frozen=True)
class TrainingStep:
    """What one training step gave: loss; aux: dict of arrays; logits [batch, length, vocab]; gradients: path of each Param -> array."""

    loss: float
    aux: dict
    logits: np.ndarray
    gradients: dict[str, np.ndarray]


class Subject:
    """A source and everything that the checks make of it, each made once. The family must be known to the registry.

    source: a model name, a directory or a `Source`. seed: of the tokens. Use within `exactly()`.
    """

    def __init__(self, source, *, seed: int = 0):
        from labkit.hf.source import open_source

        self.source = open_source(str(source)) if isinstance(source, str | Path) else source
        self.model_type, self.seed = self.source.config.model_type, seed
        self._steps: dict = {}
        self._programs: dict = {}

    @cached_property
    def family(self):
        from labkit.models import get_family

        return get_family(self.model_type)

    @cached_property
    def reference(self):
        """In float64."""
        from labkit.hf.reference import Reference

        return Reference.load(self.source.path, "exact")

    @cached_property
    def _loaded(self):
        from labkit.converters import load_model

        return load_model(self.source, dtype=jnp.float64)

    @property
    def model(self):
        return self._loaded[0]

    @property
    def config(self):
        return self._loaded[1]

    @cached_property
    def vocabulary(self) -> int:
        """Token ids that both sides take."""
        return self.reference.model.get_input_embeddings().weight.shape[0]

    @cached_property
    def tokens(self) -> np.ndarray:
        """int32 [4, 48]: longer than every window and chunk of a tiny model."""
        return self.drawn(self.seed)

    def drawn(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, self.vocabulary, (BATCH, LENGTH)).astype(np.int32)

    @cached_property
    def variables(self) -> dict[str, nnx.Variable]:
        """path -> variable of the model."""
        return {dotted(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(self.model))}

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """path -> which layers a parameter is stacked over, and the shape of one row."""
        return placements(self.config.plan, {path: tuple(leaf.get_raw_value().shape) for path, leaf in self.variables.items()}, True)

    @property
    def loss_fn(self):
        """(loss function, whether it has aux) that the family's `configure_engine` gives the engine."""
        engine = self.family.configure_engine(TrainingEngine())
        return engine.loss_fn, engine.has_aux

    def step(self, *, scan: bool = True, remat: str | None = None, tokens=None, mask=None, counted=None) -> TrainingStep:
        """The engine's loss with its gradients and the logits it was made of, by one compiled program per form.

        tokens int [4, 48], mask (0 in left padding) and counted (targets_segmentation) of the same shape; the subject's own tokens, no padding, and all
        positions but the last when left out.
        """
        key = (scan, remat, *(None if a is None else np.asarray(a).tobytes() for a in (tokens, mask, counted)))
        if key not in self._steps:
            batch = batch_of(self.tokens if tokens is None else tokens, mask)
            if counted is not None:
                batch["targets_segmentation"] = np.asarray(counted, np.int32)
            graphdef, params, rest = nnx.split(self.model, nnx.Param, ...)
            if (scan, remat) not in self._programs:
                self._programs[scan, remat] = _training_step(self.loss_fn, graphdef, scan, remat)
            (loss, (aux, logits)), gradients = self._programs[scan, remat](params, rest, batch)
            self._steps[key] = TrainingStep(
                float(loss),
                {name: np.asarray(value) for name, value in aux.items()},
                np.asarray(logits),
                {dotted(path): np.asarray(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(gradients)},
            )
        return self._steps[key]

    def forward(self, tokens, segment_ids=None, cache=None, *, scan: bool = True, model=None):
        """The call of the model (or of another in its place), compiled: logits, or (logits, cache). One program per shape: segment ids are always given."""
        graphdef, state = nnx.split(self.model if model is None else model)
        tokens = np.asarray(tokens, np.int32)
        segment_ids = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids, np.int32)
        return self._forward(graphdef, state, tokens, segment_ids, cache, scan=scan)

    @cached_property
    def _forward(self):
        """The subject's own: what is compiled for one does not outlive it."""

        @partial(jax.jit, static_argnums=0, static_argnames="scan", compiler_options=QUICK)
        def call(graphdef, state, tokens, segment_ids, cache, *, scan):
            return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache, scan=scan)

        return call

    @cached_property
    def wanted(self):
        """The reference's loss and gradients on `tokens`: (`LossAndGradients`, gradients as ours)."""
        return self.reference_gradients(self.tokens)

    def reference_gradients(self, tokens, mask=None):
        from labkit.hf.gradients import loss_and_gradients
        from labkit.parity.gradients import labels_of

        wanted = loss_and_gradients(self.reference, tokens, labels_of(tokens, mask), mask)
        return wanted, through_rules(self.source, self.family, self.config, wanted.gradients)

    @cached_property
    def mesh(self):
        """(1, 2, 2, 1) over the first four devices. Raises BlockedError where there are fewer."""
        from labkit.scale.mesh import build_mesh

        if len(jax.devices()) < 4:
            raise BlockedError("the checks on a mesh need four devices", f"{len(jax.devices())} visible", "start with --xla_force_host_platform_device_count=8")
        return build_mesh(**MESH, devices=jax.devices()[:4])

    @cached_property
    def sharded_model(self):
        """The model with its weights spread over `mesh`."""
        from labkit.converters import load_model

        return load_model(self.source, dtype=jnp.float64, mesh=self.mesh)[0]

    def create(self, mesh):
        """The family's model with random parameters on `mesh`."""
        return self.family.create(self.config, rngs=nnx.Rngs(0), mesh=mesh)


class Called:
    """A model whose calls take further options, and which remembers its last logits. Everything else is the model's own."""

    def __init__(self, model, **options):
        self._model, self._options, self.logits = model, options, None

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *arguments, **keywords):
        result = self._model(*arguments, **keywords, **self._options)
        self.logits = result[0] if isinstance(result, tuple) else result
        return result


def _training_step(loss_fn, graphdef, scan: bool, remat: str | None):
    function, has_aux = loss_fn

    def step(params, rest, batch):
        def loss(params):
            model = Called(nnx.merge(graphdef, params, rest), scan=scan, remat=remat)
            result = function(model, batch)
            value, aux = result if has_aux else (result, {})
            return value, (aux, model.logits)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(step, compiler_options=QUICK)
