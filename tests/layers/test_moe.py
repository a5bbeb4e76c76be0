"""Mixture dispatch against the installed reference's expert loop, and the grouped product against `ragged_dot`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

from labkit.hf.exact import exact_mode
from labkit.layers.grouped_product import _blocked_outer, _group_matmul, _group_outer, first_rows
from labkit.layers.loss import load_balancing_loss
from labkit.layers.moe import apply_experts, routing_statistics

EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 10, 14, 2


def routing(kind, tokens):
    random = np.random.RandomState(3)
    if kind == "all on one":
        first = np.full(tokens, 4)
        return np.stack([first, (first + 1 + random.randint(0, 5, tokens)) % EXPERTS], 1), random.rand(tokens, TOP_K)
    unused = 0 if kind == "one unused" else None
    allowed = [e for e in range(EXPERTS) if e != unused]
    return np.stack([random.permutation(allowed)[:TOP_K] for _ in range(tokens)]), random.rand(tokens, TOP_K)


def experts():
    random = np.random.RandomState(1)
    return random.randn(EXPERTS, 2 * WIDTH, HIDDEN), random.randn(EXPERTS, HIDDEN, WIDTH)


def reference(x, indices, weights, gate_up, down):
    with exact_mode():
        module = Qwen3MoeExperts(
            SimpleNamespace(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, hidden_act="silu", _experts_implementation="eager")
        )
        module.gate_up_proj.data, module.down_proj.data = torch.from_numpy(gate_up), torch.from_numpy(down)
        given = torch.from_numpy(x).requires_grad_()
        out = module(given, torch.from_numpy(indices), torch.from_numpy(weights))
        out.sin().sum().backward()
    return out.detach().numpy(), [given.grad.numpy(), module.gate_up_proj.grad.numpy(), module.down_proj.grad.numpy()]


@jax.jit
def output_and_gradients(x, gate_up, down, indices, weights):
    def loss(x, gate_up, down):
        out = apply_experts(x, indices, weights, gate_up, down, jax.nn.silu)
        return jnp.sin(out).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate_up, down)
    return out, gradients


@pytest.mark.parametrize("kind", ["spread", "one unused", "all on one"])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_output_and_gradients_equal_the_reference_loop(kind, tokens):
    gate_up, down = experts()
    x = np.random.RandomState(2).randn(tokens, HIDDEN)
    indices, weights = routing(kind, tokens)
    want, gradients = reference(x, indices, weights, gate_up, down)
    with jax.enable_x64(True):
        ours_gate_up = jnp.asarray(gate_up.reshape(EXPERTS, 2, WIDTH, HIDDEN).transpose(0, 3, 1, 2))
        ours_down = jnp.asarray(down.transpose(0, 2, 1))
        got, (dx, dgu, dd) = output_and_gradients(jnp.asarray(x), ours_gate_up, ours_down, jnp.asarray(indices), jnp.asarray(weights))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())
    back = [np.asarray(dx), np.asarray(dgu).transpose(0, 2, 3, 1).reshape(gate_up.shape), np.asarray(dd).transpose(0, 2, 1)]
    for a, b in zip(back, gradients):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(np.abs(b).max(), 1))


@pytest.mark.parametrize("fault", ["gate and up exchanged", "weights exchanged", "experts shifted"])
def test_each_fault_is_noticed(fault):
    gate_up, down = experts()
    x = np.random.RandomState(2).randn(7, HIDDEN)
    indices, weights = routing("spread", 7)
    want, _ = reference(x, indices, weights, gate_up, down)
    ours = gate_up.reshape(EXPERTS, 2, WIDTH, HIDDEN).transpose(0, 3, 1, 2)
    ours = ours[:, :, ::-1] if fault == "gate and up exchanged" else ours
    weights = weights[:, ::-1] if fault == "weights exchanged" else weights
    indices = (indices + 1) % EXPERTS if fault == "experts shifted" else indices
    with jax.enable_x64(True):
        got, _ = output_and_gradients(*map(jnp.asarray, (x, ours, down.transpose(0, 2, 1), indices, weights)))
    assert np.abs(np.asarray(got) - want).max() / np.abs(want).max() > 1e-2


SIZES = [[3, 0, 5, 1], [9, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0], [2, 3, 4, 2]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("first", "block"), [(0, 1), (0, 4), (0, 16), (2, 1), (2, 3), (8, 4), (16, 1)])
def test_the_product_by_groups_equals_ragged_dot(sizes, transposed, first, block):
    random = np.random.RandomState(0)
    rows, weights, groups = jnp.asarray(random.randn(11, 5)), jnp.asarray(random.randn(4, 5, 3)), jnp.asarray(sizes, jnp.int32)
    given = weights.swapaxes(1, 2) if transposed else weights
    got = np.asarray(_group_matmul(rows, groups, given, first, block, transposed))
    want = np.asarray(jax.jit(jax.lax.ragged_dot)(rows, weights, groups))
    np.testing.assert_allclose(got[: sum(sizes)], want[: sum(sizes)], rtol=1e-5, atol=1e-5)
    assert not got[sum(sizes) :].any()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("first", "block"), [(0, 4), (2, 1), (2, 3), (8, 4)])
def test_the_gradient_of_weights_by_groups(sizes, first, block):
    random = np.random.RandomState(1)
    left, right, groups = random.randn(11, 5), random.randn(11, 3), jnp.asarray(sizes, jnp.int32)
    ends = np.cumsum(sizes)
    want = np.stack([left[end - size : end].T @ right[end - size : end] for size, end in zip(sizes, ends)])
    with jax.enable_x64(True):
        got = _group_outer(jnp.asarray(left), jnp.asarray(right), groups, first, block, np.float64)
        on_tpu = _blocked_outer(jnp.asarray(left), jnp.asarray(right), groups, block, np.float64, 1)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(on_tpu, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mean", [1, 7, 8, 32, 1000])
def test_first_rows_are_those_that_chance_gives(mean):
    """Rows on 64 experts by chance: the batched product takes nearly all of them and is not much larger than the rows are; too few rows are not batched."""
    first = first_rows(mean)
    sizes = np.bincount(np.random.RandomState(0).randint(0, 64, 64 * mean), minlength=64)
    if mean < 8:
        assert first == 0
    else:
        assert np.minimum(sizes, first).sum() >= 0.97 * sizes.sum() and first <= 2 * mean


def test_load_balancing_loss_equals_the_reference_with_padding():
    random = np.random.RandomState(5)
    logits = [random.randn(12, EXPERTS) for _ in range(3)]
    counted = np.asarray([0, 0, 0] + [1] * 9)
    with exact_mode():
        want = load_balancing_loss_func(tuple(map(torch.from_numpy, logits)), EXPERTS, TOP_K, torch.from_numpy(counted.reshape(2, 6)))
    with jax.enable_x64(True):
        parts = []
        for layer in logits:
            probabilities = jax.nn.softmax(jnp.asarray(layer), -1)
            parts.append(routing_statistics(probabilities, jax.lax.top_k(probabilities, TOP_K)[1], jnp.asarray(counted) != 0))
        got = load_balancing_loss(*(jnp.stack([part[name] for part in parts]) for name in ("tokens_per_expert", "router_probability")))
        unpadded = load_balancing_loss(*(jnp.stack([part[name] for part in parts[:1]]) for name in ("tokens_per_expert", "router_probability")))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert abs(float(unpadded) - float(want)) > 1e-3
