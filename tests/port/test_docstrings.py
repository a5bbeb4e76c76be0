"""First sentences of the reference's docstrings."""

import pytest

from labkit.port.docstrings import first_sentence


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Rotates half the hidden dims of the input.", "Rotates half the hidden dims of the input."),
        ("Padding x on the seq_len dim (dim=1) and\n    splitting it. More follows.", "Padding x on the seq_len dim (dim=1) and splitting it."),
        ("Compute A, e.g. the state\n\nArgs:\n    x: what", "Compute A, e.g. the state."),
        ("cache (`Cache`, *optional*):\n    The cache.", ""),
        ("Args:\n    x: what", ""),
        ("Computes A according to B\nArgs:\n    x: what", "Computes A according to B."),
        ("The following holds:", ""),
        ("", ""),
        ("torch.nn.Linear with a scale", "torch.nn.Linear with a scale."),
    ],
)
def test_first_sentence(text, wanted):
    assert first_sentence(text) == wanted
