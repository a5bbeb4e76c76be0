"""Checkpoints of a run by Orbax: parameters, optimiser state, step and the data's position. A step's folder appears whole or not at all."""

import importlib.metadata
import logging
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from labkit.errors import InputError
from labkit.train.step import TrainState

SCHEMA = 1


class RunCheckpoints:
    """The checkpoints in one folder. identity: plain data that says which run they belong to: a run with another identity is refused.

    On a mesh of several processes all of them call every method, and the folder is one that all of them see.
    """

    def __init__(self, folder, *, keep: int, identity: dict):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder, self.identity = Path(folder).absolute(), {"schema": SCHEMA, **identity}
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """The last step that is there, None without any."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Write step `step`; returns when it is on disk. Raises InputError when it cannot be written."""
        about = {**self.identity, "step": step, "position": step * self.identity["data"]["batch"], "versions": _versions()}
        try:
            self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), run=ocp.args.JsonSave(about)), force=True)
        except OSError as error:
            raise InputError(
                f"The checkpoint of step {step} cannot be written: {error}", self.folder, "Free some space; the steps before it are kept"
            ) from None

    def check(self, step: int) -> dict:
        """What step `step` says of its run. Raises InputError when it is another run's, or cannot be read."""
        try:
            about = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(step, error) from None
        differ = [f"{name}: {_short(there)} there, {_short(here)} here" for name, there, here in _differences(about, self.identity)]
        if differ:
            more = f"; and {len(differ) - 4} more" if len(differ) > 4 else ""
            raise InputError(
                f"The folder holds another run: {'; '.join(differ[:4])}{more}", self.folder / str(step), "Give the same settings to go on, or a new folder"
            )
        return about

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of step `step`, placed as `abstract` (shapes with shardings) says; each process reads what its own devices hold."""
        self.check(step)
        try:
            tree = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_tree(abstract))))["state"]
        except Exception as error:  # Orbax raises Exception itself for a chunk that it cannot read
            raise self._damaged(step, error) from None
        return TrainState(tree["step"], tree["params"], tree["opt_state"])

    def _damaged(self, step: int, error: Exception) -> InputError:
        text = " ".join(str(error).split())[:300]
        return InputError(f"The checkpoint cannot be restored: {text}", self.folder / str(step), "Remove this step's folder to go on from the one before it")

    def close(self) -> None:
        self.manager.close()


def _tree(state: TrainState) -> dict:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint")}


def _differences(there: dict, here: dict, prefix: str = ""):
    """(name, value there, value here) of every leaf of `here` that differs."""
    for name, value in here.items():
        if isinstance(value, dict):
            yield from _differences(there.get(name) or {}, value, f"{prefix}{name}.")
        elif there.get(name) != value:
            yield f"{prefix}{name}", there.get(name), value


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12]


def abstract_state(state: TrainState, shardings: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a (possibly abstract) state."""
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, shardings)
