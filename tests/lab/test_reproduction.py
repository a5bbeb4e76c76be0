"""Section 5 of the handover: commands that give the records again."""

import shlex

import pytest

from labkit.lab import runner
from labkit.lab.phases import phase_class
from labkit.lab.records import Record
from labkit.lab.reproduction import changed, named, quoted, run_commands

MODEL = "tiny:qwen3"


def records(phases, **given):
    """Records of `phases` as a run with these parameters leaves them."""
    text = {name: str(value) for name, value in given.items()}
    chosen = runner.notebook_parameters(phases, {"model": MODEL, **text})
    return {n: Record(model=MODEL, slug="s", phase=n, name="x", run="r", parameters=p, changed=changed(phase_class(n), p)) for n, p in chosen.items()}


def test_defaults_are_not_repeated():
    assert run_commands(MODEL, records([1, 2, 3, 4])) == [(f"labkit run {MODEL} --phases 1,2,3,4", "1,2,3,4")]


def test_parameters_that_were_given_are_told_and_give_the_same_parameters():
    found = records([1, 2, 3, 4], longest=300, limit="1e-12", golden="a file.jsonl")
    [(command, _)] = run_commands(MODEL, found)
    words = shlex.split(command)
    given = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}
    assert given == {"longest": "300", "limit": "1e-12", "golden": "a file.jsonl"}
    assert runner.notebook_parameters([1, 2, 3, 4], {"model": MODEL, **given}) == {n: r.parameters for n, r in found.items()}


def test_a_parameter_with_two_values_takes_two_commands():
    found = records([1, 2], batch=3) | records([3, 4, 5])
    assert run_commands(MODEL, found) == [
        (f"labkit run {MODEL} --phases 1,2,3,4 -p batch 3", "1,2,3,4"),
        (f"labkit run {MODEL} --phases 5", "5"),
    ]


def test_source_options_are_the_commands_own():
    assert named({"model": "org/name", "revision": "main", "trust_remote_code": True, "longest": 3}) == "org/name --revision main --trust-remote-code"
    [(command, _)] = run_commands("org/name", records([1], revision="v 2"))
    assert command == "labkit run org/name --revision 'v 2' --phases 1"


@pytest.mark.parametrize("name", ["a b", "it's", "$(rm -r x)", "two\nlines"])
def test_names_stay_one_word_on_one_line(name):
    word = quoted(name)
    assert "\n" not in word
    assert shlex.split(word) == [name] if name.isprintable() else word == "$'two\\nlines'"
