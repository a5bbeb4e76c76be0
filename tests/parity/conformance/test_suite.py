"""The suite takes each check on its own, refuses what it does not know, and runs as a job."""

import pytest

from labkit.errors import InputError
from labkit.parity.conformance import BESIDE, CHECKS, NAMES, conformance, suite
from labkit.parity.conformance.report import Found, take
from labkit.parity.conformance.sources import NAMED, SECOND, sources

TINY = "tiny:llama?num_hidden_layers=2"


def test_eight_checks_and_what_stands_beside_them():
    assert list(CHECKS) == list(range(1, 9)) and len(NAMES) == 8 + len(BESIDE)


def test_an_unknown_check_and_an_unknown_family_are_told():
    with pytest.raises(InputError, match="there is no check 9"):
        conformance(TINY, checks=[9])
    found = conformance("tiny:persimmon", checks=[2])
    assert not found.passed and "no slice for model type 'persimmon'" in found.checks[0].reason


def test_a_check_that_raises_is_its_own_failure(monkeypatch):
    monkeypatch.setitem(suite.CHECKS, 2, ("a call changes nothing", "", lambda subject: 1 / 0))
    told = []
    found = conformance(TINY, checks=[2, 5], say=told.append)
    assert [check.passed for check in told] == [False, True] and found.held == [5]
    assert "ZeroDivisionError" in found.check(2).reason and found.check(2).place


def test_values_beyond_the_limit_and_no_numbers_are_problems():
    found = Found()
    found.within(1e-13, 1e-12, "a")
    found.within(float("nan"), 1e-12, "b")
    assert len(found.problems) == 1 and "b: relative error nan" in found.problems[0]
    many = take(0, "x", "", lambda: Found(problems=list("abcde")))
    assert not many.passed and many.reason == "a; b; c and 2 more"


def test_the_suite_is_a_job():
    from labkit.parity.jobs import execute

    told = []
    result = execute({"kind": "conformance", "source": TINY, "checks": [2, 7]}, progress=lambda fraction, text: told.append(fraction))
    assert result["passed"] and told == [0.5, 1.0] and [check["number"] for check in result["conformance"]["checks"]] == [2, 7]


def test_every_family_has_two_configurations_that_differ():
    assert len(NAMED) == 29 and all(len(set(sources(family))) == 2 and "seed=1" in sources(family)[1] for family in NAMED)
    text = " ".join(SECOND.values())
    for hidden in ("num_attention_heads=8", "norm_topk_prob=false", "head_dim=", "num_hidden_layers=7", "llama3", "yarn", "dynamic", "linear", "longrope"):
        assert hidden in text, hidden
