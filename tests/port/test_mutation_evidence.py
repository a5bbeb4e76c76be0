"""A change is shown to be without effect by what ran, and only then."""

import jax
import jax.numpy as jnp
import pytest

from tests.port.mutation_evidence import why_no_effect

TEXT = """
import jax, jax.numpy as jnp

def never(x):
    return x + 1.5

def answer(x, exact=False):
    if exact:
        y = x * 2.0
    else:
        y = x * 3.0
    y = jax.nn.softmax(y, axis=1)
    n = x.shape[0] + x.shape[1]
    z = 0.0 * (y + 4.0)
    return y + z + n
"""


def run(source):
    names = {}
    exec(source, names)
    jax.jit(names["answer"])(jnp.arange(6.0).reshape(2, 3))


def evidence(old, new, within=None):
    begin = TEXT.index(within or old) + (within or old).index(old)
    return why_no_effect(TEXT, TEXT[:begin] + new + TEXT[begin + len(old) :], begin, begin + len(old), run)


@pytest.mark.parametrize(
    ("old", "new", "within", "said"),
    [
        ("1", "-1", "axis=1", "`jax.nn.softmax(y, axis=1)` has the same value after the change, in each of 1 evaluations (1 arrays compared)"),
        ("2.0", "2.5", None, "0 evaluations of `2.0`: `exact` was False in each of 1 evaluations"),
        ("1.5", "1.6", None, "0 evaluations of `1.5`: `never` was never called"),
        ("4.0", "4.1", None, "`0.0 * (y + 4.0)` has the same value after the change, in each of 1 evaluations (1 arrays compared)"),
    ],
)
def test_a_change_without_effect_is_shown(old, new, within, said):
    assert evidence(old, new, within) == said


@pytest.mark.parametrize(
    ("old", "new", "within"),
    [("3.0", "3.1", None), ("1", "0", "axis=1"), ("y + z + n", "y + z * n", None), ("1", "9", "x.shape[1]"), ("0.0", "0.1", None)],
)
def test_a_change_with_an_effect_has_no_evidence(old, new, within):
    assert evidence(old, new, within) is None
