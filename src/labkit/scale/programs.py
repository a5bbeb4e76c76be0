"""The programs of a model on a mesh, without numbers: prefill, one decode step, one training step, with every argument's place on the mesh."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from labkit.converters.filling import AbstractModel, abstract_model, dotted
from labkit.errors import InputError
from labkit.scale.collectives import Role
from labkit.train.checkpoints import abstract_state
from labkit.train.loop import make_program
from labkit.train.parts import split_model
from labkit.train.settings import TrainSettings
from labkit.train.step import batch_shardings

BATCH_AXES = ("data", "fsdp", "expert")
PHASES = ("prefill", "decode", "train")


@dataclasses.dataclass(frozen=True)
class Program:
    """function(*arguments), to be compiled with these output shardings (None: the compiler's choice). arguments: trees of ShapeDtypeStructs that carry their
    shardings. roles: of every array of `arguments`, in order. donated: indices of arguments whose memory the results take over."""

    function: Callable
    arguments: tuple
    out_shardings: object
    donated: tuple[int, ...]
    roles: tuple[Role, ...]

    def lower(self, mesh: Mesh):
        """Lowered for the mesh; its `compile()` runs the compiler. Every argument stays a parameter, used or not, so that roles keep their order."""
        more = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        with jax.sharding.set_mesh(mesh):
            return jax.jit(self.function, donate_argnums=self.donated, keep_unused=True, **more).lower(*self.arguments)


def dividing(axes: tuple[str, ...], size: int, mesh: Mesh) -> tuple[str, ...]:
    """As many of `axes`, in order, as divide `size` together."""
    taken, shards = [], 1
    for axis in axes:
        if size % (shards * mesh.shape[axis]) == 0:
            taken.append(axis)
            shards *= mesh.shape[axis]
    return tuple(axis for axis in taken if mesh.shape[axis] > 1)


def cache_spec(shape: tuple[int, ...], batch: int, capacity: int, kv_heads: int | None, mesh: Mesh) -> PartitionSpec:
    """Where a layer's state lies: rows of the batch over the batch axes, heads over `tensor`, or slots where there are fewer heads than that.

    shape: [layers, batch, ...]; the heads are the first dimension after the batch of that size, the slots the one of `capacity`.
    """
    entries: list = [None] * len(shape)
    if len(shape) > 1 and shape[1] == batch:
        entries[1] = dividing(BATCH_AXES, batch, mesh) or None
    rest = range(2, len(shape))
    heads = [dim for dim in rest if kv_heads and shape[dim] == kv_heads and shape[dim] % mesh.shape["tensor"] == 0]
    slots = [dim for dim in rest if shape[dim] == capacity and capacity > 1 and capacity % mesh.shape["tensor"] == 0]
    if mesh.shape["tensor"] > 1 and (heads or slots):
        entries[(heads or slots)[0]] = "tensor"
    return PartitionSpec(*entries)


class ModelPrograms:
    """Programs of one family with one config on one mesh."""

    def __init__(self, family, config, mesh: Mesh, *, batch: int, length: int, remat: str | None = "full"):
        self.family, self.config, self.mesh, self.batch, self.length = family, config, mesh, batch, length
        self.remat = remat
        self.abstract: AbstractModel = abstract_model(family, config, mesh)
        self.variables = {dotted(path): leaf for path, leaf in self.abstract.leaves.items()}
        self.state = {name: self._placed(leaf.get_raw_value(), leaf.get_metadata("out_sharding", None)) for name, leaf in self.variables.items()}
        self.trained = {name for name, leaf in self.variables.items() if isinstance(leaf, nnx.Param)}

    def _placed(self, value, spec=None):
        spec = PartitionSpec() if spec is None else spec
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=spec if isinstance(spec, NamedSharding) else NamedSharding(self.mesh, spec))

    def model(self, arrays: dict):
        """The model with `arrays` (path -> array) in its variables."""
        leaves = [(path, leaf.replace(arrays[dotted(path)])) for path, leaf in self.abstract.leaves.items()]
        return nnx.merge(self.abstract.graphdef, nnx.from_flat_state(leaves))

    def tokens(self, length: int):
        """int32 [batch, length], rows over the batch axes as far as they divide."""
        rows = dividing(BATCH_AXES, self.batch, self.mesh)
        return self._placed(jax.ShapeDtypeStruct((self.batch, length), jnp.int32), PartitionSpec(rows or None))

    def cache(self):
        """The abstract cache of `length` slots."""
        shapes = jax.eval_shape(lambda state: self.model(state).init_cache(self.batch, self.length), self.state)
        kv_heads = getattr(self.config, "num_key_value_heads", None)
        place = functools.partial(cache_spec, batch=self.batch, capacity=self.length, kv_heads=kv_heads, mesh=self.mesh)
        layers = jax.tree.map(lambda leaf: self._placed(leaf, place(leaf.shape)), shapes.layers)
        rows = PartitionSpec(dividing(BATCH_AXES, self.batch, self.mesh) or None)
        return dataclasses.replace(
            shapes,
            layers=layers,
            segment_ids=self._placed(shapes.segment_ids, rows),
            next_position=self._placed(shapes.next_position, rows),
            length=self._placed(shapes.length),
        )

    def program(self, phase: str) -> Program:
        """One of `PHASES`. Raises InputError for another name."""
        if phase not in PHASES:
            raise InputError(f"no phase is called {phase!r}", "--phase", f"some of {', '.join(PHASES)}")
        return self.train() if phase == "train" else self.serve(self.length if phase == "prefill" else 1)

    def serve(self, length: int) -> Program:
        """(state, tokens [batch, length], cache) -> (logits of the last token [batch, vocab], cache): prefill, or with length 1 a decode step."""

        def serve(state, tokens, cache):
            logits, cache = self.model(state)(tokens, cache=cache)
            return logits[:, -1], cache

        cache = self.cache()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, cache)
        arguments = (self.state, self.tokens(length), cache)
        return Program(serve, arguments, (None, shardings), (2,), self._roles(arguments, ("weight", "input", "cache")))

    def train(self) -> Program:
        """(state, frozen, batch) -> (state, metrics): the training loop's own update, `labkit.train`."""
        model = nnx.merge(self.abstract.graphdef, nnx.from_flat_state(list(self.abstract.leaves.items())))
        parts, params, frozen = split_model(model)
        settings = TrainSettings(steps=1000, batch=self.batch, length=self.length, remat=self.remat)
        program, _ = make_program(parts, params, self.family.name, settings, self.mesh)
        state = abstract_state(program.state, program.shardings)
        frozen = jax.tree.map(self._placed, frozen)
        batch = {name: jax.ShapeDtypeStruct((1, self.batch, self.length), jnp.int32) for name in ("inputs", "targets")}
        places = batch_shardings(model.sharding, batch, self.mesh)
        batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[name]) for name, leaf in batch.items()}
        roles = self._roles(((state.step,), state.params, state.opt_state, frozen, batch), ("constant", "weight", "optimizer", "constant", "input"))
        step = lambda state, frozen, batch: program.step(state, frozen, batch)
        return Program(step, (state, frozen, batch), (program.shardings, None), (0,), roles)

    def _roles(self, arguments: tuple, kinds: tuple[str, ...]) -> tuple[Role, ...]:
        roles = []
        for argument, kind in zip(arguments, kinds, strict=True):
            for path, _ in jax.tree_util.tree_flatten_with_path(argument)[0]:
                name = next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str)), "")
                is_constant = kind == "weight" and name not in self.trained
                roles.append(Role("constant" if is_constant else kind, name or jax.tree_util.keystr(path)))
        return tuple(roles)
