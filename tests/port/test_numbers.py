"""Python numbers that meet bfloat16 arrays: translated, they give torch's values to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.layers.precision import divided, scaled
from tests.port import toy

TEXT = f"""
import torch
from torch import nn

class {toy.ENTRY}(nn.Module):
    def forward(self, input_ids):
        return input_ids

def case(x, w, factor):
    a = x * factor
    b = factor * (x @ w)
    c = x / 0.3 * 1.7
    d = x * 0.5
    wide = x.float()
    e = (wide * factor).to(x.dtype)
    f = (wide.cos() * 0.3).type_as(x)
    g = (x + wide) * factor
    h = x @ w
    h *= factor
    h /= 1.7
    h *= 2
    wide *= factor
    return a, b, c, d, e, f, g, h, wide
"""


def run(module):
    module.case(torch.randn(8, 8), torch.randn(8, 8), 0.22)


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    record = toy.observe(folder, TEXT, run)
    return toy.translated(toy.context(toy.program(folder, TEXT), record, ["case"]), "case")


def test_numbers_that_bfloat16_lacks_are_not_rounded_first(translated):
    for line in ("a = scaled(x, factor)", "b = scaled(x @ w, factor)", "c = scaled(divided(x, 0.3), 1.7)", "h = scaled(h, factor)", "h = divided(h, 1.7)"):
        assert line in translated


def test_exact_numbers_and_wide_arrays_stay_as_they_are(translated):
    kept = ["h *= 2", "wide *= factor"]
    for line in (*kept, "d = (x * 0.5)", "e = (wide * factor).astype(x.dtype)", "f = (jnp.cos(wide) * 0.3).astype(x.dtype)", "g = ((x + wide) * factor)"):
        assert line in translated


@pytest.mark.parametrize("number", [0.22, 1.7, 55.4256])
def test_products_and_quotients_are_torchs_to_the_bit(number):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours = jnp.asarray(x.float().numpy()).astype(jnp.bfloat16)
    same = lambda torchs, jaxs: np.array_equal(torchs.float().numpy(), np.asarray(jaxs, np.float32))
    assert same(x * number, scaled(ours, number)) and same(x / number, divided(ours, number))
    assert not same(x * number, ours * number)  # what the numbers' own rounding would do
