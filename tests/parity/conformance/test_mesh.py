"""Checks 6 and 8 reject a mesh with its devices in another order, a mesh of a module's own, metadata that differ, and weights that stay whole."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from labkit.models.llama import modeling_llama
from labkit.parity.conformance import one_mesh, spread
from labkit.parity.conformance.subject import Subject
from labkit.scale.mesh import build_mesh

CUT, WHOLE = PartitionSpec("fsdp", "tensor"), PartitionSpec()


@pytest.fixture
def driver():
    return build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])


def small(mesh, spec=CUT, place=None):
    class Model(nnx.Module):
        def __init__(self):
            self.mesh = mesh
            self.inner = nnx.Module()
            array = jax.device_put(np.ones((16, 32), np.float32), NamedSharding(place or mesh, spec))
            with nnx.use_eager_sharding(False):
                self.weight = nnx.Param(array, out_sharding=spec)

    return Model()


@pytest.mark.slow
def test_a_right_slice_has_one_state_and_is_spread(llama):
    for check in (one_mesh.check, spread.check):
        found = check(llama)
        assert not found.problems, found.problems


def test_a_mesh_with_its_devices_reordered_is_noticed(driver):
    reordered = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4][::-1])
    assert one_mesh.misplaced(small(driver), driver) == []
    assert one_mesh.misplaced(small(reordered), driver) == [
        "weight lies on devices 3, 2, 1, 0 by P('fsdp', 'tensor'), its metadata say P('fsdp', 'tensor') on the driver's mesh"
    ]
    assert one_mesh.foreign_meshes(small(reordered), driver) == ["model.mesh is on devices 3, 2, 1, 0, not the driver's mesh"]


@pytest.mark.slow
def test_a_slice_that_builds_a_mesh_of_its_own_is_noticed(llama, monkeypatch):
    right = Subject.create
    reordered = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4][::-1])
    monkeypatch.setattr(Subject, "create", lambda self, mesh: right(self, reordered))
    problems = one_mesh.check(llama).problems
    assert problems[0] == "model.mesh is on devices 3, 2, 1, 0, not the driver's mesh"
    assert any("layers.mlp.up_proj.kernel lies on devices 3, 2, 1, 0" in problem for problem in problems)


def test_a_mesh_hidden_in_a_child_is_noticed(driver):
    model = small(driver)
    model.inner.mesh = driver
    assert one_mesh.foreign_meshes(model, driver) == ["inner.mesh is a mesh of its own: modules below the model hold none"]


def test_metadata_that_differ_are_named(driver):
    eager = one_mesh.describe(small(driver))
    other = small(driver)
    with nnx.use_eager_sharding(False):
        other.weight = nnx.Param(other.weight.get_raw_value(), out_sharding=PartitionSpec("tensor"))
    (problem,) = one_mesh.differences(eager, one_mesh.describe(other))
    assert problem.startswith("weight has ") and "'fsdp'" in problem
    assert one_mesh.differences(eager, {k: v for k, v in eager.items() if k != "weight"}) == ["weight is missing"]


def test_weights_that_stay_whole_are_named_and_odd_ones_told(driver):
    from labkit.converters.placement import Placement

    model = small(driver)
    put = lambda shape, spec=WHOLE: nnx.Param(jax.device_put(np.ones(shape, np.float32), NamedSharding(driver, spec)))
    with nnx.use_eager_sharding(False):
        model.whole, model.odd, model.tiny, model.cut = put((16, 16)), put((17, 19)), put((4, 4)), put((16, 16), PartitionSpec("data", "tensor"))
    paths = {"weight": (16, 32), "whole": (16, 16), "odd": (17, 19), "tiny": (4, 4), "cut": (16, 16)}
    placed = {path: Placement(path, shape, (), (path,)) for path, shape in paths.items()}
    assert spread.replicated(model, placed, driver) == (["whole [16, 16]"], ["odd [17, 19]"])


@pytest.mark.slow
def test_a_replicated_big_weight_and_a_wrong_forward_are_rejected(llama, monkeypatch):
    right = modeling_llama.LlamaSharding.weight

    def weight(self, name, axes):
        return PartitionSpec(*(None for _ in axes)) if name == "mlp.up_proj.kernel" else right(self, name, axes)

    monkeypatch.setattr(modeling_llama.LlamaSharding, "weight", weight)
    monkeypatch.setattr(modeling_llama.LlamaSharding, "constrain", lambda self, x, *a: x * (1.0 + 1e-6 * (not jax.sharding.get_abstract_mesh().empty)))
    problems = spread.check(llama).problems
    assert any(problem.startswith("layers.mlp.up_proj.kernel") for problem in problems)
    assert any("the sharded forward against the unsharded one" in problem for problem in problems)


def test_too_few_devices_are_told(llama, monkeypatch):
    from labkit.parity.conformance import conformance

    monkeypatch.setattr(jax, "devices", lambda *a: [object()])
    check = conformance(llama, checks=[8]).check(8)
    assert not check.passed and "need four devices" in check.reason


def test_plain_data_keep_every_field():
    from labkit.parity.conformance import Check, Conformance

    result = Conformance("tiny:x", "x", "refined", [Check(1, "a", True, 0.5), Check(0, "b", False, reason="why")])
    assert result.as_dict()["checks"][1]["reason"] == "why" and result.held == [1] and not result.passed
    assert dataclasses.asdict(result.check("b"))["number"] == 0 and "why" in result.plain()
    assert not Conformance("tiny:x", "x").passed
