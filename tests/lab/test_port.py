"""`labkit port` and `labkit diagnose`: what is shown, judged, compared and written, and what is refused."""

import json
import os

import pytest

from labkit import cli
from labkit.errors import InputError
from labkit.lab import port as module
from labkit.lab.port import port
from labkit.models import get_family
from tests.port import fake


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "_checkout", lambda: False)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_it_shows_origin_code_and_unproven_branches(monkeypatch, capsys):
    fake.install(monkeypatch)
    code, out, _ = call(capsys, "port", fake.FAMILY, "--no-verdict", "--code")
    assert code == 0 and "class MistralAttention" in out and "modeling_mistral.py:12" in out and "Unusual: nothing" in out


def test_json_is_one_object(monkeypatch, capsys):
    fake.install(monkeypatch)
    code, out, _ = call(capsys, "port", fake.MODEL, "--no-verdict", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["family"] == fake.FAMILY and answer["slice"]["files"].keys() == set(fake.slice_files()) and answer["there"] is None


def test_refusals_end_blocked_and_are_listed(monkeypatch, capsys):
    fake.install(monkeypatch, refusals=[fake.REFUSED])
    code, out, _ = call(capsys, "port", fake.FAMILY)
    assert code == 1 and "blocked" in out and "modeling_mistral.py:77" in out and "write a mask" in out
    answer = json.loads(call(capsys, "port", fake.FAMILY, "--json")[1])
    assert answer["status"] == "blocked" and "a data-dependent shape" in answer["error"]["what"]


def test_a_written_slice_is_used_edited_kept_and_replaced_only_by_force(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    out = port(fake.MODEL, write=True, judge=False).written
    assert out == tmp_path / "labkit_slices" / fake.FAMILY and (out / "provenance.json").is_file()
    file = out / "modeling_mistral.py"
    file.write_text(file.read_text() + "# mine\n")
    found = port(fake.MODEL, diff=True, judge=False)
    assert found.there.kind == "edited" and found.diff.splitlines()[-1] == "-# mine"
    with pytest.raises(InputError, match="has been edited since"):
        port(fake.MODEL, write=True, judge=False)
    assert file.read_text().endswith("# mine\n")
    port(fake.MODEL, write=True, force=True, judge=False)
    assert not file.read_text().endswith("# mine\n") and port(fake.MODEL, diff=True, judge=False).diff == ""
    assert [p.name for p in out.parent.iterdir()] == [fake.FAMILY]


def test_a_new_translator_shows_its_changes_against_the_cache(monkeypatch):
    fake.install(monkeypatch)
    port(fake.MODEL, judge=False)
    fake.install(monkeypatch, version="2", change=("modeling_mistral.py", "class MistralMLP", "class MistralFeedForward"))
    diff = port(fake.MODEL, diff=True, judge=False).diff
    assert "-class MistralMLP" in diff and "+class MistralFeedForward" in diff


def test_a_refined_slice_is_not_replaced(monkeypatch):
    fake.install(monkeypatch)
    monkeypatch.setattr(fake, "FAMILY", "llama")
    assert port("llama", diff=True, judge=False).there.kind == "refined"
    for force in (False, True):
        with pytest.raises(InputError, match="refined slice"):
            port("llama", write=True, force=force, judge=False)


def test_a_named_slice_that_a_person_wrote_is_the_one_there_and_is_not_replaced(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    folder = tmp_path / "mine" / fake.FAMILY
    folder.mkdir(parents=True)
    for name, text in fake.slice_files().items():
        (folder / name).write_text(text)
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    there = port(fake.MODEL, judge=False).there
    assert (there.kind, there.folder) == ("refined", folder)
    with pytest.raises(InputError, match="there is a refined slice of mistral"):
        port(fake.MODEL, write=True, force=True, judge=False)
    monkeypatch.setenv("LABKIT_SLICES", "")
    assert port(fake.MODEL, judge=False).there is None


@pytest.mark.slow
def test_the_verdict_is_on_the_translation_also_where_another_slice_is_named(monkeypatch, tmp_path):
    fake.install(monkeypatch, change=("modeling_mistral.py", "x = x + attended", "x = x - attended"))
    folder = tmp_path / "mine" / fake.FAMILY
    folder.mkdir(parents=True)
    for name, text in fake.slice_files().items():
        (folder / name).write_text(text)
    monkeypatch.setenv("LABKIT_SLICES", str(folder))
    assert port(fake.MODEL).status == "fail"
    assert os.environ["LABKIT_SLICES"] == str(folder) and get_family(fake.FAMILY).path == folder
    monkeypatch.setenv("LABKIT_SLICES", "")
    fake.install(monkeypatch, version="2")
    assert port(fake.MODEL).status == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, ("modeling_mistral.py", "x = x + attended", "x = x - attended")])
def test_the_verdict_judges_what_is_translated(monkeypatch, capsys, change):
    fake.install(monkeypatch, change=change)
    before = dict(os.environ)
    found = port(fake.MODEL)
    assert (found.status, found.exit_code) == (("pass", 0) if change is None else ("fail", 1))
    assert found.verdicts[0]["max_rel_error"] < 1e-9 if change is None else found.verdicts[0]["max_rel_error"] > 1e-3
    assert all(os.environ.get(key) == before.get(key) for key in ("LABKIT_FOUND_SLICES", "LABKIT_SLICES"))


@pytest.mark.slow
def test_check_rejects_a_translated_slice_that_a_person_edited_wrongly():
    from labkit.lab.check import check

    file = port("seed_oss", write=True, judge=False).written / "modeling_seed_oss.py"
    right = file.read_text()
    file.write_text(right.replace("residual + hidden_states", "residual - hidden_states", 1))
    assert file.read_text() != right
    wrong = check("tiny:seed_oss")
    assert (wrong.status, wrong.exit_code) == ("fail", 1) and {record.slice for record in wrong.records} == {"edited"}
    assert get_family("seed_oss").source == "edited"


def test_a_family_that_the_translator_refuses_is_blocked_with_the_list(monkeypatch):
    from labkit.lab.check import check

    fake.install(monkeypatch, refusals=[fake.REFUSED])
    found = check(fake.MODEL)
    assert (found.status, found.exit_code, len(found.records)) == ("blocked", 1, 1)
    assert "a data-dependent shape at modeling_mistral.py:77" in found.error.what
    assert any(f["cause"] == "a data-dependent shape cannot be translated" for f in found.as_json()["findings"])
    assert "modeling_mistral.py:12" in " ".join(s.plain() for s in found.records[0].sections)


def test_inspect_translates_and_says_so(monkeypatch, capsys):
    fake.install(monkeypatch)
    code, out, _ = call(capsys, "inspect", fake.MODEL, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["slice"] == "translated" and answer["translation"]["unusual"] == ["nothing"] and answer["plan"]


@pytest.mark.slow
def test_diagnose_names_the_fault(monkeypatch, capsys):
    assert call(capsys, "diagnose", "tiny:llama?num_hidden_layers=2")[0] == 0
    fake.install(monkeypatch, change=("modeling_mistral.py", "eps=config.rms_norm_eps", "eps=2 * config.rms_norm_eps"))
    code, out, _ = call(capsys, "diagnose", fake.MODEL, "--json")
    answer = json.loads(out)
    assert code == 1 and answer["status"] == "fail" and answer["first_divergence"]["kind"] and answer["isolated_faults"]
    assert any(found["component"] == "norms" for found in answer["findings"])
