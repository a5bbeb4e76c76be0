"""Leftovers of a translation go; what computes, or may do something, stays."""

import pytest

from labkit.port.leftovers import remove_leftovers

GONE = {
    "a name bound to itself": ("x = x\nreturn x", "return x"),
    "a value that nobody reads": ("y = jnp.sum(x, axis=-1)\nreturn x", "return x"),
    "a chain that nobody reads": ("a = x.reshape(-1)\nb = a + 1\nreturn x", "return x"),
    "a name for a name": ("a = f(x)\nb = a\nreturn b * b", "b = f(x)\nreturn b * b"),
    "a branch with nothing in it": ("if x is None:\n    y = 1\nreturn x", "return x"),
    "an empty side": ("if x is None:\n    x = x\nelse:\n    x = x + 1\nreturn x", "if not x is None:\n    x = x + 1\nreturn x"),
    "parentheses": ("return ((x) + (y))", "return x + y"),
}
STAYS = {
    "a call that may do something": "y = self.cache.update(x)\nreturn x",
    "a name that is read twice": "a = f(x)\nb = a\nreturn a + b",
    "a value that an inner function reads": "y = jnp.sum(x)\n\ndef step(z):\n    return z + y\nreturn step(x)",
    "several targets": "a, b = jnp.split(x, 2)\nreturn b",
    "an attribute": "self.x = x\nreturn y",
}


def _in_function(body: str) -> str:
    return "def f(x, y):\n" + "\n".join(f"    {line}" if line else "" for line in body.splitlines())


@pytest.mark.parametrize("name", GONE)
def test_leftovers_go(name):
    before, after = GONE[name]
    assert remove_leftovers(_in_function(before)) == _in_function(after)


@pytest.mark.parametrize("name", STAYS)
def test_what_matters_stays(name):
    assert remove_leftovers(_in_function(STAYS[name])) == _in_function(STAYS[name])
