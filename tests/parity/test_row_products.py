"""Decoding through the kernel for one row: which weights go that way, and that the step computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.parity.greedy import GreedyDecoder, greedy
from labkit.parity.row_product import available, compiler
from labkit.parity.row_products import RowProducts, StoredWeight

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def kernel():
    assert available()


def step(weights, token):
    """A decoder in small: an embedding that is the head too, two stacked layers by [in, out], a stack of one by [out, in], one used both ways, a vector."""
    table, *rest = weights
    layers, by_output, both_ways, vector = jnp.stack(rest[:2]), jnp.stack(rest[2:3])[0], rest[3], rest[4]
    x = jnp.take(table, token, axis=0)
    for index in range(2):
        x = x + jax.nn.silu(x @ layers[index]) * vector
    x = jax.jit(lambda x: jnp.einsum("bi,oi->bo", x, by_output))(x)
    x = jnp.tanh(x @ both_ways) @ both_ways.T
    return x @ table.T, {"seen": token}


def made(exact: bool = True):
    random = np.random.default_rng(0)
    arrays = [random.normal(size=size).astype(np.float32) / 4 for size in ((50, 16), (16, 16), (16, 16), (16, 16), (16, 16), (16,))]
    return [jnp.asarray(array, jnp.bfloat16).astype(jnp.float32) if exact else jnp.asarray(array) for array in arrays]


def test_weights_are_followed_to_their_products():
    rows = RowProducts(step, made(), jnp.zeros(1, jnp.int32))
    assert rows.uses == {0: {1}, 1: {0}, 2: {0}, 3: {1}, 4: {0, 1}}
    narrow = [StoredWeight("bfloat16", transposed) for transposed in (False, True, True, False, False)]
    assert rows.stored == [*narrow, None]


@pytest.mark.parametrize("exact", [True, False])
def test_the_step_is_the_same_function(exact):
    weights, token = made(exact), jnp.asarray([7])
    rows = RowProducts(step, weights, token)
    assert {stored.dtype for stored in rows.stored if stored} == {"bfloat16" if exact else "float32"}
    stored = rows.store(weights)
    program = jax.jit(rows).lower(stored, token)
    assert program.as_text().count("labkit.RowTimes") == 6 and "dot_general" not in program.as_text()
    wanted, ours = step(weights, token), jax.jit(rows)(stored, token)
    np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert np.array_equal(ours[1]["seen"], token)


def test_weights_that_bfloat16_would_round_are_told_from_those_it_holds():
    """Kept as bfloat16 all the same, they give another function: the check is what keeps the result exact."""
    weights, token = made(exact=False), jnp.asarray([7])
    rows = RowProducts(step, weights, token)
    rows.stored = [stored and StoredWeight("bfloat16", stored.transposed) for stored in rows.stored]
    ours = rows(rows.store(weights), token)[0]
    assert np.abs(ours - step(weights, token)[0]).max() > 1e-3


def test_more_than_one_row_is_left_alone():
    assert not RowProducts(step, made(), jnp.zeros(2, jnp.int32)).replaces


def test_a_models_every_matrix_goes_through_it(both):
    from labkit.converters import load_model

    model, config, _ = load_model(both.source, dtype=jnp.float32)
    decode = GreedyDecoder(model, unroll=True)
    prompt = both.tokens[:1]
    assert np.array_equal(decode(prompt, 16), greedy(model, prompt, 16))
    assert sum(stored is not None for stored in decode.rows[1].stored) == 7 * config.num_hidden_layers + 1
    # Two rows go the other way, and one row again afterwards.
    assert np.array_equal(decode(both.tokens, 8), greedy(model, both.tokens, 8))
    assert np.array_equal(decode(prompt, 16), greedy(model, prompt, 16))


def test_without_the_kernel_decoding_is_as_before(both, monkeypatch):
    from labkit.converters import load_model

    monkeypatch.setattr("labkit.parity.row_product.available", lambda: False)
    model = load_model(both.source, dtype=jnp.float32)[0]
    decode = GreedyDecoder(model, unroll=True)
    assert np.array_equal(decode(both.tokens[:1], 8), greedy(model, both.tokens[:1], 8)) and decode.rows is None
