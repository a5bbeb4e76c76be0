"""A type end to end: recorded, translated, loaded, compared with the reference; a source that cannot be taken whole; branches that no run took."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from labkit.hf.architectures import transformers_folder
from labkit.hf.source_record import record_sources_here
from labkit.models import registry
from labkit.parity.proof import _Subject
from labkit.port import translate as translator
from labkit.port.source_tree import read_tree
from tests.port import fake
from tests.port.mutations import chosen

TYPE = "seed_oss"
TINY = f"tiny:{TYPE}?num_hidden_layers=2"
MODELING = f"models/{TYPE}/modeling_{TYPE}.py"
LIMIT = 1e-9


@pytest.fixture
def registered(monkeypatch, tmp_path):
    """Registers a folder with files for the length of a test."""
    fake.isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(registry, "refined_families", lambda: [])

    def register(files: dict[str, str]) -> Path:
        folder = tmp_path / f"try{len(list(tmp_path.glob('try*')))}" / TYPE
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        registry.register_folder(folder)
        return folder

    return register


@pytest.fixture(scope="module")
def plain():
    """The translation of the installed source, from a record of one tiny model."""
    return translator.translate(TYPE, record=record_sources_here([TINY]))


@pytest.fixture(scope="module")
def subject():
    found = _Subject()
    found.build([TINY])
    return found


@pytest.fixture
def x64():
    """As in a proof."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        yield


def test_the_slice_of_a_type_is_exact_and_a_slice_with_one_token_changed_is_not(plain, subject, registered, x64):
    assert plain.refusals == [] and set(plain.files) == {"__init__.py", f"modeling_{TYPE}.py", f"checkpoint_mappings_{TYPE}.py", f"utils_{TYPE}.py"}
    registered(plain.files)
    subject.load()
    assert subject.prefill() <= LIMIT and subject.decode()[0] <= LIMIT
    mutation = chosen(plain.files[f"modeling_{TYPE}.py"], 1, seed=3)[0]
    registered(plain.files | {f"modeling_{TYPE}.py": mutation.source})
    try:
        subject.load()
        error = subject.prefill()
    except Exception:  # a change that does not run is seen too
        error = np.inf
    assert not error <= LIMIT, mutation


def test_the_head_says_where_it_comes_from_and_what_it_was_read_from(plain):
    text = plain.files[f"modeling_{TYPE}.py"]
    assert f"`{MODELING}`" in text.splitlines()[0] and f"transformers {plain.transformers_version}" in text
    assert f'"""{MODELING}:' in text and "torch" not in text.replace("torch_modules", "")
    assert set(plain.sources) >= {MODELING} and len(plain.fingerprint) == 16


EDITS = {
    "        return down_proj\n": "        return down_proj + down_proj[down_proj > 0].sum()\n",
    "    cos = cos.unsqueeze(unsqueeze_dim)\n": """    if q.shape[0] == 99:
        q = torch.nonzero(q)
    if q.shape[0] == 98:
        q = q * 2
    if q.shape[0] > 0:
        k = k * 1
    cos = cos.unsqueeze(unsqueeze_dim)
""",
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The translation of a source in which one method and one branch that never runs cannot be translated, and the source's text."""
    folder = tmp_path_factory.mktemp("transformers")
    for path in (transformers_folder()).iterdir():
        if path.name != "models":
            os.symlink(path, folder / path.name)
    (folder / "models").mkdir()
    for path in (transformers_folder() / "models").iterdir():
        if path.name != TYPE:
            os.symlink(path, folder / "models" / path.name)
    (folder / "models" / TYPE).mkdir()
    for path in (transformers_folder() / "models" / TYPE).glob("*.py"):
        text = path.read_text()
        for old, new in EDITS.items() if path.name == f"modeling_{TYPE}.py" else ():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / "models" / TYPE / path.name).write_text(text)
    text = (folder / MODELING).read_text()
    own = translator.source_tree(TYPE)
    config_file = folder / own.config_file.relative_to(transformers_folder())
    tree = read_tree(folder / MODELING, own.entry, model_type=TYPE, config_file=config_file, config_name=own.config_class.name)
    with pytest.MonkeyPatch.context() as patch:
        from labkit.hf import instrumented
        from labkit.port import program

        load = instrumented._Loader.get_data
        patch.setattr(instrumented._Loader, "get_data", lambda self, path: text.encode() if path.endswith(MODELING) else load(self, path))
        record = record_sources_here([TINY])
        patch.setattr(program, "transformers_folder", lambda: folder)
        patch.setattr(translator, "transformers_folder", lambda: folder)
        patch.setattr(translator, "source_tree", lambda model_type: tree)
        return translator.translate(TYPE, record=record), text


def test_what_cannot_be_translated_is_refused_by_line_and_component(edited):
    made, text = edited
    where = f"{MODELING}:{_line(text, 'down_proj[down_proj > 0]')}"
    assert [(r.where, r.component) for r in made.refusals] == [(where, "SeedOssMLP.forward")]
    assert "boolean mask" in made.refusals[0].construct and made.refusals[0].advice


def test_the_rest_of_the_slice_is_written_and_the_method_raises(edited, plain, registered, subject, x64):
    made, _ = edited
    text, whole = (t.files[f"modeling_{TYPE}.py"] for t in (made, plain))
    classes = [[line for line in source.splitlines() if line.startswith("class ")] for source in (text, whole)]
    assert classes[0] == classes[1] and text.count("raise NotImplementedError") >= 1
    registered(made.files)
    subject.load()
    with pytest.raises(NotImplementedError, match="boolean mask"):
        subject.prefill()


def _line(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_branches_that_no_run_took_are_listed_and_those_that_ran_are_not(edited, plain):
    made, text = edited
    listed = {where for where, said in made.unproven if "only ever False" in said}
    assert {f"{MODELING}:{_line(text, 'q.shape[0] == 99')}", f"{MODELING}:{_line(text, 'q.shape[0] == 98')}"} <= listed
    assert not any(where.endswith(f":{_line(text, 'q.shape[0] > 0')}") for where, _ in made.unproven) and plain.unproven == []


def test_a_branch_that_never_ran_and_cannot_be_translated_raises_there_alone(edited):
    made, text = edited
    where = f"{MODELING}:{_line(text, 'torch.nonzero')}"
    assert any(w == where and "nonzero" in said and "this branch raises" in said for w, said in made.unproven)
    lines = made.files[f"modeling_{TYPE}.py"].splitlines()
    test = next(number for number, line in enumerate(lines) if "q.shape[0] == 99" in line)
    assert "raise NotImplementedError" in lines[test + 1] and where in lines[test + 1] and "q.shape[0] == 98" in lines[test + 2]
