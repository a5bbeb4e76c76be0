"""`labkit check` leaves nothing behind, and runs with other handovers share no scratch."""

import os
from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.lab.check import check
from labkit.lab.phases.discover import Discover
from tests.port import fake


def runs() -> list[Path]:
    folder = Path(os.environ["LABKIT_SCRATCH"]) / "runs"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_a_check_that_ends_at_a_wall_leaves_nothing(monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)
    fake.install(monkeypatch, refusals=[fake.REFUSED])
    before = runs()
    result = check(fake.MODEL)
    assert (result.status, result.exit_code) == ("blocked", 1)
    assert fake.FAMILY in result.as_json()["error"]["what"] and len(result.records) == 1
    assert runs() == before
    assert not Path(os.environ["LABKIT_HANDOVERS"]).exists()


def test_two_handovers_folders_do_not_share_scratch(tmp_path, monkeypatch):
    scratches = []
    for name in ("a", "b"):
        monkeypatch.setenv("LABKIT_HANDOVERS", str(tmp_path / name))
        phase = Discover("tiny:qwen3")
        scratches.append(phase.scratch)
        phase.finish()
    assert len(set(scratches)) == 2


def test_goldens_that_are_not_there_are_refused_before_any_cell(tmp_path):
    told = []
    with pytest.raises(InputError, match="goldens cannot be read"):
        check("tiny:qwen3", golden=str(tmp_path / "nope.jsonl"), say=told.append)
    assert told == []
