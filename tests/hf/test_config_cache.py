"""Configs kept between processes: the same answer, from the file the second time, and never another config's."""

import os
import subprocess
import sys

import pytest

from labkit.hf import config_cache, open_source
from labkit.hf.config_cache import remembered


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(config_cache, "scratch_dir", lambda: tmp_path)
    return tmp_path


def test_the_second_question_is_answered_from_the_file(scratch):
    assert remembered({"a": 1}, "effective", lambda: {"b": (1, 2), 3: None}) == {"b": [1, 2], "3": None}
    assert remembered({"a": 1}, "effective", lambda: pytest.fail("computed again")) == {"b": [1, 2], "3": None}


def test_another_config_or_question_is_computed(scratch):
    remembered({"a": 1}, "effective", lambda: {"b": 1})
    assert remembered({"a": 2}, "effective", lambda: {"b": 2}) == {"b": 2}
    assert remembered({"a": 1}, "defaults", lambda: {"b": 3}) == {"b": 3}


def test_a_damaged_file_is_computed_again(scratch):
    remembered({"a": 1}, "effective", lambda: {"b": 1})
    (file,) = (scratch / "configs").iterdir()
    file.write_text("{")
    assert remembered({"a": 1}, "effective", lambda: {"b": 2}) == {"b": 2}


def test_a_scratch_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(config_cache, "scratch_dir", lambda: tmp_path / "file")
    assert remembered({"a": 1}, "effective", lambda: {"b": 1}) == {"b": 1}


def test_a_process_that_reads_a_known_config_again_needs_no_torch(monkeypatch):
    monkeypatch.undo()
    source = open_source("tiny:qwen3_moe")
    expected = source.config.effective, source.config.defaults, source.config.aliases
    code = (
        f"import sys; from labkit.hf import open_source; c = open_source({str(source.path)!r}).config; "
        f"print((c.effective, c.defaults, c.aliases) == {expected!r}, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.split() == ["True", "False"], run.stderr
