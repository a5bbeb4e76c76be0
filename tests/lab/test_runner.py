"""The runner on stand-in notebooks: what it refuses, what it leaves when a kernel dies, what it reuses."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from labkit.errors import BusyError, InputError
from labkit.hf import open_source
from labkit.lab import handover, runner
from labkit.lab.places import ModelLock
from labkit.lab.records import Records, Status
from tests.lab import notebooks

NAMES = {1: "discover", 2: "layers", 3: "convert", 4: "verify"}


@pytest.fixture(scope="module")
def fingerprint():
    return open_source("tiny:qwen3").fingerprint


@pytest.fixture
def lab(tmp_path, monkeypatch, fingerprint):
    """(folder of stand-in notebooks, records, run): run(...) calls the runner on phases 1 and 2."""
    folder = tmp_path / "notebooks"
    for number in (1, 2):
        notebooks.write(folder, number, NAMES[number])
    monkeypatch.setenv("LABKIT_NOTEBOOKS", str(folder))
    monkeypatch.setenv("FINGERPRINT", fingerprint)
    run = lambda phases=(1, 2), **options: runner.run("tiny:qwen3", phases=phases, handovers=tmp_path / "h", progress=False, **options)
    return folder, Records(tmp_path / "h" / "tiny-qwen3"), run


def test_phases_run_in_order_and_are_reused_when_nothing_changed(lab):
    folder, store, run = lab
    first = run()
    assert (first.exit_code, first.ran) == (0, [1, 2])
    assert first.handover.is_file() and (store.folder / "executed" / "01_discover.ipynb").is_file()
    again = run()
    assert (again.exit_code, again.ran, again.reused) == (0, [], [1, 2])
    notebooks.write(folder, 2, "layers", work="1 + 1")
    changed = run(parameters={"speed": "1"})
    assert (changed.ran, changed.reused) == ([2], [1])
    assert run(phases=(1,), parameters={"speed": "2"}).ran == [1]
    assert run(phases=(1,), force=True, parameters={"speed": "2"}).ran == [1]


def test_a_failed_gate_stops_the_run_and_is_told_when_it_passes(lab):
    folder, store, run = lab
    notebooks.write(folder, 1, "discover", passed=False)
    outcome = run()
    assert (outcome.exit_code, outcome.ran) == (1, [1])
    assert runner.reasons(outcome.records[1]) == ["FAIL held: 1 (limit 1)"]
    with pytest.raises(InputError, match="phase 1 has passed, and it is BLOCKED"):
        run(phases=(2,))
    notebooks.write(folder, 1, "discover")
    assert run().exit_code == 0
    (bug,) = handover.collect(store.folder).bugs
    assert not bug.open and bug.title == "Gate: held"


def test_a_phase_that_has_nothing_to_start_from_is_refused_before_the_first_runs(lab):
    folder, store, run = lab
    for number in (3, 4):
        notebooks.write(folder, number, NAMES[number])
    with pytest.raises(InputError, match="phase 4 starts only when phase 3 has passed, and it has not run") as caught:
        run(phases=(1, 2, 4))
    assert "run phase 3 too" in caught.value.next and store.read(1) is None
    assert run(phases=(1, 2, 3)).exit_code == 0
    done = run(phases=(1, 2, 4))
    assert (done.exit_code, done.reused, done.ran) == (0, [1, 2], [4])
    record = store.read(3)
    record.outputs["scanned"] = str(folder / "gone")
    store.write(record)
    with pytest.raises(InputError, match="what it wrote to the scratch is gone"):
        run(phases=(1, 2, 4), force=True)
    assert run(phases=(1, 2, 4)).reused == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot be read"), ("", "no goldens"), ("{", "not valid JSON"), ('{"tokens": [1]}', "lacks tokens or logits")]
)
def test_goldens_that_cannot_serve_are_refused_before_the_first_phase(lab, tmp_path, text, says):
    folder, store, run = lab
    for number in (3, 4):
        notebooks.write(folder, number, NAMES[number], parameters=notebooks.PARAMETERS + '\ngolden: str = ""')
    file = tmp_path / "goldens.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=says):
        run(phases=(1, 2, 3, 4), parameters={"golden": str(file)})
    assert store.read(1) is None


def test_paths_that_were_typed_here_reach_the_kernel_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameters = {"model": "here", "golden": "g.jsonl", "longest": 256}
    folder, tiny = (SimpleNamespace(origin=origin) for origin in ("directory", "tiny"))
    assert runner._absolute(parameters, folder) == {"model": str(tmp_path / "here"), "golden": str(tmp_path / "g.jsonl"), "longest": 256}
    assert runner._absolute(parameters | {"golden": ""}, tiny) == parameters | {"golden": ""}


def test_a_killed_kernel_exits_3_and_leaves_record_handover_and_notebook(lab):
    folder, store, run = lab
    notebooks.write(folder, 2, "layers", work="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    outcome = run()
    assert outcome.exit_code == 3
    assert outcome.error.what == "the kernel died in phase 2 (signal 9) at cell 3 (work)"
    record = store.read(2)
    assert record.status is Status.BLOCKED and record.failure.kind == "killed"
    assert "the kernel died in phase 2" in outcome.handover.read_text().replace("\\", "")
    assert (store.folder / "executed" / "02_layers.ipynb").is_file()
    notebooks.write(folder, 2, "layers")
    assert run().exit_code == 0
    assert "Kernel died in phase 2 at cell 3" in outcome.handover.read_text()


def test_a_cell_over_its_limit_and_a_run_over_its_limit_are_ended(lab):
    folder, store, run = lab
    notebooks.write(folder, 1, "discover", work="time.sleep(120)")
    start = time.monotonic()
    outcome = run(cell_timeout=2)
    assert outcome.exit_code == 3 and "limit of 2 s" in outcome.error.what
    outcome = run(timeout=6)
    assert outcome.exit_code == 3 and "time limit in phase 1" in outcome.error.what
    assert time.monotonic() - start < 60


def test_processes_that_a_killed_kernel_started_end_with_it(lab, tmp_path):
    folder, _, run = lab
    work = "import subprocess, signal\np = subprocess.Popen(['sleep', '300'])\n"
    work += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\nos.kill(os.getpid(), signal.SIGKILL)"
    notebooks.write(folder, 1, "discover", work=work)
    assert run().exit_code == 3
    pid = int((tmp_path / "pid").read_text())
    status = lambda: open(f"/proc/{pid}/stat").read().split()[2] if os.path.exists(f"/proc/{pid}") else "gone"
    assert status() in ("gone", "Z")


def test_an_exception_in_a_cell_is_a_failure_with_exit_1(lab):
    folder, store, run = lab
    notebooks.write(folder, 1, "discover", work="raise ValueError('odd')")
    outcome = run()
    assert outcome.exit_code == 1
    assert store.read(1).failure.what == "ValueError: odd"


def test_interrupting_leaves_a_record_and_a_rerun_goes_on(lab):
    folder, store, run = lab
    notebooks.write(folder, 2, "layers", work="time.sleep(300)")
    outcome = {}

    def interrupt():
        while not ((record := store.read(2)) and record.cell == 3):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    outcome = run()
    assert outcome.exit_code == 130
    assert store.read(2).failure.what == "interrupted in phase 2 at cell 3 (work)"
    notebooks.write(folder, 2, "layers")
    again = run()
    assert (again.exit_code, again.reused, again.ran) == (0, [1], [2])
    assert "Interrupted in phase 2 at cell 3" in again.handover.read_text()


def test_a_run_that_was_killed_itself_is_told_by_the_next(lab):
    _, store, run = lab
    from tests.lab.samples import record

    store.write(record(1, run="dead", end=None, status=Status.IN_PROGRESS, cell=4, cell_name="subset"))
    assert run(phases=(1,)).exit_code == 0
    assert "interrupted in phase 1 at cell 4 (subset)" in store.read(1).history[0].failure.what


def test_a_busy_model_names_the_process(lab, tmp_path):
    _, store, run = lab
    code = "import time; from labkit.lab.places import ModelLock\n"
    code += f"lock = ModelLock({str(tmp_path / 'h')!r}, 'tiny-qwen3').acquire(); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(BusyError, match=f"process {holder.pid}") as caught:
            run()
        assert caught.value.exit_code == 2
    finally:
        holder.kill()
        holder.wait()
    ModelLock(tmp_path / "h", "tiny-qwen3").acquire().release()


@pytest.mark.parametrize(
    ("given", "says"),
    [({"speeed": "2"}, "did you mean speed"), ({"speed": "fast"}, "it takes int"), ({"zzz": "1"}, "known: model")],
)
def test_unknown_and_mistyped_parameters_are_refused(lab, given, says):
    with pytest.raises(InputError) as caught:
        lab[2](parameters=given)
    assert says in caught.value.paragraph()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tags": ()}, "no cells tagged"),
        ({"parameters": "model = 'x'"}, "annotated scalar"),
        ({"parameters": "model: str = 'x'\nimport os"}, "line 2"),
        ({"parameters": "layers: list = []"}, "annotated scalar"),
    ],
)
def test_a_notebook_without_a_proper_parameters_cell_is_refused(lab, change, says):
    folder, _, run = lab
    notebooks.write(folder, 1, "discover", **change)
    with pytest.raises(InputError) as caught:
        run()
    assert says in caught.value.paragraph()


def test_a_kernel_that_is_not_there_is_refused_and_its_name_in_the_notebook_does_not_matter(lab):
    folder, _, run = lab
    with pytest.raises(InputError, match="no Jupyter kernel named 'py39_new'"):
        run(kernel="py39_new")
    notebooks.write(folder, 1, "discover", kernel="py39_new")
    assert run(phases=(1,)).exit_code == 0
    notebooks.write(folder, 1, "discover", kernel=None)
    assert run(phases=(1,)).exit_code == 0
