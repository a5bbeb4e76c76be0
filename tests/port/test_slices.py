"""The cache of translated slices: made once, made again when anything it came from has changed, never half-written, never run unasked."""

import json
import os
import threading

import pytest

from labkit.errors import BlockedError, InputError
from labkit.hf import open_source
from labkit.models import get_family, registry
from labkit.port import slices
from tests.port import fake


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)


def test_a_slice_is_made_once_and_known_here_and_to_other_processes(monkeypatch):
    calls = fake.install(monkeypatch)
    first, again = slices.ensure_slice(fake.FAMILY), slices.ensure_slice(fake.FAMILY)
    assert (first.kind, first.fresh, again.fresh, len(calls)) == ("translated", True, False, 1)
    assert first.folder == again.folder and {p.name for p in first.folder.glob("*.py")} == set(fake.slice_files())
    assert os.environ["LABKIT_FOUND_SLICES"] == str(first.folder) and os.environ["LABKIT_SLICES"] == ""
    family = get_family(fake.FAMILY)
    assert (family.source, family.path, family.name) == ("translated", first.folder, fake.FAMILY)
    assert get_family(fake.FAMILY).model is family.model
    provenance = json.loads((first.folder / "provenance.json").read_text())
    assert provenance["sources"].keys() == {fake.SOURCE} and provenance["files"].keys() == set(fake.slice_files())
    assert first.unproven == [["modeling_mistral.py:12", "if x:"]] and first.unusual == ["nothing"]


def test_a_family_of_the_garden_is_not_translated(monkeypatch):
    calls = fake.install(monkeypatch)
    info = slices.ensure_slice("llama")
    assert (info.kind, info.folder, calls) == ("refined", get_family("llama").path, [])


@pytest.mark.parametrize("what", ["translator", "source", "file"])
def test_a_changed_translator_a_changed_source_and_a_touched_file_make_it_anew(monkeypatch, what):
    fake.install(monkeypatch)
    folder = slices.ensure_slice(fake.FAMILY).folder
    if what == "translator":
        calls = fake.install(monkeypatch, version="2")
    else:
        calls = fake.install(monkeypatch)
    if what == "source":
        monkeypatch.setattr(slices, "_hashes", lambda files, source: dict.fromkeys(files, "other"))
    if what == "file":
        (folder / "modeling_mistral.py").write_text("import os\n")
    assert slices.ensure_slice(fake.FAMILY).fresh and len(calls) == 1
    assert "MistralModel" in get_family(fake.FAMILY).model.__name__


def test_two_at_once_translate_once(monkeypatch):
    calls = fake.install(monkeypatch)
    threads = [threading.Thread(target=slices.cached_slice, args=(fake.FAMILY,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_refusals_are_told_and_block(monkeypatch):
    fake.install(monkeypatch, refusals=[fake.REFUSED])
    info = slices.ensure_slice(fake.FAMILY)
    assert info.refusals[0]["where"] == "modeling_mistral.py:77"
    with pytest.raises(BlockedError, match=r"a data-dependent shape at modeling_mistral.py:77 \(attention\).*write a mask"):
        info.require()
    assert slices.ensure_slice(fake.FAMILY).refusals == info.refusals


def test_a_fault_of_the_translator_is_a_wall_and_leaves_nothing(monkeypatch, tmp_path):
    fake.install(monkeypatch, fault=KeyError("nope"))
    with pytest.raises(BlockedError, match="the translator failed on mistral: KeyError.*fake.py:"):
        slices.ensure_slice(fake.FAMILY)
    assert list((tmp_path / "slices").glob("mistral*")) == []


def test_a_failed_write_leaves_nothing(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    monkeypatch.setattr(slices, "provenance_of", lambda translation: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        slices.ensure_slice(fake.FAMILY)
    assert [p.name for p in (tmp_path / "slices").iterdir()] == [".mistral.lock"]


def test_an_unknown_type_and_untrusted_code_are_walls(monkeypatch, tmp_path):
    calls = fake.install(monkeypatch)
    with pytest.raises(BlockedError, match="no causal LM to translate"):
        slices.ensure_slice("mistrall")

    class Config:
        model_type, has_remote_code, trust_remote_code, path = "homemade", True, False, "config.json"

    class Source:
        config, path = Config, tmp_path

    with pytest.raises(BlockedError, match="--trust-remote-code"):
        slices.ensure_slice(Source)
    assert calls == []
    Config.trust_remote_code = True
    slices.cached_slice(Source)
    assert calls == [Source]


def test_a_slice_that_a_person_keeps_is_used_as_it_is(monkeypatch, tmp_path):
    calls = fake.install(monkeypatch, refusals=[fake.REFUSED])
    made = slices.cached_slice(fake.FAMILY)
    kept = tmp_path / "labkit_slices" / fake.FAMILY
    kept.parent.mkdir()
    made.folder.rename(kept)
    assert slices.ensure_slice(fake.FAMILY).kind == "translated"
    with (kept / "modeling_mistral.py").open("a") as file:
        file.write("# mine\n")
    info = slices.ensure_slice(fake.FAMILY)
    assert (info.kind, info.folder, info.refusals, len(calls)) == ("edited", kept, [], 1)
    assert get_family(fake.FAMILY).source == "edited"
    assert registry.registered_folder(fake.FAMILY) == kept


def test_a_slice_that_cannot_be_imported_is_bad_input(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    kept = tmp_path / "labkit_slices" / fake.FAMILY
    slices.write_slice(sys_translate(), kept)
    (kept / "modeling_mistral.py").write_text("def broken(:\n")
    slices.ensure_slice(fake.FAMILY)
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        get_family(fake.FAMILY)


def sys_translate():
    from labkit.port.translate import translate

    return translate(fake.FAMILY)


def test_a_cache_that_others_can_write_is_refused(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    slices.slices_dir().chmod(0o777)
    with pytest.raises(InputError, match="other users"):
        slices.ensure_slice(fake.FAMILY)


def test_the_identity_of_a_slice_follows_its_files(monkeypatch, tmp_path):
    fake.install(monkeypatch)
    assert (slices.slice_identity("llama"), slices.slice_identity(fake.FAMILY)) == ("", "none")
    slices.ensure_slice(fake.FAMILY)
    before = slices.slice_identity(fake.FAMILY)
    fake.install(monkeypatch, version="2", change=("utils_mistral.py", "FLOPs", "flops"))
    assert slices.ensure_slice(fake.FAMILY).fresh
    assert len(before) == 64 and slices.slice_identity(fake.FAMILY) not in (before, "none")


def test_translated_goes_before_refined_when_asked(monkeypatch):
    fake.install(monkeypatch)
    monkeypatch.setattr(fake, "FAMILY", "llama")
    monkeypatch.setenv("LABKIT_PREFER", "translated")
    info = slices.ensure_slice("llama")
    assert info.kind == "translated" and get_family("llama").path == info.folder
    monkeypatch.delenv("LABKIT_PREFER")
    assert get_family("llama").source == "refined"


def test_phase_fingerprints_change_with_the_slice(monkeypatch):
    from labkit.lab.phases import phase_class
    from labkit.lab.phases.base import inputs_fingerprint

    fake.install(monkeypatch)
    source = open_source(fake.MODEL)
    fingerprint = lambda: inputs_fingerprint(phase_class(4), source.fingerprint, {}, slices.slice_identity(source))
    before = fingerprint()
    slices.ensure_slice(source)
    after = fingerprint()
    assert after != before and after == fingerprint()
