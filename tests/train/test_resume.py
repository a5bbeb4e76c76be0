"""Stopped, restarted in a fresh process and finished is the same as never stopped, bit for bit; another run's folder and a damaged one are refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

import labkit
from labkit.errors import InputError
from labkit.train.metrics import read_metrics
from tests.train import resuming


def arrays(step: Path) -> dict[str, bytes]:
    """Everything a checkpoint holds, name -> bytes, read without the lab."""
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{step / 'state'}/"}).result()
    names = [key.decode().removesuffix("/.zarray") for key in store.list().result() if key.endswith(b"/.zarray")]
    read = lambda name: tensorstore.open({"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{step / 'state'}/", "path": f"{name}/"}}).result()
    return {name: np.asarray(read(name).read().result()).tobytes() for name in names}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of six updates, and one that was stopped after three."""
    straight, halves = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("halves")
    assert resuming.run(straight).finished
    stopped = resuming.run(halves, stop_at=3)
    assert stopped.step == 3 and not stopped.finished
    return straight, halves


def test_a_fresh_process_goes_on_bit_for_bit(folders):
    straight, halves = folders
    before = arrays(halves / "steps" / "3")
    environment = os.environ | {"PYTHONPATH": str(Path(labkit.__file__).parents[1])}
    done = subprocess.run([sys.executable, resuming.__file__, str(halves)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, resumed = arrays(straight / "steps" / "6"), arrays(halves / "steps" / "6")
    assert whole.keys() == resumed.keys() and len(whole) > 30
    assert any(".mu." in name for name in whole) and any(name.startswith("params.") for name in whole)
    assert [name for name in whole if whole[name] != resumed[name]] == []
    exact = lambda folder: [(r["step"], r["loss"], r["gradient_norm"], r["learning_rate"]) for r in read_metrics(folder / "metrics.jsonl")]
    assert exact(straight) == exact(halves) and len(exact(straight)) == 6
    # The control: three updates more did change every parameter.
    assert all(before[name] != resumed[name] for name in before if name.startswith("params."))


def test_another_run_is_refused_by_what_differs(folders):
    with pytest.raises(InputError, match="data.seed: 1 there, 2 here"):
        resuming.run(folders[0], seed=2)


def test_a_checkpoint_of_two_layers_is_not_read_into_three(folders):
    with pytest.raises(InputError, match="cannot be restored"):
        resuming.run(folders[0], layers=3)


def test_a_damaged_checkpoint_is_named(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "damaged")
    for file in (tmp_path / "damaged" / "steps" / "6" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=r"steps/6.*Remove this step's folder"):
        resuming.run(tmp_path / "damaged")


def test_what_a_kill_left_of_a_save_is_cleared_away(folders, tmp_path):
    """Orbax writes a step under another name and renames it: what lies there under that name is no step."""
    shutil.copytree(folders[0], tmp_path / "killed")
    steps = tmp_path / "killed" / "steps"
    shutil.copytree(steps / "6", steps / "9.orbax-checkpoint-tmp-1")
    run = resuming.run(tmp_path / "killed")
    assert run.step == 6 and run.records == [] and sorted(p.name for p in steps.iterdir()) == ["6"]
