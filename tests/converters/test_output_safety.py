"""Nothing appears at the output until it is complete; nothing half-written stays."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.converters import convert, export, restore
from labkit.converters.convert import OWNER
from labkit.errors import InputError

from .conftest import rewritten

SRC = Path(__file__).parents[2] / "src"


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("stage", [1, 20])
def test_an_interrupt_leaves_nothing(tiny, tmp_path, stage):
    calls = []

    def interrupt(done, total):
        calls.append((done, total))
        if len(calls) == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny("llama"), tmp_path / "ckpt", progress=interrupt)
    assert names(tmp_path) == []
    convert(tiny("llama"), tmp_path / "ckpt")
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "ckpt", tmp_path / "back", progress=interrupt)
    assert names(tmp_path) == ["ckpt"]


def test_progress_ends_at_the_total(tiny, tmp_path):
    seen = []
    size = convert(tiny("llama"), tmp_path / "ckpt", progress=lambda *pair: seen.append(pair)).nbytes
    assert seen[-1] == (size, size) and seen == sorted(seen)
    seen.clear()
    export(tmp_path / "ckpt", tmp_path / "back", progress=lambda *pair: seen.append(pair))
    assert seen[-1] == (size, size)


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_an_output_that_holds_something_is_refused_and_kept(tiny, tmp_path, what):
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path)
    with pytest.raises(InputError, match="exists"):
        convert(tiny("llama"), out)
    with pytest.raises(InputError, match="exists"):
        convert(tiny("llama"), out, force=True) if what != "link" else convert(tiny("llama"), out)
    convert(tiny("llama"), tmp_path / "ckpt")
    with pytest.raises(InputError, match="exists"):
        export(tmp_path / "ckpt", out)
    assert names(tmp_path) == sorted([*before, "ckpt"])


def test_an_empty_folder_is_filled(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    restore(convert(tiny("llama"), tmp_path / "out").path)


def test_force_replaces_a_checkpoint_of_the_same_source_only(tiny, tmp_path):
    convert(tiny("llama"), tmp_path / "ckpt")
    with pytest.raises(InputError, match="exists"):
        convert(tiny("llama"), tmp_path / "ckpt", scan=False)
    with pytest.raises(InputError, match="not a checkpoint of this source"):
        convert(tiny("qwen3"), tmp_path / "ckpt", force=True)
    convert(tiny("llama"), tmp_path / "ckpt", scan=False, force=True)
    assert restore(tmp_path / "ckpt")[2]["scan"] is False and names(tmp_path) == ["ckpt"]


def test_a_failed_replacement_keeps_the_old_checkpoint(tiny, tmp_path):
    convert(tiny("llama"), tmp_path / "ckpt")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny("llama"), tmp_path / "ckpt", scan=False, force=True, progress=interrupt)
    assert restore(tmp_path / "ckpt")[2]["scan"] is True and names(tmp_path) == ["ckpt"]


def test_too_little_space_is_said_before_anything_is_written(tiny, tmp_path, monkeypatch):
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(InputError, match=r"Not enough space: [\d,]+ bytes are needed and 1,000 are free"):
        convert(tiny("llama"), tmp_path / "ckpt")
    assert names(tmp_path) == []


@pytest.fixture
def small_files():
    """The kernel refuses files over 3000 bytes, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_is_one_paragraph_and_leaves_nothing(tiny, tmp_path, request):
    source = tiny("llama")
    (tmp_path / "work").mkdir()
    convert(source, tmp_path / "ckpt")
    request.getfixturevalue("small_files")
    for write in (lambda out: convert(source, out), lambda out: export(tmp_path / "ckpt", out)):
        with pytest.raises(InputError, match="Writing failed: " + os.strerror(errno.EFBIG)):
            write(tmp_path / "work" / "out")
        assert names(tmp_path / "work") == []


def test_a_place_that_cannot_be_written_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    convert(tiny("llama"), tmp_path / "ckpt")
    for out in (tmp_path / "file" / "out", Path("/sys/labkit-out")):
        with pytest.raises(InputError, match="cannot be written"):
            convert(tiny("llama"), out)
        with pytest.raises(InputError, match="cannot be written"):
            export(tmp_path / "ckpt", out)


def test_bad_weights_leave_nothing(tiny, tmp_path):
    def spoil(arrays):
        arrays["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")

    source = rewritten(tiny("llama"), tmp_path / "m", spoil)
    with pytest.raises(InputError, match=r"model.layers.2.mlp.up_proj.weight .* holds nan at index \[3, 4\]"):
        convert(source, tmp_path / "ckpt")
    assert names(tmp_path) == ["m"]


def test_what_a_killed_run_left_is_removed_and_what_runs_is_not(tiny, tmp_path):
    dead, alive, foreign = (tmp_path / f".ckpt.{name}" for name in ("dead", "alive", "foreign"))
    for folder in (dead, alive, foreign):
        folder.mkdir()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True).stdout
    (dead / OWNER).write_text(gone)
    (alive / OWNER).write_text(str(os.getpid()))
    convert(tiny("llama"), tmp_path / "ckpt")
    assert names(tmp_path) == [".ckpt.alive", ".ckpt.foreign", "ckpt"] and not (tmp_path / "ckpt" / OWNER).exists()


SLOW_CONVERT = """
import sys, time
from labkit.converters import convert
from labkit.hf import open_source
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.2)
convert(open_source(sys.argv[1]), sys.argv[2], progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_conversion_leaves_no_output_and_the_next_one_works(tiny, tmp_path, sent):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    process = subprocess.Popen([sys.executable, "-c", SLOW_CONVERT, str(tiny("llama").path), str(tmp_path / "ckpt")], env=env, stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(sent)
    assert process.wait(60) != 0
    assert not (tmp_path / "ckpt").exists() and (names(tmp_path) == []) == (sent == signal.SIGINT)
    convert(tiny("llama"), tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]
