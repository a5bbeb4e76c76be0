"""Parameters that nobody reads go, where every caller is seen and names them; a contract with the outside stays."""

import ast

import pytest

from labkit.port.unread_parameters import drop_unread_parameters

TEXT = """
class Model:
    def decode(self, tokens, mask=None, positions=None, cache=None):
        return self.layers(tokens, positions, cache)

class Head(Model):
    def __call__(self, tokens, cache):
        return super().decode(tokens, mask=cache.mask, positions=cache.positions, cache=cache)
"""


def after(text):
    tree = ast.parse(text)
    drop_unread_parameters(tree)
    return ast.unparse(tree)


def test_an_unread_parameter_goes_with_what_callers_gave_it():
    text = after(TEXT)
    assert "def decode(self, tokens, positions=None, cache=None):" in text and "super().decode(tokens, positions=cache.positions, cache=cache)" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.layers(tokens,", "self.layers(mask, tokens,"),  # read
        ("super().decode(tokens, mask=cache.mask,", "super().decode(tokens, cache.mask,"),  # given by place
        ("return super()", "kept = self.decode\n        return super()"),  # handed on, so called elsewhere
        ("cache=cache)", "cache=cache, **cache.more)"),  # given by names that are not seen
        (
            "def __call__(self, tokens, cache):",
            "def decode(self, mask):\n        return mask\n\n    def __call__(self, tokens, cache):",
        ),  # of another class too
        ("decode", "init_cache"),  # called from outside
    ],
)
def test_what_may_be_needed_stays(old, new):
    assert "mask=None" in after(TEXT.replace(old, new))
