"""Two processes of four devices are one program of eight; one that never comes, or dies, is named within a set time."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import labkit
from labkit.errors import InputError
from labkit.scale.processes import Place, find_place, finish, initialize, is_writer
from tests.scale import two_processes

WORKER = Path(two_processes.__file__)
PATIENCE = 240


def free_port() -> int:
    """A port that is free with the next one, which the roll is called on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            try:
                second.bind(("", first.getsockname()[1] + 1))
            except (OSError, OverflowError):
                continue
            return first.getsockname()[1]


class Processes:
    """The worker's processes, ended when the block ends."""

    def __init__(self, folder: Path, mode: str, count: int = 2, started: int = 2, **more):
        self.folder, port = folder, free_port()
        environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"} | more
        environment["PYTHONPATH"] = str(Path(labkit.__file__).parents[1])
        self.all = []
        for index in range(started):
            with open(folder / f"{index}.out", "wb") as out, open(folder / f"{index}.err", "wb") as err:
                command = [sys.executable, str(WORKER), str(port), str(count), str(index), str(folder), mode]
                self.all.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()

    def said(self, index: int, stream: str = "err") -> str:
        return (self.folder / f"{index}.{stream}").read_text(errors="replace")

    def wait_for(self, word: str) -> None:
        end = time.monotonic() + PATIENCE
        while not all(word in self.said(index, "out") for index in range(len(self.all))):
            assert time.monotonic() < end, self.said(0)[-2000:]
            assert all(process.poll() in (None, 0) for process in self.all), self.said(0)[-2000:] + self.said(1)[-2000:]
            time.sleep(0.1)


def agree(folder: Path, apart: Path) -> None:
    """What the processes found against the same on the eight devices of this one."""
    apart.mkdir()
    with jax.enable_x64(True):
        alone = two_processes.work(apart)
    with np.load(folder / "results.npz") as together:
        assert set(together) == set(alone) and together["restored"] and alone["restored"]
        for name in together:
            if name != "restored":
                assert np.abs(together[name] - alone[name]).max() <= 1e-12 * max(np.abs(alone[name]).max(), 1), name
        assert sum(name.startswith("after.") for name in together) > 10
        assert not np.array_equal(together["after.norm.weight"], np.ones_like(together["after.norm.weight"]))


def check_killed(processes: Processes, victim: int) -> None:
    """The other process ends by itself, in words, and soon."""
    processes.all[victim].send_signal(signal.SIGKILL)
    start = time.monotonic()
    code = processes.all[1 - victim].wait(two_processes.SILENCE + two_processes.LEAVE + 10)
    took, said = time.monotonic() - start, processes.said(1 - victim)
    assert code == 3, said[-2000:]
    assert f"labkit: process {victim} of 2 ended in the middle of the work" in said.splitlines()[-1]
    assert took < two_processes.LEAVE + 10
    assert "Traceback" not in said


def test_two_processes_agree_with_one_and_the_kill_of_one_ends_the_other_in_words(tmp_path):
    with Processes(tmp_path, "linger") as processes:
        processes.wait_for("working")
        agree(tmp_path, tmp_path / "apart")
        check_killed(processes, victim=1)


@pytest.mark.slow
def test_the_kill_of_process_0_ends_the_other_in_words(tmp_path):
    with Processes(tmp_path, "linger") as processes:
        processes.wait_for("working")
        check_killed(processes, victim=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny:qwen3_moe?num_hidden_layers=2"])
def test_a_mixture_on_two_processes_to_the_end(tmp_path, model, monkeypatch):
    monkeypatch.setattr(two_processes, "MODEL", model)
    with Processes(tmp_path, "end", TWO_PROCESSES_MODEL=model) as processes:
        assert [process.wait(PATIENCE) for process in processes.all] == [0, 0], processes.said(0)[-2000:]
        assert all(processes.said(index, "out").endswith("finished\n") for index in (0, 1))
        agree(tmp_path, tmp_path / "apart")


def test_a_place_is_whole_or_refused(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert find_place() is None and find_place("a:1", 1, 0) is None
    assert find_place("10.0.0.1:8476", 4, 3) == Place("10.0.0.1:8476", 4, 3)
    for arguments, says in [
        (("a:1", 2, None), "this process's number is not given"),
        ((None, 2, 0), "the coordinator's address is not given"),
        (("nowhere", 2, 0), "no host:port"),
        (("a:99999", 2, 0), "no host:port"),
        (("a:1", 2, 2), "process 2 of 2"),
    ]:
        with pytest.raises(InputError, match=says):
            find_place(*arguments)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "b:5")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert find_place() == Place("b:5", 3, 1)
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    with pytest.raises(InputError, match="JAX_PROCESS_ID='one'"):
        find_place()


def test_one_process_needs_nothing():
    assert initialize(None) is None and is_writer()
    finish()
