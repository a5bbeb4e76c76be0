"""Exact jobs in their own process: a result, the worker's own error, a death and a time limit."""

import os
import signal
import subprocess

import pytest

from labkit.errors import InputError, LabError
from labkit.parity import worker
from labkit.parity.jobs import execute
from tests.parity.conftest import TINY


def test_a_job_runs_in_a_process_of_its_own():
    import jax

    seen = []
    result = worker.run_job({"kind": "components", "source": TINY, "length": 8}, progress=lambda fraction, text: seen.append((fraction, text)))
    assert result["passed"] and result["table"]["passed"] and result["control"]["red"] == ["final norm", "norms"]
    assert seen[0][0] == 0.0 and seen == sorted(seen, key=lambda s: s[0]) and not jax.config.jax_enable_x64


def test_the_workers_error_is_ours_without_a_traceback():
    with pytest.raises(InputError) as caught:
        worker.run_job({"kind": "components", "source": "tiny:nonsense"})
    assert "nonsense" in str(caught.value) and "Traceback" not in str(caught.value)


def test_an_unknown_job_is_refused():
    with pytest.raises(InputError, match="unknown exact job"):
        execute({"kind": "guess", "source": TINY})


def fake_process(monkeypatch, script):
    original = subprocess.Popen
    monkeypatch.setattr(worker.subprocess, "Popen", lambda command, **options: original(["bash", "-c", script], **options))


def test_a_killed_worker_is_named(monkeypatch):
    fake_process(monkeypatch, "kill -9 $$")
    with pytest.raises(LabError, match="killed, most likely for lack of memory"):
        worker.run_job({"kind": "exact", "source": "x"})


def test_the_last_words_of_a_crashed_worker_are_passed_on(monkeypatch):
    fake_process(monkeypatch, "echo first >&2; echo the last words >&2; exit 7")
    with pytest.raises(LabError, match="ended with code 7: the last words"):
        worker.run_job({"kind": "exact", "source": "x"})


def test_a_worker_beyond_its_time_is_stopped(monkeypatch):
    started = []
    original = subprocess.Popen

    def popen(command, **options):
        started.append(original(["sleep", "60"], **options))
        return started[0]

    monkeypatch.setattr(worker.subprocess, "Popen", popen)
    with pytest.raises(LabError, match="longer than 0.3 seconds"):
        worker.run_job({"kind": "exact", "source": "x"}, timeout=0.3)
    assert started[0].returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)
