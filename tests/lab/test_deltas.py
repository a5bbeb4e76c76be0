"""The delta list as phase 1, `inspect` and the handover show it."""

from labkit.lab.deltas import SHOWN, delta_table, summary
from labkit.lab.inspect import inspect
from labkit.port import delta_list
from tests.port import fake


def test_a_long_list_is_cut_and_counted():
    found = delta_list("gpt_neox")
    table = delta_table(found, shown=10)
    assert len(found.rows) > 10 == len(table.rows)
    assert f"and {len(found.rows) - 10} more rows" in table.note


def test_the_handover_holds_the_whole_list():
    for family in ("gpt_neox", "gemma2", "seed_oss"):
        found = delta_list(family)
        table = delta_table(found)
        assert len(found.rows) == len(table.rows) <= SHOWN and "more rows" not in table.note


def test_a_row_names_both_lines_and_ours():
    row = next(r for r in delta_table(delta_list("gemma2", "llama")).rows if "query_pre_attn_scalar" in r[3])
    assert row[0] == "attention" and row[4].startswith("modeling_gemma2.py:") and row[5].startswith("modeling_llama.py:")
    assert row[6].startswith("models/gemma2/modeling_gemma2.py:")


def test_a_family_without_a_slice_is_told_its_delta_before_its_wall(monkeypatch, tmp_path):
    fake.isolate(monkeypatch, tmp_path)
    fake.install(monkeypatch, fault=ValueError("no"))
    answer = inspect(fake.MODEL)
    assert answer["status"] == "blocked" and answer["delta"]["donor"] == "llama" and answer["delta"]["rows"] and answer["delta"]["unanswered"] is None
    assert 0 < answer["plain"].index(summary(delta_list(fake.FAMILY))[:30]) < answer["plain"].index("Wall:")


def test_rows_are_answered_by_a_translated_slice(monkeypatch, tmp_path):
    from labkit.port.slices import ensure_slice

    fake.isolate(monkeypatch, tmp_path)
    fake.install(monkeypatch)
    found = delta_list(fake.FAMILY, slice_folder=ensure_slice(fake.FAMILY).folder)
    assert found.has_slice and any(row.ours.startswith("modeling_mistral.py:") for row in found.rows)
