"""The kernel for one row against numpy, and machines that cannot make it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.parity import row_product
from labkit.parity.row_product import available, compiler, row_times

needs_kernel = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outputs, width", [(1, 1), (3, 63), (5, 64), (7, 200), (513, 576), (4000, 65)])
def test_it_is_the_product(dtype, outputs, width):
    assert available()
    random = np.random.default_rng(outputs)
    x, w = random.normal(size=width).astype(np.float32), jnp.asarray(random.normal(size=(outputs, width)), dtype)
    wanted = np.asarray(w, np.float64) @ x.astype(np.float64)
    made = jax.jit(row_times)(x, w)
    assert made.dtype == jnp.float32
    np.testing.assert_allclose(made, wanted, rtol=0, atol=2e-6 * np.abs(np.asarray(w, np.float64) * x).sum(-1).max())
    assert np.abs(np.asarray(made) - np.roll(wanted, 1)).max() > 1e-3 or outputs == 1


@needs_kernel
def test_many_at_once_and_one_after_the_other_are_right_every_time():
    """Parts go to whichever thread is free, inside a loop whose products do not wait for each other."""
    assert available()
    random = np.random.default_rng(0)
    ws = jnp.asarray(random.normal(size=(6, 900, 900)) / 30, jnp.bfloat16)

    @jax.jit
    def run(x, ws):
        return jax.lax.fori_loop(0, 20, lambda _, x: sum(jnp.tanh(row_times(x, w)) for w in ws), x)

    x = jnp.asarray(random.normal(size=900), jnp.float32)
    first = np.asarray(run(x, list(ws)))
    wanted = np.asarray(x)
    for _ in range(20):
        wanted = sum(np.tanh(np.asarray(w, np.float32) @ wanted) for w in ws)
    np.testing.assert_allclose(first, wanted, atol=1e-3)
    for _ in range(10):
        assert np.array_equal(run(x, list(ws)), first)


@needs_kernel
def test_a_row_of_another_length_is_refused():
    assert available()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a row"):
        jax.block_until_ready(jax.jit(row_times)(jnp.ones(5), jnp.ones((3, 4))))


def test_a_machine_without_a_compiler_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None and not available.__wrapped__()


def test_a_compiler_that_fails_leaves_nothing(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\ntest "$1" = --version\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("LABKIT_SCRATCH", str(tmp_path / "scratch"))
    assert compiler() == str(broken) and not available.__wrapped__()
    assert not list((tmp_path / "scratch" / "native").iterdir())


def test_other_devices_do_not_ask(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(row_product, "_built", lambda: pytest.fail("compiled for nothing"))
    assert not available.__wrapped__()
