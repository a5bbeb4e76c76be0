"""The board: which types, what a lost worker leaves, resuming, and the table."""

import json
import multiprocessing
import subprocess
import sys
import time

import pytest

from labkit.errors import InputError
from labkit.hf.decoder_types import decoder_only_types
from labkit.lab import board as module
from labkit.lab.board import Board, board, held_out, reason


def row(name, passed=True, **more):
    steps = [{"name": "prefill", "on": "default", "passed": passed, "value": 1e-15 if passed else 0.5, "seconds": 1.0, "reason": "", "place": "", "note": ""}]
    return {"model_type": name, "kind": "translated", "translated": True, "passed": passed, "steps": steps, "seconds": 2.0, "error": None} | more


@pytest.fixture
def asked(monkeypatch):
    names = []
    monkeypatch.setattr(module, "_prove", lambda name, *rest: names.append(name) or row(name, passed=name != "gpt2"))
    return names


def test_all_decoders_and_the_others_than_the_held_out_ones(asked):
    found = board()
    known, excluded = decoder_only_types()
    assert set(asked) == set(known) and held_out()
    assert found.excluded == excluded and "bert: " in found.plain() and f"of the {len(held_out())} held-out ones" in found.plain()
    assert found.exit_code == 1
    asked.clear()
    board(apart=False)
    assert set(asked) == set(known) - set(held_out())


def test_the_held_out_ones_and_no_other(asked):
    board(apart=True)
    assert sorted(asked) == sorted(held_out())


def test_names_are_checked(asked):
    apart = held_out()[0]
    for types, says in ((["lama"], "Did you mean llama"), (["bert"], "bert is left out"), ([apart], "held-out")):
        with pytest.raises(InputError, match=says):
            board(types, apart=False)
    with pytest.raises(InputError, match="not one of the held-out"):
        board(["llama"], apart=True)
    assert asked == []


def test_lines_are_written_as_types_end_and_a_resumed_board_does_the_rest(asked, tmp_path):
    out = tmp_path / "board.jsonl"
    assert board(["llama", "gpt2"], out=out).exit_code == 1
    assert {json.loads(line)["model_type"] for line in out.read_text().splitlines()} == {"llama", "gpt2"}
    found = board(["llama", "gpt2", "gemma2"], out=out, resume=True)
    assert asked[2:] == ["gemma2"] and [r["model_type"] for r in found.rows] == ["llama", "gpt2", "gemma2"]
    board(["llama"], out=out)
    assert len(out.read_text().splitlines()) == 1
    out.write_text("{broken\n")
    with pytest.raises(InputError, match="damaged"):
        board(["llama"], out=out, resume=True)


def _slow(arguments):
    code = "import time; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code])
    print("pass  reached", child.pid, flush=True)
    return child.wait()


def _dead(arguments):
    print("out of luck", flush=True)
    return 1


def test_a_worker_that_takes_too_long_is_stopped_with_what_it_started(monkeypatch):
    monkeypatch.setattr(module, "_proof", _slow)
    monkeypatch.setattr(module, "_workers", lambda: multiprocessing.get_context("fork"))
    found = board(["llama"], time_limit=1.5)
    (lost,) = found.rows
    assert "took longer than 1.5 seconds" in reason(lost) and "pass reached" in reason(lost) and not lost["passed"]
    child = int(lost["error"]["what"].rsplit(" ", 1)[1])
    deadline = time.monotonic() + 10  # a killed process is gone a moment later
    while time.monotonic() < deadline and any(line.split()[1] == "(python)" and line.split()[2] not in "ZX" for line in _stat(child)):
        time.sleep(0.05)
    assert not any(line.split()[1] == "(python)" and line.split()[2] not in "ZX" for line in _stat(child))


def _stat(pid):
    try:
        return [open(f"/proc/{pid}/stat").read()]
    except OSError:
        return []


def test_a_worker_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(module, "_proof", _dead)
    monkeypatch.setattr(module, "_workers", lambda: multiprocessing.get_context("fork"))
    (lost,) = board(["llama"]).rows
    assert "ended with code 1; last: out of luck" in reason(lost) and lost["translated"] is None


def test_the_table_says_why():
    refused = row("b", passed=False, translated=False, refusals=[{"construct": "a loop", "where": "x.py:3", "component": "c", "advice": ""}] * 2)
    text = Board([row("c"), refused, row("a", passed=False, steps=[])]).plain()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["a", "b", "c"]
    assert "refused: a loop at x.py:3 and 1 more" in text and "of 3 types: 2 translated, 1 prefill" in text
