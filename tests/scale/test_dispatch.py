"""The lab's dispatch beside a plain einsum over all experts: the same function, and other programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from labkit.errors import InputError
from labkit.layers.sharding import Sharding
from labkit.scale import aot
from labkit.scale.dispatch import DISPATCHES, PASSES, DispatchJob, DispatchReport, Experts, mixture_program
from labkit.scale.mesh import build_mesh
from tests.scale.test_aot import DENSE, MIXTURE, job

SMALL = DispatchJob(model="small", topology="v5e:2x2", mesh={"fsdp": 4}, tokens=64, hidden=128, intermediate=128, experts=8, top_k=2, dtype="float32")


def test_both_compute_the_same_function():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    with nnx.use_eager_sharding(False):
        experts = Experts(SMALL, Sharding({}, num_experts=SMALL.experts))
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(experts, name).get_raw_value().shape
        setattr(experts, name, nnx.Param(jax.random.normal(next(keys), shape) * shape[1] ** -0.5))
    x = jax.random.normal(next(keys), (SMALL.tokens, SMALL.hidden))
    weights, indices = jax.lax.top_k(jax.nn.softmax(jax.random.normal(next(keys), (SMALL.tokens, SMALL.experts))), SMALL.top_k)
    ours, einsum = experts.ours(x, indices, weights), experts.einsum(x, indices, weights)
    np.testing.assert_allclose(ours, einsum, rtol=2e-4, atol=2e-5)
    assert np.abs(ours - experts.einsum(x, (indices + 1) % SMALL.experts, weights)).max() > 0.01, "the control: other experts"


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("phase", PASSES)
def test_programs_keep_weights_and_tokens_cut(dispatch, phase):
    mesh = build_mesh(fsdp=4, tensor=2)
    program = mixture_program(SMALL, mesh, dispatch, phase)
    assert len(program.roles) == len(jax.tree.leaves(program.arguments)) and [role.kind for role in program.roles[:2]] == ["weight", "weight"]
    assert not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(program.arguments))
    shapes = jax.tree.leaves(jax.eval_shape(program.function, *program.arguments))
    assert (SMALL.tokens, SMALL.hidden) in {leaf.shape for leaf in shapes} and all(leaf.dtype == jnp.float32 for leaf in shapes)


def test_a_dense_model_has_no_dispatch():
    with pytest.raises(InputError, match="has no mixture"):
        aot.compare_dispatch(job(DENSE, "llama"))


@pytest.mark.slow
def test_the_table():
    report = aot.compare_dispatch(job(MIXTURE | {"num_experts": 16, "hidden_size": 256}, length=512, mesh={"fsdp": 4}, batch=4))
    assert isinstance(report, DispatchReport) and [(row.dispatch, row.phase) for row in report.rows] == [(d, p) for p in PASSES for d in DISPATCHES]
    ours, einsum = report.row("ours", "forward"), report.row("einsum", "forward")
    assert ours.weight_bytes == 0 and ours.activation_bytes > 0
    assert ours.flops < einsum.flops / 4, "2 of 16 experts"
    assert "tokens MB" in report.plain()
