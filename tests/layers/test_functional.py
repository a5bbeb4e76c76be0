"""Functions that translated slices call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.layers.functional import every, softmax, solve_triangular


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_that_is_masked_throughout_is_a_mean_in_a_fused_program(dtype):
    """XLA rounds a masked score and the row's maximum differently when it fuses the scaling into both: the plain function gives NaN there."""
    scores = np.random.default_rng(0).normal(size=(2, 6)) * 10
    with jax.enable_x64(True):
        mask = jnp.where(jnp.arange(2)[:, None] < 1, jnp.finfo(dtype).min, 0).astype(dtype) + jnp.zeros((2, 6), dtype)
        made = jax.jit(lambda s, m: softmax((s + m) / 3.4641))(jnp.asarray(scores, dtype), mask)
    wanted = torch.softmax((torch.tensor(scores, dtype=getattr(torch, dtype)) + torch.tensor(np.asarray(mask))) / 3.4641, -1)
    np.testing.assert_allclose(made, wanted, rtol=3e-6 if dtype == "float32" else 1e-14)


def test_far_scores_keep_their_order():
    made = softmax(jnp.array([-1e9, -1e9 + 128, -3e38], jnp.float32))
    np.testing.assert_allclose(made, [0.0, 1.0, 0.0])


@pytest.mark.parametrize("width, step, start", [(6, 2, 0), (6, 2, 1), (6, 3, 2), (7, 2, 1), (6, 2, 3)])
def test_every_is_the_strided_slice_and_its_gradient(width, step, start):
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    wanted = x[..., start::step]
    wanted.square().sum().backward()
    with jax.enable_x64(True):
        ours = jnp.asarray(x.detach().numpy())
        np.testing.assert_array_equal(every(ours, step, start), wanted.detach())
        np.testing.assert_array_equal(jax.grad(lambda x: (every(x, step, start) ** 2).sum())(ours), x.grad)


def test_the_gradient_of_every_second_element_does_not_pad_between_elements():
    """The TPU compiler takes minutes over such a pad where the rows are wide; the plain slice is what it must not be."""
    gradient = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())).lower(jnp.ones((2, 6))).as_text()
    pads = lambda f: "interior = [0, 1]" in gradient(f)
    assert pads(lambda x: x[..., ::2]) and not pads(lambda x: every(x, 2))


def test_a_triangular_solve_on_several_devices_takes_one_matrix_at_a_time():
    """jaxlib's batched kernel waits for threads of the pool that its callers hold: eight devices that solve at once stand still now and then."""
    a, b = np.tril(np.random.default_rng(0).normal(size=(2, 3, 5, 5))) + 3 * np.eye(5), np.random.default_rng(1).normal(size=(2, 3, 5, 4))
    assert jax.device_count() > 1
    with jax.enable_x64(True):
        arguments = jnp.asarray(a), jnp.asarray(b)
        ours = lambda a, b: solve_triangular(a, b, upper=False)
        np.testing.assert_allclose(ours(*arguments), torch.linalg.solve_triangular(torch.tensor(a), torch.tensor(b), upper=False), rtol=1e-12)
        batched = "tensor<2x3x5x5xf64>, tensor<2x3x5x4xf64>"
        calls = lambda f: [line for line in jax.jit(f).lower(*arguments).as_text().splitlines() if "trsm" in line]
        plain = calls(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True))
        assert plain and all(batched in line for line in plain)
        assert calls(ours) and not any(batched in line for line in calls(ours))
        gradients = [
            jax.grad(lambda a, b, f=f: jnp.sum(jnp.sin(f(a, b))), argnums=(0, 1))(*arguments)
            for f in (ours, lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True))
        ]
        for mine, theirs in zip(*gradients):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
