"""Expert groups against the installed reference's loop, and to the bit against the loop's order in bfloat16."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from labkit.hf.exact import exact_mode
from labkit.layers.grouping import group_tokens, linear_by_counts

EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 6, 10, 14, 3, 23
RANDOM = np.random.RandomState(1)
X, INDEX = RANDOM.randn(TOKENS, HIDDEN), np.stack([RANDOM.permutation(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)])
WEIGHTS = RANDOM.rand(TOKENS, TOP_K)
GATE_UP, DOWN = RANDOM.randn(EXPERTS, 2 * WIDTH, HIDDEN), RANDOM.randn(EXPERTS, HIDDEN, WIDTH)

DOWN_T = RANDOM.randn(EXPERTS, WIDTH, HIDDEN)


def gated(x, index, weights, gate_up, down):
    """The loop of `Qwen3MoeExperts.forward` as the translator writes it."""
    groups = group_tokens(index, EXPERTS)
    gate, up = jnp.split(groups.linear(groups.rows(x), gate_up), 2, -1)
    rows = groups.linear(jax.nn.silu(gate) * up, down)
    return groups.sum(rows * groups.weights(weights))


def arrays(dtype=jnp.float64):
    return [jnp.asarray(INDEX, jnp.int32) if a is INDEX else jnp.asarray(a, dtype) for a in (X, INDEX, WEIGHTS, GATE_UP, DOWN)]


def reference():
    with exact_mode(), torch.no_grad():
        config = dict(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, hidden_act="silu", _experts_implementation="eager")
        module = Qwen3MoeExperts(SimpleNamespace(**config))
        module.gate_up_proj.data, module.down_proj.data = torch.from_numpy(GATE_UP), torch.from_numpy(DOWN)
        return module(torch.from_numpy(X), torch.from_numpy(INDEX), torch.from_numpy(WEIGHTS)).numpy()


def test_equals_the_references_loop():
    want = reference()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        given = arrays()
        np.testing.assert_allclose(jax.jit(gated)(*given), want, rtol=0, atol=1e-12)
        given[1] = given[1][:, ::-1]
        assert np.abs(np.asarray(gated(*given)) - want).max() > 1e-2, "control: weights that belong to another choice"


def test_products_with_matrices_the_other_way_round_and_biases():
    """`GptOssExperts`: [experts, in, out] and a bias per expert."""
    config = GptOssConfig(intermediate_size=WIDTH, num_local_experts=EXPERTS, hidden_size=HIDDEN, num_experts_per_tok=TOP_K, experts_implementation="eager")
    gate_up_bias, down_bias = RANDOM.randn(EXPERTS, 2 * WIDTH), RANDOM.randn(EXPERTS, HIDDEN)
    with exact_mode(), torch.no_grad():
        module = GptOssExperts(config)
        module.gate_up_proj.data, module.down_proj.data = torch.from_numpy(GATE_UP.swapaxes(1, 2).copy()), torch.from_numpy(DOWN.swapaxes(1, 2).copy())
        module.gate_up_proj_bias.data, module.down_proj_bias.data = torch.from_numpy(gate_up_bias), torch.from_numpy(down_bias)
        want = module(torch.from_numpy(X), torch.from_numpy(INDEX), torch.from_numpy(WEIGHTS)).numpy()
    with jax.enable_x64(True):
        x, index, weights, gate_up, down = arrays()
        groups = group_tokens(index, EXPERTS)
        inner = groups.matmul(groups.rows(x), gate_up.swapaxes(1, 2)) + groups.take(jnp.asarray(gate_up_bias))
        gate, up = jnp.minimum(inner[:, ::2], module.limit), jnp.clip(inner[:, 1::2], -module.limit, module.limit)
        rows = groups.matmul((up + 1) * gate * jax.nn.sigmoid(gate * module.alpha), down.swapaxes(1, 2)) + groups.take(jnp.asarray(down_bias))
        np.testing.assert_allclose(groups.sum(rows * groups.weights(weights)), want, rtol=0, atol=1e-12)


def test_rows_are_added_by_ascending_expert():
    """In bfloat16 the order shows: the reference's loop adds expert by expert, whatever the order of choice."""
    rows = jnp.asarray(RANDOM.randn(TOKENS * TOP_K, 64), jnp.bfloat16)
    groups = group_tokens(jnp.asarray(INDEX), EXPERTS)
    want = jnp.zeros((TOKENS, 64), jnp.bfloat16)
    for row in range(TOKENS * TOP_K):
        want = want.at[int(groups.order[row]) // TOP_K].add(rows[row])
    assert np.array_equal(groups.sum(rows), want)
    assert not np.array_equal(groups.sum(rows), jnp.sum(rows[groups.places].astype(jnp.float32), 1).astype(jnp.bfloat16)), "control: added in float32"


def test_a_choice_of_no_expert_counts_as_nothing():
    with jax.enable_x64(True):
        x, index, weights, gate_up, down = arrays()
        dropped = index.at[:, 1].set(EXPERTS)
        want = gated(x, index, weights.at[:, 1].set(0.0), gate_up, down)
        np.testing.assert_allclose(gated(x, dropped, weights, gate_up, down), want, rtol=0, atol=1e-12)
        biased = lambda index: (lambda groups: groups.sum(groups.take(jnp.ones((EXPERTS, 2)))))(group_tokens(index, EXPERTS))
        assert np.all(biased(dropped) == TOP_K - 1) and np.all(biased(index) == TOP_K)


@pytest.mark.parametrize("tokens", [1, 200])
def test_few_and_many_tokens(tokens):
    random = np.random.RandomState(tokens)
    x, index = random.randn(tokens, HIDDEN), np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    with jax.enable_x64(True):
        groups = group_tokens(jnp.asarray(index, jnp.int32), EXPERTS)
        want = np.einsum("th,tkoh->to", x, DOWN.swapaxes(1, 2)[index])
        np.testing.assert_allclose(groups.sum(groups.linear(groups.rows(jnp.asarray(x)), jnp.asarray(DOWN.swapaxes(1, 2)))), want, rtol=0, atol=1e-12)


def test_rows_by_counts_meet_the_matrix_of_their_expert():
    counts = np.bincount(INDEX.reshape(-1), minlength=EXPERTS)
    rows = np.repeat(X, TOP_K, 0)
    with torch.no_grad():
        parts = torch.from_numpy(rows).split(counts.tolist(), 0)
        expected = torch.cat([torch.nn.functional.linear(part, torch.from_numpy(w)) for part, w in zip(parts, DOWN_T)]).numpy()
    with jax.enable_x64(True):
        found = linear_by_counts(jnp.asarray(rows), jnp.asarray(counts, jnp.int32), jnp.asarray(DOWN_T))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        shifted = linear_by_counts(jnp.asarray(rows), jnp.asarray(np.roll(counts, 1), jnp.int32), jnp.asarray(DOWN_T))
        assert np.abs(shifted - expected).max() > 1e-3


def test_an_experts_matrix_takes_part_in_products():
    groups = group_tokens(jnp.asarray(INDEX, jnp.int32), EXPERTS)
    rows = groups.rows(jnp.asarray(X))
    w = groups.expert(jnp.asarray(DOWN_T))
    assert jnp.array_equal(rows @ w.T, groups.linear(rows, jnp.asarray(DOWN_T)))
    assert jnp.array_equal(rows @ groups.expert(jnp.asarray(DOWN_T.swapaxes(1, 2))), groups.matmul(rows, jnp.asarray(DOWN_T.swapaxes(1, 2))))


def test_rows_of_experts_past_the_last_matrix_are_zero():
    groups = group_tokens(jnp.asarray(INDEX, jnp.int32), EXPERTS)
    found = groups.linear(groups.rows(jnp.asarray(X)), jnp.asarray(DOWN_T[:2]))
    past = np.asarray(groups.experts) >= 2
    assert past.any() and not np.asarray(found)[past].any() and np.asarray(found)[~past].any()
