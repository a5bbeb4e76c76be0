"""The attack on every named family: parameters, config keys and inputs changed on both sides, and planted faults that the same specs must catch.

By default a draw on every third family; with `-m slow`, or `-k` and the family's name, a draw on each, every parameter and every key, and a draw on the
family's second configuration.
"""

import pytest

from labkit.parity.conformance.sources import NAMED, sources
from labkit.parity.perturb import perturb
from labkit.port.slices import ensure_slice

FAMILIES = list(NAMED)
DEFAULT = FAMILIES[2::3]
"""A window, a mixture, softcaps, multipliers, parallel and sandwich blocks, layers without rope, chunks and learned positions are among them."""


def each(what: str):
    """A parameter per family; its tests are a group of their own for `what`."""
    return [pytest.param(family, marks=pytest.mark.xdist_group(f"{what} {family}"), id=family) for family in FAMILIES]


def attacked(family: str, source: str, **options):
    ensure_slice(family).require()
    result = perturb(source, **options)
    assert not result.failures, result.plain(failures_only=True)
    assert not result.missed, result.plain(failures_only=True)
    assert {control.kind for control in result.controls} == {row.spec.kind for row in result.rows} == {"parameter", "config", "input"}
    return result


@pytest.mark.parametrize(
    "family", [pytest.param(p.values[0], marks=(*p.marks, *([] if p.id in DEFAULT else [pytest.mark.slow])), id=p.id) for p in each("attack")]
)
def test_attack(family):
    attacked(family, f"tiny:{family}")


@pytest.mark.slow
@pytest.mark.parametrize("family", each("whole attack"))
def test_whole_attack(family):
    result = attacked(family, f"tiny:{family}", full=True, seed=1)
    assert result.total >= 20


@pytest.mark.slow
@pytest.mark.parametrize("family", each("second attack"))
def test_attack_on_the_second_configuration(family):
    attacked(family, sources(family)[1], seed=2)
