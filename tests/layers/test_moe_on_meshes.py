"""A mixture on meshes of eight devices equals the same on one: outputs and gradients, whatever the routing, the number of tokens and the number of experts."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from labkit.layers import grouping, moe, token_exchange
from labkit.layers.grouping import group_tokens
from labkit.layers.moe import apply_experts, on_local_experts
from labkit.layers.sharding import Sharding, construction, default_mesh
from labkit.layers.token_exchange import stored_spec
from labkit.scale.mesh import build_mesh

AXES = ("data", "fsdp", "tensor", "expert")
MESHES = [(1, 8, 1, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 8, 1), (1, 1, 1, 8)]
HIDDEN, WIDTH, TOP_K = 16, 24, 3


class Gated(nnx.Module):
    """Experts as refined slices keep them: [experts, hidden, 2, width], [experts, width, hidden]."""

    def __init__(self, experts, sharding, random):
        self.gate_up_proj = _param(random, (experts, HIDDEN, 2, WIDTH), ("experts", "embed", None, "mlp"), sharding)
        self.down_proj = _param(random, (experts, WIDTH, HIDDEN), ("experts", "mlp", "embed"), sharding)

    @on_local_experts
    def __call__(self, x, index, weights):
        return apply_experts(x, index, weights, self.gate_up_proj, self.down_proj, jax.nn.silu)


class Biased(nnx.Module):
    """Experts as translated slices keep them: [.., out, in] with halves apart, gates between ups where the code reads them so, and biases."""

    def __init__(self, experts, sharding, random):
        self.gate_up_proj = _param(random, (experts, 2, WIDTH, HIDDEN), ("experts", None, "mlp", "embed"), sharding)
        self.gate_up_bias = _param(random, (experts, 2, WIDTH), ("experts", None, "mlp"), sharding)
        self.down_proj = _param(random, (experts, HIDDEN, WIDTH), ("experts", "embed", "mlp"), sharding)
        self.down_bias = _param(random, (experts, HIDDEN), ("experts", "embed"), sharding)

    @on_local_experts
    def __call__(self, x, index, weights):
        groups = group_tokens(index, self.down_proj)
        inner = groups.linear(groups.rows(x), self.gate_up_proj, interleaved=True) + groups.take(self.gate_up_bias, interleaved=True)
        rows = groups.linear(inner[:, ::2] * jax.nn.sigmoid(inner[:, 1::2]), self.down_proj) + groups.take(self.down_bias)
        return groups.sum(rows * groups.weights(weights))


def _param(random, shape, axes, sharding):
    spec = sharding.fitted("experts", axes, shape)
    return nnx.Param(jnp.asarray(random.randn(*shape)), out_sharding=spec)


def make(kind, experts, mesh=None):
    with construction(default_mesh() if mesh is None else mesh):
        return kind(experts, Sharding(dict(mesh.shape) if mesh is not None else None), np.random.RandomState(1))


def given(tokens, experts, routing="spread"):
    random = np.random.RandomState(2)
    if routing == "all on one":
        index = np.stack([np.full(tokens, 4 % experts)] + [np.full(tokens, experts)] * (TOP_K - 1), 1)
    else:
        allowed = [e for e in range(experts) if e != 1 or routing != "one unused"]
        index = np.stack([random.permutation(allowed)[:TOP_K] for _ in range(tokens)])
    return jnp.asarray(random.randn(tokens, HIDDEN)), jnp.asarray(index, jnp.int32), jnp.asarray(random.rand(tokens, TOP_K))


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def run(graphdef, state, x, index, weights):
    """The output, and the gradients of everything from a loss that weighs every element differently."""

    def loss(state, x, weights):
        out = nnx.merge(graphdef, state)(x, index, weights)
        return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(state, x, weights)
    return out, gradients


def compare(kind, mesh, tokens, experts, routing="spread"):
    """The largest relative error of the output and of each gradient against one device."""
    mesh = mesh if not isinstance(mesh, tuple) else build_mesh(**dict(zip(AXES, mesh)))
    arrays = given(tokens, experts, routing)
    want = run(*nnx.split(make(kind, experts)), *arrays)
    with jax.set_mesh(mesh):
        got = run(*nnx.split(make(kind, experts, mesh)), *arrays)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want))
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-30)) for a, b in pairs)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind, mesh", [(Gated, (2, 2, 2, 1)), *(slow(kind, mesh) for mesh in MESHES for kind in (Gated, Biased) if (kind, mesh) != (Gated, (2, 2, 2, 1)))]
)
def test_output_and_gradients_equal_those_of_one_device(kind, mesh):
    assert compare(kind, mesh, 32, 8) < 1e-12


@pytest.mark.parametrize("routing", ["all on one", slow("one unused"), slow("spread")])
def test_whatever_the_routing(routing):
    assert compare(Biased, (1, 2, 2, 2), 16, 8, routing) < 1e-12


@pytest.mark.parametrize("tokens", [1, slow(7)])
def test_tokens_that_do_not_divide(tokens):
    assert compare(Biased, (1, 2, 2, 2), tokens, 8) < 1e-12


@pytest.mark.parametrize(
    "mesh, tokens", [((1, 4, 1, 2), 16), *(slow(mesh, tokens) for mesh in ((1, 8, 1, 1), (1, 1, 1, 8), (1, 2, 2, 2), (1, 4, 1, 2)) for tokens in (16, 3))]
)
def test_more_shards_than_experts(mesh, tokens):
    """Six experts: what their number does not divide cuts the hidden axis instead, and no weight moves."""
    assert compare(Biased, mesh, tokens, 6) < 1e-12


def test_no_weight_moves():
    """What the forward gathers is tokens: no gathered array is as wide as an expert."""
    mesh = build_mesh(fsdp=2, tensor=2, expert=2)
    with jax.set_mesh(mesh):
        module = make(Gated, 8, mesh)
        graphdef, state = nnx.split(module)
        forward = jax.jit(lambda state, x, index, weights: nnx.merge(graphdef, state)(x, index, weights))
        jaxpr = str(forward.trace(state, *given(16, 8)).jaxpr)
    assert jaxpr.count("shard_map") == 1 and "reduce_scatter" in jaxpr and "ragged" in jaxpr
    gathers = [line for line in jaxpr.splitlines() if "all_gather[" in line]
    assert gathers and not any(f",{WIDTH // 2}" in line.split("=")[0] for line in gathers)


def specs_of_shard_maps(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield equation.params["in_specs"]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from specs_of_shard_maps(inner)


def test_weights_come_in_by_the_specs_that_they_are_stored_with():
    mesh = build_mesh(fsdp=2, tensor=2, expert=2)
    with jax.set_mesh(mesh):
        module = make(Gated, 8, mesh)
        graphdef, state = nnx.split(module)
        closed = jax.make_jaxpr(lambda state, *arrays: nnx.merge(graphdef, state)(*arrays))(state, *given(16, 8))
    (specs,) = specs_of_shard_maps(closed.jaxpr)
    stored = {stored_spec(variable) for _, variable in nnx.to_flat_state(state)}
    assert stored == {P(("fsdp", "expert"), None, None, "tensor"), P(("fsdp", "expert"), "tensor", None)} and stored <= set(specs)


def test_no_shard_map_on_one_device():
    graphdef, state = nnx.split(make(Gated, 8))
    with jax.set_mesh(build_mesh(devices=jax.devices()[:1])):
        assert "shard_map" not in str(jax.make_jaxpr(lambda state, *arrays: nnx.merge(graphdef, state)(*arrays))(state, *given(16, 8)))


def broken(monkeypatch, fault):
    if fault == "no sum over the tensor axis":
        monkeypatch.setattr(grouping.ExpertGroups, "_cuts", lambda self, w, rank, transposed: ((), ()))
    elif fault == "axes in another order":
        monkeypatch.setattr(token_exchange.Exchange, "index", lambda self, axes: jax.lax.axis_index(axes[::-1]))
    elif fault == "the bias added on every device":
        monkeypatch.setattr(grouping.PartialRows, "__add__", lambda self, rows: grouping.dataclasses.replace(self, local=self.local + rows))
    elif fault == "sums that stay apart":
        monkeypatch.setattr(jax.lax, "psum_scatter", lambda x, axes, **_: x[: x.shape[0] // 4])


@pytest.mark.parametrize(
    "fault", [slow("no sum over the tensor axis"), slow("axes in another order"), "the bias added on every device", slow("sums that stay apart")]
)
def test_each_fault_is_noticed(fault, monkeypatch):
    broken(monkeypatch, fault)
    run.clear_cache()
    try:
        assert compare(Biased, (1, 2, 2, 2), 16, 8) > 1e-3
    finally:
        run.clear_cache()
    assert moe.EXPERT_AXES == ("fsdp", "expert")
