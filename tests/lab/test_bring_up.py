"""Whole bring-ups by the command, on small random checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from labkit.lab.records import Records, Status
from labkit.port import slices
from tests.port import fake
from tests.test_cli import SRC, command

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2", "seed_oss")


def started(*arguments) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    return subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for(store: Records, number: int, run: subprocess.Popen):
    """The record of phase `number` as soon as its kernel has begun it."""
    while run.poll() is None:
        record = store.read(number)
        if record is not None and record.status is Status.IN_PROGRESS and record.end is None:
            return record
        time.sleep(0.05)
    raise AssertionError(f"the run ended before phase {number}: {run.communicate()}")


def test_a_family_that_the_translator_refuses_ends_phase_1_blocked_with_the_list_and_the_facts(tmp_path, monkeypatch):
    folder = tmp_path / "slices" / fake.FAMILY
    fake.install(monkeypatch, refusals=[fake.REFUSED])
    slices.write_slice(sys.modules["labkit.port.translate"].translate(fake.FAMILY), folder)
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    done = command("run", fake.MODEL, "--handovers", tmp_path / "h", "--quiet")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (page,) = (tmp_path / "h").glob("*_handover.md")
    text = page.read_text()
    assert "1 discover **BLOCKED** · 2 layers **NOT STARTED**" in text and "translated slice" in text
    assert "a data-dependent shape" in text and "modeling_mistral.py:77" in text and "modeling_mistral.py:12" in text
    assert "## 3. Bugs" in text and "| embedding |" in text


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_four_phases_of_a_family(family, tmp_path):
    done = command("run", f"tiny:{family}", "--phases", "1,2,3,4", "--handovers", tmp_path, "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    records = Records(tmp_path / f"tiny-{family}").all()
    assert [r.phase for r in records] == [1, 2, 3, 4] and all(r.passed for r in records)
    exact = [v for v in records[-1].verdicts if v.name == "exact"]
    assert {v.on for v in exact} == {"subset", "full"} and all(v.value <= 1e-9 for v in exact)
    assert records[-1].outcome["float32"]["greedy"]["tokens"] >= 16
    again = command("run", f"tiny:{family}", "--phases", "1,2,3,4", "--handovers", tmp_path, "--quiet")
    assert again.returncode == 0 and again.stdout.count("reused") == 4


@pytest.mark.slow
def test_check_gives_the_object_of_the_design():
    done = command("check", "tiny:qwen3", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["status"] == "pass" and answer["family"] == "qwen3" and answer["error"] is None
    assert answer["verdicts"]["exact"]["passed"] and answer["verdicts"]["exact"]["max_rel_error"] <= 1e-9
    assert set(answer["verdicts"]["float32"]) >= {"passed", "max_kl", "greedy"} and set(answer["verdicts"]["float32"]["greedy"]) == {
        "tokens",
        "matched",
        "ties",
    }
    assert all(g["passed"] for g in answer["gates"]) and {g["phase"] for g in answer["gates"]} == {1, 2, 3, 4}


@pytest.mark.slow
def test_killed_and_interrupted_in_every_phase_it_resumes_and_tells(tmp_path):
    store = Records(tmp_path / "tiny-qwen3")
    arguments = ("run", "tiny:qwen3", "--phases", "1,2,3,4", "--handovers", tmp_path, "--quiet")
    for number in (1, 2, 3, 4):
        run = started(*arguments)
        os.kill(int(wait_for(store, number, run).run.split("#")[1]), signal.SIGKILL)
        out, err = run.communicate(timeout=120)
        assert run.returncode == 3, out + err
        assert f"the kernel died in phase {number} (signal 9) at cell" in err and "Traceback" not in err
        assert f"in phase {number}" in (tmp_path / "tiny-qwen3_handover.md").read_text()
        run = started(*arguments)
        wait_for(store, number, run)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
        assert run.returncode == 130, out + err
        assert "Traceback" not in err
        assert out.count("reused") == number - 1
    done = command(*arguments)
    assert done.returncode == 0
    text = (tmp_path / "tiny-qwen3_handover.md").read_text()
    for number in (1, 2, 3, 4):
        # A signal may arrive between two cells, where there is no cell to name.
        assert f"Kernel died in phase {number} at cell" in text and f"Interrupted in phase {number}" in text
