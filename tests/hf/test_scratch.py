"""Where files go, whether they fit, and that nothing half-written stays."""

import collections
import os
import shutil
import time
from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.hf import ensure_free, scratch, scratch_dir
from labkit.hf.scratch import clear, held

Usage = collections.namedtuple("Usage", "total used free")


def test_the_order_of_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_SCRATCH", str(tmp_path / "from-env"))
    assert scratch_dir() == tmp_path / "from-env" and scratch_dir(tmp_path / "given") == tmp_path / "given"
    assert (tmp_path / "from-env").is_dir() and (tmp_path / "given").is_dir()
    monkeypatch.delenv("LABKIT_SCRATCH")
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "no-shm")
    assert scratch_dir() == tmp_path / "home" / ".cache" / "labkit", "no shared memory"
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 << 30, 7 << 30, 1 << 30))
    assert scratch_dir() == tmp_path / "home" / ".cache" / "labkit", "too little room"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(24 << 30, 0, 24 << 30))
    assert scratch_dir() == tmp_path / "shm" / "someone" / "labkit"


def test_a_scratch_folder_that_is_a_file(tmp_path, monkeypatch, refused):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_SCRATCH", str(tmp_path / "file"))
    refused(scratch_dir, "LABKIT_SCRATCH", str(tmp_path / "file"))


def test_a_read_only_scratch_folder(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("LABKIT_SCRATCH", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, whom permissions do not stop
    refused(scratch_dir, "read-only")


def test_free_space_names_both_numbers(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000, 8_766, 1_234))
    ensure_free(tmp_path / "not" / "yet" / "there", 1_234)
    refused(lambda: ensure_free(tmp_path / "not" / "yet" / "there", 1_235), "1,235 bytes are needed", "1,234 are free", str(tmp_path))


def test_an_atomic_directory_appears_whole_or_not_at_all(tmp_path):
    with scratch.atomic_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]
    with pytest.raises(KeyboardInterrupt), scratch.atomic_directory(tmp_path / "other") as folder:
        (folder / "file").write_text("x")
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_empty_folder_may_be_filled_and_a_link_may_not(tmp_path):
    (tmp_path / "empty").mkdir()
    with scratch.atomic_directory(tmp_path / "empty") as folder:
        (folder / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"), scratch.atomic_directory(tmp_path / "link"):
        pass


def test_an_output_under_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"), scratch.atomic_directory(Path(tmp_path / "file" / "out")):
        pass


def test_a_folder_that_the_user_chose_is_not_cleared(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    os.utime(tmp_path / "mine" / "thesis.txt", (0, 0))
    with pytest.raises(InputError, match="LABKIT_SCRATCH"):
        clear(tmp_path, untouched=1)
    assert (tmp_path / "mine" / "thesis.txt").is_file()


def test_what_nobody_wrote_to_is_cleared_and_the_rest_stays(tmp_path):
    tmp_path = tmp_path / "labkit"
    for name, age in (
        ("slices/edited/modeling.py", 90_000),
        ("tiny/old/model.safetensors", 90_000),
        ("tiny/old/nested/config.json", 90_000),
        ("runs/now/a.bin", 10),
        ("runs/mixed/old.bin", 90_000),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 100)
        os.utime(file, (time.time() - age,) * 2)
        for folder in list(file.parents)[: len(file.relative_to(tmp_path).parts) - 1]:
            os.utime(folder, (time.time() - age,) * 2)
    (tmp_path / "runs/mixed/new.bin").write_bytes(b"y")
    assert held(tmp_path) == {"runs": 201, "tiny": 200, "slices": 100}
    assert clear(tmp_path, untouched=86_400) == 200
    assert not (tmp_path / "tiny/old").exists() and (tmp_path / "runs/now/a.bin").is_file() and (tmp_path / "runs/mixed/old.bin").is_file()
    assert (tmp_path / "slices/edited/modeling.py").is_file()
