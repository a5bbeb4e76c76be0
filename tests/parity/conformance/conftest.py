"""Subjects of two layers, made anew for every test that plants a fault: what was compiled for a right model must not answer for a wrong one."""

import pytest

from labkit.parity.conformance import Subject, exactly

LLAMA = "tiny:llama?num_hidden_layers=2"
MIXTURE = "tiny:qwen3_moe?num_hidden_layers=2&mlp_only_layers=[]"


@pytest.fixture
def subject():
    """make(name) -> Subject, in float64."""
    with exactly():
        yield Subject


@pytest.fixture
def llama(subject):
    return subject(LLAMA)


@pytest.fixture
def mixture(subject):
    return subject(MIXTURE)
