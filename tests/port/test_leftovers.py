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
    "a name that is only returned": ("z = x + y\nreturn z", "return x + y"),
    "a cast to its own dtype": ("return x.astype(x.dtype) + y", "return x + y"),
    "a table widened twice": ("return widen(jnp.asarray(x, wide_dtype(y.dtype)))", "return jnp.asarray(x, wide_dtype(y.dtype))"),
    "a tuple in parentheses": ("return (x, y)", "return x, y"),
    "parentheses": ("return ((x) + (y))", "return x + y"),
}
STAYS = {
    "a call that may do something": "y = self.cache.update(x)\nreturn x",
    "a name that is read twice": "a = f(x)\nb = a\nreturn a + b",
    "a value that an inner function reads": "y = jnp.sum(x)\n\ndef step(z):\n    return z + y\nreturn step(x)",
    "several targets": "a, b = jnp.split(x, 2)\nreturn b",
    "an attribute": "self.x = x\nreturn y",
    "a cast to another dtype": "return x.astype(y.dtype)",
    "a tuple of one": "return (x,)",
}
UNREAD = """class A:

    def __init__(self, config):
        self.config = config
        self.size = config.size
        self.kept = config.kept

    def __call__(self, x):
        return x * self.kept
"""


def _in_function(body: str) -> str:
    return "def f(x, y):\n" + "\n".join(f"    {line}" if line else "" for line in body.splitlines())


@pytest.mark.parametrize("name", GONE)
def test_leftovers_go(name):
    before, after = GONE[name]
    assert remove_leftovers(_in_function(before)) == _in_function(after)


@pytest.mark.parametrize("name", STAYS)
def test_what_matters_stays(name):
    assert remove_leftovers(_in_function(STAYS[name])) == _in_function(STAYS[name])


def test_attributes_that_nobody_reads_go_and_others_stay():
    left = remove_leftovers(UNREAD)
    assert "self.size" not in left and "self.config" not in left
    assert "self.kept = config.kept" in left


RELATIVES = """class Router:

    def __init__(self, config):
        self.top_k = config.top_k
        self.size = config.size

    def __call__(self, x):
        return top(x, self.top_k)


class Block:

    def __init__(self, config):
        self.top_k = config.top_k
        self.held = config.held
        self.router = Router(config)

    def __call__(self, x):
        return self.router(x){more}


class Wide(Block):

    def __init__(self, config):
        super().__init__(config)

    def wide(self, x):
        return x * self.held
"""


def test_an_attribute_of_the_same_name_in_another_class_keeps_nothing():
    left = remove_leftovers(RELATIVES.format(more=""))
    assert left.count("self.top_k = config.top_k") == 1 and "self.size" not in left
    assert "self.held = config.held" in left, "a derived class reads it"


@pytest.mark.parametrize("more", [" + self.other.top_k", " + helper(self)"])
def test_what_others_may_read_stays(more):
    left = remove_leftovers(RELATIVES.format(more=more))
    assert left.count("self.top_k = config.top_k") == 2
