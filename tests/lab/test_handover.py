import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.lab import figures, handover
from labkit.lab.records import Failure, Finding, Records, Status
from labkit.lab.show import Gate, Section, Table, Text
from tests.lab.samples import HOSTILE, complete, failed_then_passed, killed, record


@pytest.fixture
def folder(tmp_path):
    complete(tmp_path / "tiny-qwen3")
    return tmp_path / "tiny-qwen3"


def test_the_five_sections_and_the_verdict_on_top(folder):
    text = handover.render(folder).read_text()
    heads = re.findall(r"^## (\d)\. (.+)$", text, re.M)
    assert [n for n, _ in heads] == list("12345")
    assert text.index("| exact | full | ✓ pass | 2e-15 | 1e-9 |") < text.index("## 1.")
    assert "all 4 gates hold" in text
    assert "labkit run tiny:qwen3" in text


@pytest.mark.parametrize("phase", [4, 5])
def test_what_phase_5_finds_is_told_apart_from_the_proof(folder, phase):
    Records(folder).write(record(phase, status=Status.BLOCKED, gates=[Gate(name="operations", passed=False, value=2.3, limit=1)]))
    text = handover.render(folder).read_text()
    if phase == 5:
        assert "all 4 gates hold" in text and "1 of phase 5's gates do not hold" in text
    else:
        assert "The port is not proven: 1 of 4 gates do not hold." in text


def test_rendering_is_a_pure_function_of_the_records(folder, tmp_path):
    first = handover.render(folder).read_bytes()
    assert handover.render(folder).read_bytes() == first
    elsewhere = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, elsewhere)
    assert handover.render(elsewhere).read_bytes() == first


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(note=st.binary(max_size=60).filter(lambda b: b"notes:" not in b))
def test_notes_survive_byte_for_byte(tmp_path, note):
    folder = tmp_path / "untimed"
    handover.path_of(folder).unlink(missing_ok=True)
    Records(folder).write(record(2, timings=[]))
    path = handover.render(folder)
    body = path.read_bytes()
    wanted = re.sub(rb"<!-- notes:bugs -->.*?<!-- /notes:bugs -->", lambda m: b"<!-- notes:bugs -->" + note + b"<!-- /notes:bugs -->", body, flags=re.S)
    path.write_bytes(wanted)
    Records(folder).write(record(2, timings=[], gates=[Gate(name="another", passed=True)]))
    text = handover.render(folder).read_bytes()
    assert b"<!-- notes:bugs -->" + note + b"<!-- /notes:bugs -->" in text
    assert handover.render(folder).read_bytes() == text


@pytest.mark.parametrize(
    "damage",
    [
        "<!-- notes:bugs -->\n<!-- notes:pitfalls -->",
        "<!-- /notes:bugs -->",
        "<!-- notes:bugs -->a<!-- /notes:bugs -->\n<!-- notes:bugs -->b<!-- /notes:bugs -->",
    ],
)
def test_broken_markers_are_refused_and_nothing_is_lost(folder, damage):
    path = handover.path_of(folder)
    path.write_text("# x\n" + damage)
    with pytest.raises(InputError, match="marker"):
        handover.render(folder)
    assert path.read_text() == "# x\n" + damage


def test_notes_under_an_unknown_name_are_kept(folder):
    path = handover.path_of(folder)
    path.write_text("<!-- notes:old-part -->mine<!-- /notes:old-part -->")
    assert "<!-- notes:old-part -->mine<!-- /notes:old-part -->" in handover.render(folder).read_text()


def test_a_gate_that_failed_and_later_passed_writes_its_own_entry(tmp_path):
    failed_then_passed(tmp_path / "m")
    (bug,) = handover.collect(tmp_path / "m").bugs
    assert not bug.open
    assert "bad1" in bug.happened and "2 against the limit 0" in bug.happened
    assert "good2" in bug.resolution
    assert "bad1" in handover.render(tmp_path / "m").read_text()


def test_a_gate_that_still_fails_is_open(tmp_path):
    Records(tmp_path / "m").write(record(1, status=Status.BLOCKED, gates=[Gate(name="audit", passed=False, value=1, limit=0)]))
    page = handover.collect(tmp_path / "m")
    assert page.bugs[0].open and page.status == "failed"
    assert "not proven" in page.sentence


def test_killed_and_interrupted_runs_are_told(tmp_path):
    store = Records(tmp_path / "m")
    store.write(record(3, history=[killed()]))
    text = handover.render(tmp_path / "m").read_text()
    assert "Kernel died in phase 3 at cell 5" in text
    assert "finished in the run of 2026-11-29 10:03 UTC" in text
    store.write(record(3, status=Status.IN_PROGRESS, end=None, cell=7, cell_name="bit_for_bit"))
    assert "at cell 7 (bit\\_for\\_bit)" in handover.render(tmp_path / "m").read_text()


def test_blocked_is_not_failed(tmp_path):
    Records(tmp_path / "m").write(record(1, status=Status.BLOCKED, failure=Failure(kind="BlockedError", what="the garden has no slice")))
    assert handover.collect(tmp_path / "m").sentence == "Blocked: the garden has no slice."


def test_nothing_from_outside_becomes_markup(tmp_path):
    hostile = record(
        1,
        model=HOSTILE,
        family=HOSTILE,
        learned=[Text(words="it is {x}", values={"x": HOSTILE})],
        findings=[Finding(component=HOSTILE, cause=HOSTILE, evidence=HOSTILE)],
        sections=[Section(title="s", items=[Table(title="t", columns=["k"], rows=[[HOSTILE]], code=["k"])])],
        failure=Failure(kind="error", what=HOSTILE, where=HOSTILE),
    )
    store = Records(tmp_path / "m")
    store.write(hostile)
    text, page = handover.render(tmp_path / "m").read_text(), handover.render_html(tmp_path / "m").read_text()
    assert "<script>" not in page and "<!--" not in page
    assert "<script>" not in re.sub(r"```.*?```", "", text, flags=re.S)
    assert sorted(handover.read_notes(text, tmp_path)) == sorted(handover.NOTES)
    assert handover.render(tmp_path / "m").read_text() == text


def test_the_page_stands_alone(folder):
    store = Records(folder)
    drawing = figures.parameter_share({"mlp": 5, "attention": 3})
    store.write(record(1, sections=[Section(title="P", items=[drawing.write(folder, "share")])]))
    handover.render(folder)
    path = handover.path_of(folder)
    path.write_text(path.read_text().replace("<!-- notes:summary -->\n", "<!-- notes:summary -->\nwritten by **me** <b>raw</b>\n"))
    page = handover.render_html(folder).read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page
    assert "<strong>me</strong>" in page and "<b>raw</b>" not in page


def test_figures_are_the_same_bytes_each_time(tmp_path):
    for drawing in (
        lambda: figures.decoder_pattern(["a", "b"] * 3, [0, 1]),
        lambda: figures.kl_by_position({"p": [1e-12, 0.0, 1e-9]}, 1e-6),
        lambda: figures.greedy_strip([1, 2], [1, 3], [1]),
    ):
        drawing().write(tmp_path, "a")
        drawing().write(tmp_path, "b")
        assert (tmp_path / "figures/a.svg").read_bytes() == (tmp_path / "figures/b.svg").read_bytes()


def test_a_model_without_records_is_said(tmp_path):
    with pytest.raises(InputError, match="no record"):
        handover.render(tmp_path / "nobody")
