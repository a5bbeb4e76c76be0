"""A slice that lies outside the package and is named: every command judges it, in processes of their own, and says which folder it was."""

import json
import shutil

import pytest

from labkit.models import get_family, registry
from tests.port import fake
from tests.test_cli import call, command

SCALE = {"gemma2": "scale=config.query_pre_attn_scalar**-0.5", "mistral": "scale=self.config.head_dim**-0.5"}
MODEL = {"gemma2": "tiny:gemma2?num_hidden_layers=2", "mistral": f"{fake.MODEL}&num_hidden_layers=2"}


def written(family: str, folder, wrong: bool = False):
    """gemma2: a copy of the garden's. mistral: the llama slice, renamed as the README says. wrong: with another scale of the scores."""
    if family == "gemma2":
        shutil.copytree(registry._GARDEN / family, folder, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        folder.mkdir(parents=True)
        for name, text in fake.slice_files().items():
            (folder / name).write_text(text)
    file = folder / f"modeling_{family}.py"
    assert SCALE[family] in file.read_text()
    if wrong:
        file.write_text(file.read_text().replace(SCALE[family], "scale=0.123"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_diagnose_judges_the_named_folder(family, wrong, tmp_path, monkeypatch):
    folder = written(family, tmp_path / family, wrong)
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    done = command("diagnose", MODEL[family], "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["status"], found["slice"], found["slice_folder"]) == (int(wrong), "fail" if wrong else "pass", "refined", str(folder))
    assert {fault["kind"] for fault in found["isolated_faults"]} == ({"attention"} if wrong else set())


@pytest.mark.slow
def test_a_run_judges_the_named_folder_shows_it_and_is_reused_only_while_its_files_stand(tmp_path, monkeypatch):
    folder = written("gemma2", tmp_path / "gemma2")
    run = lambda: command("run", MODEL["gemma2"], "--phases", "1", "--handovers", tmp_path / "h", "--quiet")
    plain = run()
    assert plain.returncode == 0, plain.stdout + plain.stderr
    (page,) = (tmp_path / "h").glob("*_handover.md")
    assert "labkit/models/gemma2" in page.read_text()
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    first, again = run(), run()
    assert (first.returncode, again.returncode, first.stdout.count("reused"), again.stdout.count("reused")) == (0, 0, 0, 1), first.stdout + again.stdout
    text = page.read_text()
    assert f"Written by hand, in {folder}" in text.replace("`", "").replace("\\", "") and "refined slice" in text and "translated slice" not in text
    file = folder / "modeling_gemma2.py"
    file.write_text(file.read_text().replace("class Gemma2Config", "class OtherConfig").replace("Gemma2Config", "OtherConfig"))
    (folder / "__init__.py").write_text((folder / "__init__.py").read_text().replace("Gemma2Config", "OtherConfig"))
    edited = run()
    assert edited.returncode == 1 and "reused" not in edited.stdout and "the slice has no config class" in page.read_text(), edited.stdout


@pytest.mark.slow
def test_a_folder_in_the_environment_is_a_family_for_every_process(tmp_path, monkeypatch):
    folder = tmp_path / "olmo2"
    shutil.copytree(get_family("llama").path, folder)
    (folder / "modeling_llama.py").rename(folder / "modeling_olmo2.py")
    (folder / "__init__.py").write_text("from labkit.models.llama import FAMILY\n")
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    after = command("inspect", "tiny:olmo2", "--json")
    assert '"slice": "refined"' in after.stdout and str(folder) in after.stdout


@pytest.mark.parametrize("arguments", [["run"], ["check"], ["diagnose"], ["inspect"], ["port"], ["conform"], ["attack"], ["meshes"], ["board"]])
def test_a_folder_that_is_not_there_ends_every_command(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_SLICES", str(tmp_path / "none"))
    code, out, err = call(capsys, *arguments, "gemma2")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"no such folder of a slice. Where: {tmp_path}/none, named in LABKIT_SLICES. Next: name the folder" in err


def test_named_slices_leave_no_records_of_the_garden(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_SLICES", str(written("gemma2", tmp_path / "gemma2")))
    code, _, err = call(capsys, "conform", "gemma2", "--record")
    assert code == 2 and "the records are of the garden's slices" in err


def test_inspect_shows_the_named_folder_and_the_garden_without_it(tmp_path, monkeypatch, capsys):
    fake.isolate(monkeypatch, tmp_path)
    folder = written("gemma2", tmp_path / "gemma2")
    assert "Written by hand, in labkit/models/gemma2." in call(capsys, "inspect", "tiny:gemma2")[1]
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    assert f"Written by hand, in {folder}." in call(capsys, "inspect", "tiny:gemma2")[1]
    found = json.loads(call(capsys, "inspect", "tiny:gemma2", "--json")[1])
    assert (found["slice"], found["slice_folder"]) == ("refined", str(folder))
