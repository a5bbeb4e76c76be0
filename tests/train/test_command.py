"""`labkit train` and `labkit export`: what transformers loads computes the same; bad input is one paragraph; a kill leaves nothing half-written."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import labkit
from labkit import cli
from labkit.converters import export, load_model, restore
from labkit.hf import open_source
from labkit.hf.reference import Reference
from labkit.lab.train import StopOnSignal, Trained, parse_mesh, train
from labkit.parity.compare import relative_error
from labkit.train.metrics import read_metrics
from labkit.train.settings import TrainSettings

SRC = str(Path(labkit.__file__).parents[1])
SETTINGS = TrainSettings(steps=2, batch=8, length=16, learning_rate=1e-2)


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.RandomState(0).randint(0, 100, 400))
    return tmp_path / "tokens.npy"


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    out = capsys.readouterr()
    return ended.value.code, out.out, out.err


@pytest.mark.parametrize("model", ["tiny:llama?num_hidden_layers=2", pytest.param("tiny:qwen3_moe?num_hidden_layers=2", marks=pytest.mark.slow)])
def test_what_was_trained_loads_in_transformers_and_computes_the_same(tmp_path, tokens, model):
    said = []
    result = train(model, tokens, tmp_path / "run", SETTINGS, say=said.append)
    assert isinstance(result, Trained) and result.step == 2 and result.checkpoint == tmp_path / "run" / "model"
    assert any("not known on CPU" in line for line in said) and sum("step 2/2, loss" in line for line in said) == 1
    written = export(result.checkpoint, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == "float32" and written.notes == []
    probe = np.random.RandomState(1).randint(0, 100, (2, 20))
    reference = Reference.load(tmp_path / "hf", "exact").logits(probe)
    with jax.enable_x64(True):
        ours = restore(result.checkpoint, dtype=jnp.float64)[0](jnp.asarray(probe))
        back = load_model(open_source(str(tmp_path / "hf")), dtype=jnp.float64)[0](jnp.asarray(probe))
        untrained = load_model(open_source(model), dtype=jnp.float64)[0](jnp.asarray(probe))
    assert relative_error(np.asarray(ours), reference) < 1e-9 and np.array_equal(ours, back)
    assert relative_error(np.asarray(untrained), reference) > 1e-4
    # The same command on a finished run does nothing more.
    again = train(model, tokens, tmp_path / "run", SETTINGS)
    assert again.step == 2 and again.first_loss is None and len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_signal_stops_after_the_update_and_a_second_one_ends():
    with StopOnSignal() as stop:
        assert not stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing option"),
        (["--data", "nowhere.txt", "--steps", "1"], "nowhere.txt"),
        (["--data", "{tokens}", "--steps", "0"], "steps is 0"),
        (["--data", "{tokens}", "--steps", "2", "--mesh", "data=2,pipe=2"], "pipe=2"),
        (["--data", "{tokens}", "--steps", "2", "--mesh", "data=3"], "needs 3 devices"),
        (["--data", "{tokens}", "--steps", "2", "--batch", "4", "--accumulate", "3"], "multiple of accumulate"),
        (["--data", "{tokens}", "--steps", "2", "--process", "1"], "coordinator"),
        (["--data", "{small}", "--steps", "2"], "nothing to predict"),
        (["--data", "{text}", "--steps", "2"], "no tokenizer"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_2(capsys, tmp_path, tokens, arguments, says):
    np.save(tmp_path / "small.npy", np.zeros(1, int))
    (tmp_path / "text.txt").write_text("words")
    places = {"tokens": tokens, "small": tmp_path / "small.npy", "text": tmp_path / "text.txt"}
    code, out, err = call(capsys, "train", "tiny:llama?num_hidden_layers=2", "--out", tmp_path / "run", *(a.format(**places) for a in arguments))
    assert code == 2 and says in err and "Traceback" not in err and out == ""
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_refused(capsys, tmp_path, tokens):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    code, _, err = call(capsys, "train", "tiny:llama", "--data", tokens, "--steps", "1", "--out", tmp_path / "mine")
    assert code == 2 and "holds no training run" in err and [p.name for p in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_a_mesh_is_parsed_whole():
    assert parse_mesh("data=2, fsdp=4") == {"data": 2, "fsdp": 4} and parse_mesh("") is None


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_ends_as_if_nothing_had_been(tmp_path, tokens):
    command = [sys.executable, "-m", "labkit.cli", "train", "tiny:llama?num_hidden_layers=2", "--data", str(tokens), "--steps", "40", "--batch", "4"]
    command += ["--length", "16", "--checkpoint-every", "2", "--out"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": SRC}
    subprocess.run([*command, str(tmp_path / "straight")], env=environment, check=True, capture_output=True, timeout=300)
    kills = 0
    for pause in (0.05, 0.3, 0.7):
        process = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in process.stdout:
            if ", loss" in line:
                break
        time.sleep(pause)
        process.kill()
        kills += process.wait() == -9
        process.stdout.close()
        assert not (tmp_path / "killed" / "model").exists() or process.returncode == 0
    assert kills
    done = subprocess.run([*command, str(tmp_path / "killed")], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    content = lambda folder: {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "model").rglob("*") if p.is_file() and p.name[0] != "_"}
    straight, killed = content(tmp_path / "straight"), content(tmp_path / "killed")
    assert straight.keys() == killed.keys() and [n for n in straight if straight[n] != killed[n]] == []
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == sorted(p.name for p in (tmp_path / "straight").iterdir())
    losses = lambda folder: [(r["step"], r["loss"]) for r in read_metrics(folder / "metrics.jsonl")]
    assert losses(tmp_path / "straight") == losses(tmp_path / "killed") and len(losses(tmp_path / "killed")) == 40


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_told(tmp_path, tokens):
    from filelock import FileLock

    from labkit.errors import BusyError

    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(BusyError, match="Another process trains"):
        train("tiny:llama?num_hidden_layers=2", tokens, tmp_path / "run", dataclasses.replace(SETTINGS, steps=1))
