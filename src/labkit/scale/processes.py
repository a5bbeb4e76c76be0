"""Several processes as one program: every host runs the same command, one of them writes.

`initialize` joins the processes around `jax.distributed`. JAX alone ends a process by an abort deep in its runtime when another one is missing, so the lab
calls the roll first and keeps the line open (`scale/roll_call.py`): who is missing, and who died, is said in words and within a set time.
"""

import contextlib
import dataclasses
import os

import jax

from labkit.errors import InputError, LabError
from labkit.scale.roll_call import RollCall, end_with, in_words_on_abort

WATCH_PORT = 1
"""The roll is called on the coordinator's port plus this."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands. coordinator: host:port of process 0. index: this process, from 0. count: how many there are."""

    coordinator: str
    count: int
    index: int

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


_roll: RollCall | None = None


def find_place(coordinator: str | None = None, count: int | None = None, index: int | None = None, *, detect: bool = False) -> Place | None:
    """From the arguments, else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; with `detect`, what is missing comes from the cluster (a TPU
    pod, Slurm, MPI) as JAX finds it. None for one process alone. Raises InputError for a place that cannot be."""
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = count if count is not None else _number("JAX_NUM_PROCESSES")
    index = index if index is not None else _number("JAX_PROCESS_ID")
    if detect and None in (coordinator, count, index):
        coordinator, count, index = _detected(coordinator, count, index)
    if coordinator is None and index is None and count in (None, 1):
        return None
    missing = [
        name
        for name, value in (("the coordinator's address", coordinator), ("the number of processes", count), ("this process's number", index))
        if value is None
    ]
    if missing:
        raise InputError(f"{' and '.join(missing)} is not given", "several processes", "give all three, or none of them for one process")
    port = coordinator.rpartition(":")[2]
    if ":" not in coordinator or not port.isdigit() or not 0 < int(port) < 65535:
        raise InputError(
            f"the coordinator's address {coordinator!r} is no host:port", "several processes", "for example 10.0.0.1:8476, the address of process 0"
        )
    if count < 1 or not 0 <= index < count:
        raise InputError(f"process {index} of {count} cannot be", "several processes", "processes are numbered from 0 to their number less 1")
    return None if count == 1 else Place(coordinator, count, index)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise InputError(f"{name}={text!r} is no whole number", "environment", "set it to a number, or unset it")
    return int(text)


def _detected(coordinator, count, index):
    from jax._src import clusters  # the detection behind `jax.distributed.initialize()`; JAX has no public name for it

    try:
        return clusters.ClusterEnv.auto_detect_unset_distributed_params(coordinator, count, index, None, None, 60)[:3]
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise InputError(
            f"the cluster cannot be read: {error}", "several processes", "give coordinator, number of processes and this process's number"
        ) from None


def initialize(place: Place | None, *, join_timeout: float = 300, lost_timeout: float = 60, leave_timeout: float = 10) -> Place | None:
    """Join the processes of `place` (None: one process, nothing to do). Call it before anything else of JAX.

    join_timeout: seconds for all to join. lost_timeout: seconds of silence after which a process counts as lost; one that ends is noticed at once.
    leave_timeout: seconds for this process to end by itself, with the error that `watched` raises, before it is ended with the same words. Raises LabError that
    names the missing processes; InputError when JAX is running already.
    """
    global _roll
    if place is None:
        return None
    if _roll is not None:
        raise InputError("the processes have joined already", f"process {place.index}", "join once per process")
    if jax.distributed.is_initialized():
        raise InputError("jax.distributed is running already", f"process {place.index}", "let the lab join the processes")
    roll = RollCall(place.host, place.port + WATCH_PORT, place.count, place.index, lost_timeout=lost_timeout, leave_timeout=leave_timeout)
    roll.join(join_timeout)
    if "cpu" in (jax.config.jax_platforms or "").split(","):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    in_words_on_abort(roll)
    try:
        # JAX's own watch comes later than the lab's, so that the lab's words are the ones that are read.
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            initialization_timeout=max(1, round(join_timeout)),
            heartbeat_timeout_seconds=max(30, round(4 * lost_timeout)),
            shutdown_timeout_seconds=max(1, round(leave_timeout)),
        )
    except (RuntimeError, ValueError) as error:
        roll.close()
        raise LabError(f"the processes did not join: {error}", f"process {place.index} of {place.count}", "start all of them again") from None
    _roll = roll
    return place


@contextlib.contextmanager
def watched():
    """Around work on several processes: an error that comes of a process being gone becomes a KernelDiedError that names it."""
    try:
        yield
    except LabError:
        raise
    except Exception:
        if _roll is not None and (lost := _roll.loss(wait=5)) is not None:
            raise lost from None
        raise


def finish() -> None:
    """This process has done its work: wait for the others, then leave the program of several processes. Does nothing for one process."""
    global _roll
    if _roll is None:
        return
    with watched():
        _roll.finish()
        jax.distributed.shutdown()
    _roll.close()
    _roll = None


def leave(code: int) -> None:
    """End this process now, the others hearing of it. What must be said has been said. Does nothing for one process."""
    if _roll is not None:
        end_with(code)


def is_writer() -> bool:
    """True in the one process that writes handovers, records and exports: process 0."""
    return jax.process_index() == 0
