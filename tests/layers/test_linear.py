"""Products by rows: the same forward to the bit, the same gradients, and no transposed copy on the way to the kernel's."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.linear import Embed, dot_general_by_rows


def test_forward_to_the_bit_and_gradients_as_without():
    x, kernel = jax.random.normal(jax.random.key(0), (3, 5, 8)), jax.random.normal(jax.random.key(1), (8, 6))
    plain, rows = (nnx.Linear(8, 6, rngs=nnx.Rngs(0), **more) for more in ({}, {"dot_general": dot_general_by_rows}))
    for layer in (plain, rows):
        layer.kernel[...] = kernel
    assert np.array_equal(plain(x), rows(x)) and np.array_equal(plain(x[0, 0]), rows(x[0, 0]))
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x)))
    for a, b in zip(*(jax.tree.leaves(jax.grad(loss, (0, 1))(layer, x)) for layer in (plain, rows))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    table = Embed(7, 8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(table.attend(x), x @ table.embedding[...].T)


def test_other_products_are_left_alone():
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
    batched = (((2,), (1,)), ((0,), (0,)))
    np.testing.assert_array_equal(dot_general_by_rows(x, kernel, batched), jax.lax.dot_general(x, kernel, batched))


def test_backward_copies_no_activation():
    x, kernel, seed = jnp.ones((4, 16, 24)), jnp.ones((24, 40)), jnp.ones((4, 16, 40))
    numbers = (((2,), (0,)), ((), ()))

    def text(dot):
        backward = lambda x, kernel, seed: jax.vjp(lambda x, kernel: jnp.tanh(dot(x, kernel, numbers)), x, kernel)[1](seed)
        return jax.jit(backward).lower(x, kernel, seed).compile().as_text()

    assert "transpose(" not in text(dot_general_by_rows).replace("transpose(jvp", "")
    assert "f32[40,4,16]" in text(jax.lax.dot_general)  # the control: the gradient with its axes exchanged
