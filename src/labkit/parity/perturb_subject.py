"""What is attacked: one tiny checkpoint, the reference and our model of it in float64, and variants of both with tensors or config keys changed."""

import contextlib
import functools
import itertools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from labkit.parity.compare import relative_error

LENGTH = 40
"""Tokens of a row: beyond every window, chunk and rope threshold that tiny configurations have below 40."""
MOVES = 1e-8
"""A change that moves logits by less, relatively, is taken for none: ten times the limit within which both sides must agree."""


class Subject(contextlib.AbstractContextManager):
    """Built inside `jax.enable_x64`. Removes what it wrote when the `with` block ends.

    source: a `Source` or a model's name. seed: of the tokens, int32 [2, 40]. Raises what loading either side raises.
    """

    def __init__(self, source, seed: int = 0):
        from flax import nnx

        from labkit.converters.loading import fit
        from labkit.hf.source import open_source
        from labkit.models import get_family

        self.source = open_source(source) if isinstance(source, str) else source
        self.model_type = self.source.config.model_type
        self.family = get_family(self.model_type)
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-perturb-"))
        self._count = itertools.count()
        try:
            self.reference = self.load_reference(self.source.path)
            self.model, self.config = self.load_ours(self.source)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.graphdef, self.state = nnx.split(self.model)
        self.leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(self.state)}
        shapes = {path: leaf.get_raw_value().shape for path, (_, leaf) in self.leaves.items()}
        self.expansion = fit(self.source, self.family, self.config, _Shapes(shapes)).expansion
        vocab = self.reference.model.get_input_embeddings().weight.shape[0]
        self.tokens = np.random.default_rng(seed).integers(3, vocab, (2, LENGTH)).astype(np.int32)
        self.vocab = vocab
        self._call = fresh_call()

    def __exit__(self, *raised):
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the reference --------------------------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def load_reference(path):
        from labkit.hf.reference import Reference

        return Reference.load(path, "exact")

    def variant(self, *, config: Mapping | None = None, tensors: Mapping | None = None) -> Path:
        """A directory with config keys or tensors changed."""
        from labkit.hf.altered import altered_directory

        return altered_directory(self.source.path, self.folder / str(next(self._count)), config=config, tensors=tensors)

    def theirs(self, tokens=None, mask=None, *, at: Path | None = None) -> np.ndarray:
        """The reference's logits [batch, length, vocab], of the directory `at` where one is given. Raises InputError when it cannot be loaded or run."""
        reference = self.reference if at is None else self.load_reference(at)
        return reference.logits(self.tokens if tokens is None else tokens, mask)

    @functools.cached_property
    def plain_theirs(self) -> np.ndarray:
        return self.theirs()

    # -- ours -----------------------------------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def load_ours(source):
        """(model, config) in float64, straight from the tensors."""
        import jax.numpy as jnp

        from labkit.converters import load_model
        from labkit.hf.source import open_source

        model, config, _ = load_model(open_source(str(source)) if isinstance(source, Path) else source, dtype=jnp.float64)
        return model, config

    def ours(self, tokens=None, segment_ids=None, *, leaves: Mapping[str, np.ndarray] | None = None, model=None, call=None) -> np.ndarray:
        """Our logits. leaves: path -> array put in the place of the model's own. model: another one. call: another compiled call (see `fresh_call`)."""
        from flax import nnx

        graphdef, state = (self.graphdef, self.state) if model is None else nnx.split(model)
        if leaves:
            changed = {self.leaves[path][0]: array for path, array in leaves.items()}
            state = nnx.from_flat_state([(path, leaf.replace(changed[path]) if path in changed else leaf) for path, leaf in nnx.to_flat_state(state)])
        tokens = self.tokens if tokens is None else tokens
        segment_ids = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids, np.int32)
        return np.asarray((call or self._call)(graphdef, state, tokens, segment_ids))

    @functools.cached_property
    def plain_ours(self) -> np.ndarray:
        return self.ours()

    @functools.cached_property
    def base_error(self) -> float:
        """Our logits against the reference's, nothing changed."""
        return relative_error(self.plain_ours, self.plain_theirs)


class _Shapes:
    """What `fit` asks of an abstract model."""

    def __init__(self, shapes):
        self.shapes = shapes


def moved(after: np.ndarray, before: np.ndarray, where=None) -> float:
    """How far logits moved: max|after - before| / max|before|, over the positions of a mask [batch, length] where one is given. 0 for none."""
    if where is not None and not np.asarray(where, bool).any():
        return 0.0
    return relative_error(after, before, where)


def fresh_call():
    """A compiled call of any model that shares no trace with another: functions that were exchanged while it is traced stay exchanged in it."""
    import jax
    from flax import nnx

    @functools.partial(jax.jit, static_argnums=0)
    def call(graphdef, state, tokens, segment_ids):
        return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids)

    return call
