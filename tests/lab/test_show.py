import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from labkit.lab.show import Figure, Gate, Gates, Section, Table, Text, code_markdown, escape_markdown, number
from tests.lab.samples import HOSTILE

TEXTS = st.text(st.sampled_from("ab<>&\"'`*_[]()!|~$\\#-+=.:/@1 \n\r\x1b\u202e{}") | st.characters(codec="utf-8"), max_size=40)


def rendered(markdown: str) -> list:
    """Inline tokens of GitHub-like Markdown, raw HTML allowed: the dangerous reading."""
    return [t for block in MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(markdown) for t in (block.children or [])]


@given(TEXTS)
def test_escaped_text_is_only_text(text):
    tokens = rendered("x " + escape_markdown(text))
    assert {t.type for t in tokens} <= {"text", "text_special"}
    shown = "".join(t.content for t in tokens)
    assert "<script" not in escape_markdown(text).lower()
    for letter in "ab1":
        assert shown.count(letter) >= text.count(letter)


@given(TEXTS.filter(str.strip))
def test_code_is_only_code(text):
    kinds = {t.type for t in rendered("x " + code_markdown(text) + " y")}
    assert kinds <= {"text", "text_special", "code_inline", "html_inline"}
    if "<" in text:
        assert "&lt;" in code_markdown(text)


@given(st.lists(st.lists(TEXTS, min_size=2, max_size=2), min_size=1, max_size=3))
def test_a_table_keeps_its_shape(rows):
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(Table(title="t", columns=["a", "b"], rows=rows, code=["b"]).markdown())
    assert html.count("<tr>") == len(rows) + 1
    assert html.count("<td") == 2 * len(rows)


def test_outside_text_is_escaped_in_html():
    page = Section(title=HOSTILE, items=[Table(title=HOSTILE, columns=[HOSTILE], rows=[[HOSTILE]], note=HOSTILE), Text(words="a {x}", values={"x": HOSTILE})])
    for text in (page.html(), Gates(gates=[Gate(name=HOSTILE, passed=True, value=HOSTILE, explanation=HOSTILE)]).html()):
        assert "<script" not in text and "<!--" not in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0e-9, "1e-9"),
        (2.34e-15, "2.34e-15"),
        (0.0, "0"),
        (0.125, "0.125"),
        (49152, "49,152"),
        (True, "yes"),
        (None, "–"),
        (100000.0, "100,000"),
        (1.5e10 + 0.5, "1.5e10"),
    ],
)
def test_numbers_read_well(value, shown):
    assert number(value) == shown


def test_numpy_and_not_finite_values_become_json():
    table = Table(title="t", columns=["a"], rows=[[np.float64(0.5)], [np.int32(3)], [float("nan")], [np.bool_(True)]])
    assert [r[0] for r in table.rows] == [0.5, 3, "nan", True]
    assert "NaN" not in table.model_dump_json()


def test_plain_text_is_aligned():
    text = Table(title="T", columns=["name", "n"], rows=[["a", 1], ["long", 1000]]).plain().splitlines()
    assert text[0] == "T"
    assert text[3].endswith("    1") and text[4].endswith("1,000")


def test_a_lost_figure_is_said(tmp_path):
    assert "not here" in Figure(title="F", file="figures/no.svg", alt="x").at(tmp_path).html()
