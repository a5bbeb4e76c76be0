"""Folders that a person names: they go before the garden's slices, and one that is no slice, or would run the garden's files, is refused."""

import ast
import os
import re
import shutil

import pytest
from tests.port import fake

from labkit.errors import InputError
from labkit.models import MODEL_REGISTRY, get_family, refined_families, register_folder, registry
from labkit.models.outside import _taken_from_garden, check_imports, named_folders
from labkit.port import slices

GARDEN = slices.GARDEN


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)


def copied(family: str, folder):
    return shutil.copytree(GARDEN / family, folder, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize("family", refined_families())
def test_a_copy_of_every_refined_slice_runs_its_own_files(family, tmp_path, monkeypatch):
    folder = copied(family, tmp_path / family)
    assert get_family(family).path == GARDEN / family
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    found = get_family(family)
    assert (found.source, found.path) == ("refined", folder) and MODEL_REGISTRY[family] is found.create
    for part in (found.model, found.config, found.sharding, found.create, found.rules, found.tflops, found.configure_engine):
        assert part.__module__.startswith(f"labkit_slices.{family}."), part
    monkeypatch.delenv("LABKIT_SLICES")
    assert get_family(family).path == GARDEN / family, "a folder stands while it is named"


@pytest.mark.parametrize("family", refined_families())
def test_a_slice_that_names_its_files_by_their_place_in_the_garden_is_refused_with_file_and_line(family, tmp_path, monkeypatch):
    """The control of the test above: what copies ran before their imports were relative."""
    folder = copied(family, tmp_path / family)
    text = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(re.sub(r"^from \.modeling_", f"from labkit.models.{family}.modeling_", text, flags=re.M))
    line = next(n for n, said in enumerate((folder / "__init__.py").read_text().splitlines(), 1) if f"labkit.models.{family}." in said)
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    for call in (lambda: get_family(family), lambda: register_folder(folder), lambda: slices.ensure_slice(family), lambda: slices.slice_identity(family)):
        with pytest.raises(InputError, match=rf"its own file would not be used\. Where: {re.escape(str(folder))}/__init__\.py:{line}\."):
            call()


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("from labkit.models.llama.modeling_mistral import A", True),
        ("import labkit.models.llama.modeling_mistral as m", True),
        ("from labkit.models.llama import modeling_mistral", True),
        ("def f():\n    from labkit.models.mistral import FAMILY", True),
        ("from labkit.models import mistral", True),
        ("import importlib\nimportlib.import_module('labkit.models.mistral.utils_mistral')", True),
        ("from labkit.models.llama.modeling_llama import LlamaMLP", False),
        ("from labkit.models.llama import FAMILY", False),
        ("from labkit.models.config import DecoderConfig", False),
        ("from .modeling_mistral import A", False),
        ("from labkit_slices.mistral.modeling_mistral import A", False),
        ("def broken(:", False),
    ],
)
def test_which_imports_are_refused(text, refused, tmp_path):
    folder = tmp_path / "mistral"
    folder.mkdir()
    (folder / "modeling_mistral.py").write_text("")
    (folder / "__init__.py").write_text(text)
    if refused:
        with pytest.raises(InputError, match=r"mistral/__init__\.py:[12]"):
            check_imports(folder)
    else:
        check_imports(folder)


def test_no_slice_of_the_garden_names_its_own_files_absolutely():
    """So that a copy is whole. Control: the imports of other slices, which the check sees and accepts."""
    for family in refined_families():
        files = tuple((file, 0, 0) for file in sorted((GARDEN / family).glob("*.py")))
        assert _taken_from_garden(GARDEN / family, files) is None, family
    imports = [node.module for node in ast.walk(ast.parse((GARDEN / "gemma2" / "modeling_gemma2.py").read_text())) if isinstance(node, ast.ImportFrom)]
    assert "labkit.models.llama.modeling_llama" in imports


