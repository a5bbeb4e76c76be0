"""The training loop: batches by step, one compiled update, metrics, checkpoints; it stops and goes on without a trace in the numbers."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from labkit.errors import LabError
from labkit.models.registry import MODEL_FLOPS_REGISTRY
from labkit.train.checkpoints import RunCheckpoints, abstract_state
from labkit.train.data import PackedData, place_batch, split_batch
from labkit.train.engine import family_engine
from labkit.train.metrics import step_record
from labkit.train.optimizer import learning_rate_schedule, make_optimizer
from labkit.train.parts import ModelParts, split_model
from labkit.train.settings import TrainSettings
from labkit.train.step import TrainState, batch_shardings, new_state, state_shardings, train_step


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """What `train_loop` did. model: with the trained parameters. step: updates done in all. records: one per update of this call. finished: all steps done."""

    model: nnx.Module
    state: TrainState
    step: int
    records: list[dict]
    finished: bool
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Program:
    """The update of one model on its mesh: everything that `train_step` takes besides arrays. Also what is compiled ahead of time from shapes alone."""

    parts: ModelParts
    step: Callable
    state: TrainState
    shardings: TrainState

    def lower(self, frozen, batch):
        """The lowered update; frozen and batch may be abstract with shardings."""
        return self.step.lower(abstract_state(self.state, self.shardings), frozen, batch)


def make_program(parts: ModelParts, params: dict, model_type: str, settings: TrainSettings, mesh) -> tuple[Program, Callable]:
    """(the update, jitted with its state donated, and how to make its first state) for parameters, concrete or abstract."""
    shapes = {name: tuple(array.shape) for name, array in params.items()}
    optimizer = make_optimizer(settings, parts.matrices(shapes))
    engine = family_engine(model_type, scan=settings.scan, remat=settings.remat)
    schedule = learning_rate_schedule(settings)
    abstract = jax.eval_shape(lambda params: new_state(params, optimizer), params)
    shardings = state_shardings(parts, optimizer, abstract, mesh)
    step = functools.partial(train_step, parts=parts, engine=engine, optimizer=optimizer, schedule=schedule)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    first = jax.jit(lambda params: new_state(params, optimizer), donate_argnums=0, out_shardings=shardings)
    return Program(parts, jitted, abstract, shardings), first


def train_loop(
    model: nnx.Module,
    model_type: str,
    data: PackedData,
    settings: TrainSettings,
    *,
    checkpoints: RunCheckpoints | None = None,
    peak_tflops: float | None = None,
    on_step: Callable[[dict], None] = lambda record: None,
    on_resume: Callable[[int], None] = lambda step: None,
    stop: Callable[[int], bool] = lambda step: False,
) -> TrainRun:
    """Train `model` (its arrays are donated: use the returned one) up to `settings.steps` updates, from the last checkpoint where there is one.

    data: batches; `data.at(step)` must hold `settings.batch` sequences. peak_tflops: of one device, for mfu. on_step(record) after each update, in order.
    on_resume(step) once, before the first update. stop(step): asked after each update; True saves and leaves. Raises LabError when the loss is not finite,
    with the last checkpoint kept.
    """
    settings.check()
    mesh = model.mesh
    parts, params, frozen = split_model(model)
    sharding, flops = model.sharding, _tflops(model.config, model_type, settings, mesh)
    program, first = make_program(parts, params, model_type, settings, mesh)
    with jax.sharding.set_mesh(mesh):
        start = 0 if checkpoints is None else checkpoints.latest or 0
        if start:
            for array in params.values():
                array.delete()
            state = checkpoints.restore(start, abstract_state(program.state, program.shardings))
        else:
            state = first(params)
        del params
        on_resume(start)
        batch_at = lambda step: split_batch(data.at(step), settings.accumulate)
        batch = batch_at(start)
        places = batch_shardings(sharding, batch, mesh)
        began = time.perf_counter()
        update = program.step.lower(state, frozen, place_batch(batch, places)).compile()
        compiled = time.perf_counter() - began
        records, saved, step = [], start, start

        def settle(number: int, metrics: dict, seconds: float) -> None:
            record = step_record(number, jax.tree.map(np.asarray, metrics), seconds, tflops=flops, peak_tflops=peak_tflops)
            if not math.isfinite(record["loss"]):
                kept = f"the checkpoint of step {saved} is kept" if saved else "there is no checkpoint yet"
                raise LabError(f"the loss is {record['loss']} at step {number}", f"{model_type}, {kept}", "lower the learning rate or clip more, and go on")
            records.append(record)
            on_step(record)

        while step < settings.steps:
            began = time.perf_counter()
            state, metrics = update(state, frozen, place_batch(batch, places))
            step += 1
            if step < settings.steps:
                batch = batch_at(step)
            jax.block_until_ready(metrics)
            settle(step, metrics, time.perf_counter() - began)
            leaving = stop(step)
            if checkpoints is not None and (leaving or step == settings.steps or step % settings.checkpoint_every == 0):
                checkpoints.save(step, state)
                saved = step
            if leaving:
                break
    return TrainRun(parts.merge(state.params, frozen), state, step, records, step >= settings.steps, compiled)


def _tflops(config, model_type: str, settings: TrainSettings, mesh) -> float | None:
    """Tera-operations of one update on one device, None where the family cannot tell them."""
    with contextlib.suppress(ValueError, KeyError):
        return MODEL_FLOPS_REGISTRY[model_type](config, batch=settings.batch, length=settings.length, log=False).total / mesh.size
    return None
