"""The conformance suite on every named family.

By default each family shows its logits exact and takes one check on one configuration, in turn, so that every check meets several families. With `-m slow`, or
when `-k` is the family's name, each family takes the whole suite on both configurations: `pytest tests/models -k mixtral`.
"""

import functools

import pytest

from labkit.parity.conformance import BESIDE, CHECKS, Subject, conformance, exactly
from labkit.parity.conformance.sources import NAMED, sources

MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "olmoe", "gpt_oss", "qwen3_next")
"""Families whose reference has an auxiliary loss."""
TURN = [*CHECKS, *(name for name in BESIDE if name != "exact")]


def chosen(family: str) -> list:
    """The check of a family's turn, and check 5 for some mixtures beside it."""
    turn = TURN[NAMED.index(family) % len(TURN)]
    return [turn] + [5] * (family in MIXTURES[:3] and turn != 5)


@functools.lru_cache(maxsize=1)
def subject(family: str, which: int) -> Subject:
    """One configuration at a time is kept with what it has compiled."""
    from labkit.port.slices import ensure_slice

    ensure_slice(family).require()
    return Subject(sources(family)[which], seed=which)


def names():
    """(family, configuration, check) of every test, the default ones first within a family; the others marked slow."""
    for place, family in enumerate(NAMED):
        turn = [(place % 2, name) for name in ["logits", *chosen(family)]]
        whole = [(which, name) for which in (0, 1) for name in (*CHECKS, *BESIDE) if (which, name) not in turn]
        for which, name in turn + whole:
            title = CHECKS[name][0] if name in CHECKS else name
            marks = [pytest.mark.xdist_group(f"{family} {which}"), *([] if (which, name) in turn else [pytest.mark.slow])]
            yield pytest.param(family, which, name, marks=marks, id=f"{family}-{'first' if which == 0 else 'second'}-{title.replace(' ', '_')}")


@pytest.mark.parametrize(("family", "which", "name"), list(names()))
def test_family(family, which, name):
    made = subject(family, which)
    if name == "logits":
        assert_logits_exact(made)
        return
    result = conformance(made, checks=[name])
    assert result.passed, result.plain()


def assert_logits_exact(made: Subject) -> None:
    """Against the installed reference, in float64; and a model with one wrong number is not."""
    import numpy as np

    from labkit.parity.compare import relative_error
    from labkit.parity.controls import with_wrong_weight

    with exactly():
        wanted = made.reference.logits(made.tokens)
        assert relative_error(np.asarray(made.forward(made.tokens)), wanted) <= 1e-9
        wrong, *_ = with_wrong_weight(made.model)
        assert relative_error(np.asarray(made.forward(made.tokens, model=wrong)), wanted) > 1e-9


def test_every_check_meets_several_families_and_mixtures():
    taken = [(name, family) for family in NAMED for name in chosen(family)]
    for check in TURN:
        assert len({family for name, family in taken if name == check}) >= 2, check
    fifth = {family for name, family in taken if name == 5}
    assert len(fifth & set(MIXTURES)) >= 2 and fifth - set(MIXTURES)


def test_the_named_families_are_those_of_the_attack():
    from tests.models.test_perturb import FAMILIES

    assert set(FAMILIES) == set(NAMED) and len(NAMED) == 29