def test_a_missing_folder_and_one_without_a_slice_are_bad_input(tmp_path, monkeypatch):
    empty, good = tmp_path / "empty" / "gemma2", copied("gemma2", tmp_path / "good" / "gemma2")
    empty.mkdir(parents=True)
    renamed, second = copied("gemma2", tmp_path / "my_gemma2"), copied("gemma2", tmp_path / "other" / "gemma2")
    for folders, message in (
        ([tmp_path / "none"], rf"no such folder of a slice\. Where: {tmp_path}/none, named in LABKIT_SLICES\. Next: name the folder"),
        ([good, tmp_path / "none"], "no such folder"),
        ([empty], r"no slice of gemma2: it has no __init__\.py and no modeling_gemma2\.py"),
        ([tmp_path / "good"], rf"it has no __init__\.py and no modeling_good\.py.*for example {good}"),
        ([renamed], r"no slice of my_gemma2: it has no modeling_my_gemma2\.py"),
        ([good, second], rf"two slices of gemma2\. Where: {good} and {second}"),
    ):
        monkeypatch.setenv("LABKIT_SLICES", os.pathsep.join(map(str, folders)))
        for call in (named_folders, lambda: get_family("llama"), lambda: slices.ensure_slice("llama"), lambda: slices.slice_identity("llama")):
            with pytest.raises(InputError, match=message):
                call()
    with pytest.raises(InputError, match="no such folder"):
        register_folder(tmp_path / "none")
    monkeypatch.setenv("LABKIT_SLICES", str(good))
    assert named_folders() == {"gemma2": good} and get_family("llama").path == GARDEN / "llama"


def test_a_relative_name_is_written_out_for_processes_that_start_elsewhere(tmp_path, monkeypatch):
    folder = copied("gemma2", tmp_path / "gemma2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_SLICES", "x/../gemma2/")
    assert named_folders() == {"gemma2": folder} and os.environ["LABKIT_SLICES"] == str(folder)


def test_a_registered_folder_is_named_for_other_processes_and_one_that_the_lab_found_goes_after_the_garden(tmp_path, monkeypatch):
    folder, found = copied("gemma2", tmp_path / "gemma2"), copied("gemma2", tmp_path / "found" / "gemma2")
    registry.register_found(found)
    assert get_family("gemma2").path == GARDEN / "gemma2" and os.environ["LABKIT_SLICES"] == ""
    monkeypatch.setenv("LABKIT_PREFER", "translated")
    assert get_family("gemma2").path == found
    register_folder(folder)
    assert get_family("gemma2").path == folder and os.environ["LABKIT_SLICES"] == str(folder)
    assert slices.ensure_slice("gemma2").folder == folder, "also where translated slices go first"
    monkeypatch.setenv("LABKIT_SLICES", "")
    assert get_family("gemma2").path == found


def test_a_folder_without_its_face_is_bad_input(tmp_path, monkeypatch):
    folder = copied("gemma2", tmp_path / "gemma2")
    (folder / "__init__.py").write_text("")
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    with pytest.raises(InputError, match="cannot be imported: AttributeError.*FAMILY"):
        get_family("gemma2")


def test_the_lab_takes_the_named_folder_and_its_identity_follows_the_files(tmp_path, monkeypatch):
    folder = copied("gemma2", tmp_path / "gemma2")
    assert (slices.slice_identity("gemma2"), slices.ensure_slice("gemma2").folder) == ("", GARDEN / "gemma2")
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    info, before = slices.ensure_slice("gemma2"), slices.slice_identity("gemma2")
    assert (info.kind, info.folder, slices.slice_there("gemma2").folder) == ("refined", folder, folder) and str(folder) in info.plain()
    assert len(before) == 64 == len(slices.slice_identity("gemma2")) and before == slices.slice_identity("gemma2") and slices.slice_identity("llama") == ""
    with (folder / "utils_gemma2.py").open("a") as file:
        file.write("# mine\n")
    assert slices.slice_identity("gemma2") != before


def test_what_a_parent_found_in_its_folder_is_found_by_a_process_that_works_in_another(tmp_path, monkeypatch):
    calls = fake.install(monkeypatch)
    kept = tmp_path / "labkit_slices" / fake.FAMILY
    slices.write_slice(__import__("sys").modules["labkit.port.translate"].translate(fake.FAMILY), kept)
    slices.announce(fake.FAMILY)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert slices.ensure_slice(fake.FAMILY).folder == kept and len(calls) == 1
    monkeypatch.setenv("LABKIT_FOUND_SLICES", "")
    assert slices.ensure_slice(fake.FAMILY).folder != kept
