"""Check 7 rejects what moves a weight after construction, however deep it stands in the program, and leaves activations alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from labkit.models.llama import modeling_llama
from labkit.parity.conformance import placement
from labkit.parity.conformance.jaxpr_walk import DATA, Weights, walk
from labkit.scale.mesh import build_mesh

P = PartitionSpec
STORED = P("fsdp", "tensor")


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])


def problems(mesh, function, spec=STORED, shape=(8, 4), x=(4, 8)):
    """What is found in function(weight, x)."""
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(function)(jnp.ones(shape), jnp.ones(x)).jaxpr
    out = []
    walk(jaxpr, [Weights(frozenset({"w"}), placement.spec_axes(spec, len(shape))), DATA], lambda e, m: placement._visit(e, m, out, [0]))
    return [text.partition(",")[0] for text in out]


def test_a_constraint_on_an_activation_passes(mesh):
    assert problems(mesh, lambda w, x: jax.lax.with_sharding_constraint(x @ w, P("fsdp"))) == []


def test_a_constraint_on_a_weight_is_found(mesh):
    assert problems(mesh, lambda w, x: x @ jax.lax.with_sharding_constraint(w, P())) == ["sharding_constraint on w"]
    assert problems(mesh, lambda w, x: x @ jax.lax.with_sharding_constraint(w.T * 2 + 1, P()).T) == ["sharding_constraint on w"]


def test_device_put_on_a_weight_is_found(mesh):
    assert problems(mesh, lambda w, x: x @ jax.device_put(w, NamedSharding(mesh, P()))) == ["device_put on w"]


def test_it_is_found_inside_scan_remat_cond_while_and_jit(mesh):
    held = lambda w: jax.lax.with_sharding_constraint(w, P())
    stacked, spec = (3, 8, 8), P(None, "fsdp", "tensor")
    scanned = lambda w, x: jax.lax.scan(lambda c, layer: (c @ held(layer), None), x, w)[0]
    assert problems(mesh, scanned, spec, stacked) == ["sharding_constraint on w"]
    remat = lambda w, x: jax.lax.scan(lambda c, layer: (jax.checkpoint(lambda c, layer: c @ held(layer))(c, layer), None), x, w)[0]
    assert problems(mesh, remat, spec, stacked) == ["sharding_constraint on w"]
    assert problems(mesh, lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ held(w), lambda: x @ w)) == ["sharding_constraint on w"]
    loop = lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c + (x @ held(w)).sum(), 0.0)
    assert problems(mesh, loop) == ["sharding_constraint on w"]
    assert problems(mesh, lambda w, x: x @ jax.jit(held)(w)) == ["sharding_constraint on w"]
    assert problems(mesh, lambda w, x: jax.value_and_grad(lambda x: (x @ held(w)).sum())(x)) != []


def test_a_weight_that_met_data_is_an_activation(mesh):
    assert problems(mesh, lambda w, x: jax.lax.with_sharding_constraint(w * x[0, 0], P())) == []
    grown = lambda w, x: jax.lax.scan(lambda c, row: (jax.lax.with_sharding_constraint(c + row.sum(), P()), None), w, x)[0]
    assert problems(mesh, grown) == []


def mapped(mesh, in_spec, before=lambda w: w):
    body = lambda w, x: jax.lax.psum(jnp.sum(w), ("fsdp", "tensor")) + x
    return lambda w, x: jax.shard_map(body, mesh=mesh, in_specs=(in_spec, P()), out_specs=P(), check_vma=False)(before(w), x)


def test_shard_map_takes_weights_as_they_are_stored(mesh):
    assert problems(mesh, mapped(mesh, P("fsdp", "tensor"))) == []
    assert problems(mesh, mapped(mesh, P("fsdp", "tensor"), lambda w: w.astype(jnp.bfloat16))) == []
    assert problems(mesh, mapped(mesh, P("tensor", "fsdp"), lambda w: w.T)) == []
    assert problems(mesh, mapped(mesh, P("fsdp", "tensor"), lambda w: w.reshape(8, 1, 4).reshape(8, 4))) == []
    assert problems(mesh, mapped(mesh, P(("fsdp",), "tensor"))) == []
    assert problems(mesh, mapped(mesh, P("fsdp", "tensor"), lambda w: w[1]), P(None, "fsdp", "tensor"), (3, 8, 4)) == []


def test_shard_map_by_other_specs_is_found(mesh):
    (told,) = problems(mesh, mapped(mesh, P("fsdp")))
    assert told.startswith("shard_map takes w by P('fsdp'")
    (told,) = problems(mesh, mapped(mesh, P("fsdp", "tensor"), lambda w: w * 2 + w.T.sum()))
    assert told.startswith("shard_map takes what was computed from w")
    assert problems(mesh, mapped(mesh, P(None, "fsdp"), lambda w: w.reshape(4, 8)), P(None, "fsdp"), (8, 4)) != []


def test_a_planted_constraint_is_named_with_its_parameter_and_line(llama, monkeypatch):
    right = modeling_llama.LlamaMLP.__call__

    def held(self, x):
        self.up_proj.kernel = jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, P()), self.up_proj.kernel)
        return right(self, x)

    assert placement.check(llama).problems == []
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", held)
    told = placement.check(llama).problems
    assert told[0].startswith("sharding_constraint on layers.mlp.up_proj.kernel, ") and told[0].endswith("(scan)") and np.size(told) == 3
