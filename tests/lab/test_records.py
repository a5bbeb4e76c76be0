import json
import os

import pytest

from labkit.errors import InputError
from labkit.lab import records
from labkit.lab.records import Failure, Records, Status, model_folder, write_atomically
from labkit.lab.show import Gate
from tests.lab.samples import complete, record


def test_a_record_comes_back_as_it_was(tmp_path):
    store = Records(tmp_path)
    before = record(2, parameters={"limit": 1e-9, "x": float("nan")}, gates=[Gate(name="g", passed=False, value=float("inf"), limit=1e-9)])
    store.write(before)
    assert store.read(2) == before
    assert json.loads(store.path(2).read_text())["gates"][0]["value"] == "inf"


def test_a_second_run_keeps_the_first_as_history(tmp_path):
    store = Records(tmp_path)
    store.begin(record(1, run="a", end=None, cell=5, cell_name="subset"))
    store.begin(record(1, run="b", end=None))
    past = store.read(1).history
    assert [p.run for p in past] == ["a"]
    assert past[0].failure.what == "interrupted in phase 1 at cell 5 (subset)"


def test_history_keeps_failures_and_the_first_good_run_after_each(tmp_path):
    store = Records(tmp_path)
    runs = [("f", False), ("g", True), ("h", True), ("i", True)]
    for name, good in runs:
        store.begin(record(1, run=name, gates=[Gate(name="audit", passed=good)]))
        done = store.read(1)
        done.end, done.status = "x", Status.DONE if good else Status.BLOCKED
        store.write(done)
    store.begin(record(1, run="last"))
    assert [p.run for p in store.read(1).history] == ["f", "g"]


def test_passed_needs_done_and_every_gate():
    assert record().passed
    assert not record(status=Status.BLOCKED).passed
    assert not record(gates=[Gate(name="a", passed=True), Gate(name="b", passed=False)]).passed


def test_a_damaged_record_is_named(tmp_path):
    store = complete(tmp_path)
    store.path(2).write_text('{"model": "x"}')
    with pytest.raises(InputError, match="record of phase 2"):
        store.all()


def test_writes_leave_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_sources_under_one_slug_get_two_folders(tmp_path):
    first = model_folder(tmp_path, "m", "directory:/a/m")
    second = model_folder(tmp_path, "m", "directory:/b/m")
    assert first.name == "m"
    assert second.name.startswith("m-") and len(second.name) == 8
    assert model_folder(tmp_path, "m", "directory:/a/m") == first
    assert model_folder(tmp_path, "m", "directory:/b/m") == second


def test_the_commit_says_when_files_differ(tmp_path):
    import subprocess

    run = lambda *a: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *a], cwd=tmp_path, check=True, capture_output=True)
    run("init", "-q")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_text("1")
    run("add", ".")
    run("commit", "-qm", "x")
    assert not records.git_commit(tmp_path / "a" / "b").endswith("+changes")
    (tmp_path / "a" / "b" / "f").write_text("2")
    assert records.git_commit(tmp_path / "a" / "b").endswith("+changes")


def test_failure_kinds_survive():
    assert record(failure=Failure(kind="killed", what="x")).past().failure.kind == "killed"
