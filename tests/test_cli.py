"""The command: exit codes, one paragraph or one JSON object per error, nothing half-written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import labkit
from labkit import cli
from labkit.cli.shared import only
from labkit.lab import families
from tests.lab.samples import complete
from tests.port import fake

SRC = Path(labkit.__file__).parents[1]


def command(*arguments, **options) -> subprocess.CompletedProcess:
    """`labkit ...` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-m", "labkit.cli", *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300, **options)


def call(capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `labkit ...` in this process."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(a) for a in arguments])
    out = capsys.readouterr()
    return exit_.value.code, out.out, out.err


def test_help_is_quick_and_imports_nothing_heavy():
    code = "import sys; from labkit import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'jax', 'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5
    for name in ("run", "check", "inspect", "convert", "export", "handover", "families", "doctor"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "../up"], "../up"),
        (["inspect", "a/b/c/d"], "a/b/c/d"),
        (["run", "tiny:qwen3", "--phases", "1,x"], "--phases"),
        (["run", "tiny:qwen3", "--phases", "9"], "no phase 9"),
        (["run", "tiny:qwen3", "-p", "sbuset_layers", "2"], "subset_layers"),
        (["run", "tiny:qwen3", "--phases", "1", "-p", "golden", "x"], "golden"),
        (["handover", "nobody"], "no records of nobody"),
        (["inspect"], "Missing argument"),
        (["board", "mixtral", "--steps", "prefill,trip"], "round trip"),
        (["check", "tiny:qwen3", "--nope"], "No such option"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_2(capsys, arguments, says):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert says in err and "Traceback" not in err and out == ""
    if not err.startswith("Usage"):
        assert len(err.strip().splitlines()) == 1
    assert not Path(os.environ["LABKIT_HANDOVERS"]).exists()


@pytest.mark.parametrize(
    ("arguments", "what"), [(["check", "../up", "--json"], "../up"), (["inspect", "x/y/z", "--json"], "x/y/z"), (["check", "--json"], "Missing argument")]
)
def test_errors_are_one_json_object(capsys, arguments, what):
    code, out, _ = call(capsys, *arguments)
    answer = json.loads(out)
    assert code == 2
    assert set(answer) == {"model", "family", "status", "verdicts", "gates", "findings", "error"}
    assert answer["status"] == "error" and what in " ".join(answer["error"].values()) and set(answer["error"]) == {"what", "where", "next"}


def test_inspect_json_is_alone_on_stdout_whatever_libraries_print():
    done = command("inspect", "tiny:gemma2", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert (answer["family"], answer["status"], answer["subset_layers"]) == ("gemma2", "pass", 2)
    assert answer["layers"]["count"] == len(answer["layers"]["kinds"])
    assert answer["config"]["rms_norm_eps"]["use"] == "read"


def test_inspect_of_a_family_that_cannot_be_translated_is_blocked_with_facts(capsys, monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)
    fake.install(monkeypatch, refusals=[fake.REFUSED])
    code, out, _ = call(capsys, "inspect", fake.MODEL, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["status"] == "blocked" and answer["parameters"] and fake.FAMILY in answer["walls"][0]["what"]


def test_only_lets_nothing_else_reach_stdout(capfd):
    with only(True) as emit:
        print("a library talks")
        os.write(1, b"C code talks\n")
        emit({"x": 1})
    out = capfd.readouterr()
    assert json.loads(out.out) == {"x": 1}
    assert "library talks" in out.err and "C code talks" in out.err


def test_convert_and_export_come_back_bit_for_bit(capsys, tmp_path):
    from labkit.converters import compare_safetensors
    from labkit.hf import open_source

    assert call(capsys, "convert", "tiny:qwen3", tmp_path / "ckpt")[0] == 0
    assert call(capsys, "export", tmp_path / "ckpt", tmp_path / "out")[0] == 0
    assert compare_safetensors(open_source("tiny:qwen3").path, tmp_path / "out") == []
    code, _, err = call(capsys, "convert", "tiny:qwen3", tmp_path / "ckpt")
    assert code == 2 and "exists" in err
    code, _, err = call(capsys, "export", tmp_path / "nothing", tmp_path / "out2")
    assert code == 2 and not (tmp_path / "out2").exists()


def test_handover_finds_the_records_by_name_and_by_slug(capsys, tmp_path):
    from labkit.lab.records import model_folder

    folder = model_folder(tmp_path, "tiny-qwen3", "tiny:tiny:qwen3")
    complete(folder)
    for name in ("tiny:qwen3", "tiny-qwen3"):
        code, out, _ = call(capsys, "handover", name, "--handovers", tmp_path, "--html")
        assert code == 0 and out.split() == [str(tmp_path / "tiny-qwen3_handover.md"), str(tmp_path / "tiny-qwen3_handover.html")]


def test_families_are_what_records_prove(tmp_path, monkeypatch):
    from labkit.lab.records import Records, Status, model_folder

    monkeypatch.setattr(families, "DATA", tmp_path / "families.json")
    assert CliRunner().invoke(cli.cli, ["families"]).exception is not None
    good = model_folder(tmp_path / "h", "tiny-qwen3", "a")
    complete(good)
    bad = model_folder(tmp_path / "h", "tiny-llama", "b")
    complete(bad)
    record = Records(bad).read(3)
    record.status = Status.BLOCKED
    Records(bad).write(record)
    entries = families.update(tmp_path / "h")
    assert [e["model"] for e in entries] == ["tiny:qwen3"]
    assert "qwen3" in CliRunner().invoke(cli.cli, ["families"]).output


def test_the_committed_list_is_what_the_committed_records_prove(tmp_path):
    """As committed, not as a run has left the folder since."""
    archive = subprocess.run(["git", "archive", "HEAD", "handovers"], cwd=SRC.parent, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", tmp_path], input=archive.stdout, check=True)
    assert families.proven() == families.from_records(tmp_path / "handovers")


def test_doctor_names_what_stands_in_the_way(capsys, monkeypatch, tmp_path):
    code, out, _ = call(capsys, "doctor", "--json")
    answer = json.loads(out)
    assert {row["what"] for row in answer["rows"]} >= {"machine", "devices", "scratch", "handovers", "notebooks"}
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("LABKIT_SCRATCH", str(file / "below"))
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 1
    assert any(row["what"] == "scratch" and row["problem"] for row in json.loads(out)["rows"])
