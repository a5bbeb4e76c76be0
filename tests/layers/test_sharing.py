"""Shared modules are one object: their parameters are in the state once and change together."""

import jax.numpy as jnp
import pytest
from flax import nnx

from labkit.layers.sharing import share_modules


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.block, self.own = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, table):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs) for _ in range(12)])
        share_modules(self, table)


def test_a_pattern_shares_every_module_that_it_matches_with_the_first():
    model = Model({r"layers.(?!1\.)\d+.block": "layers.1.block"})
    assert all(layer.block is model.layers[1].block for layer in model.layers)
    assert len({id(layer.own) for layer in model.layers}) == 12
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert sum("block" in path for path in paths) == 2 and sum("own" in path for path in paths) == 24
    merged = nnx.merge(*nnx.split(model))
    merged.layers[1].block.kernel[...] = jnp.zeros((3, 3))
    assert not merged.layers[11].block.kernel[...].any() and merged.layers[11].own.kernel[...].any()


def test_entries_share_in_turn():
    model = Model({"layers.2.block": "layers.0.block", "layers.3.block": "layers.1.block"})
    assert model.layers[2].block is model.layers[0].block and model.layers[3].block is model.layers[1].block
    assert model.layers[0].block is not model.layers[1].block


@pytest.mark.parametrize("table", [{"layers.20.block": "layers.1.block"}, {"layers.2.block": "layers.20.block"}, {r"layers.\d+.attention": "layers.1.block"}])
def test_an_entry_that_matches_nothing_is_an_error(table):
    with pytest.raises(ValueError, match="no modules to share"):
        Model(table)
