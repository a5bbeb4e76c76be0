"""The attack on slices that are wrong in one known way: what it must name, and what it must let pass."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from labkit.errors import InputError
from labkit.hf.altered import altered_directory
from labkit.hf.source import open_source
from labkit.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from labkit.parity.jobs import execute
from labkit.parity.perturb import perturb
from labkit.parity.perturb_config import check_configs, moving_change
from labkit.parity.perturb_parameters import check_parameter
from labkit.parity.perturb_spec import NOTHING, TRACKS, Perturbation, PerturbSpec
from labkit.parity.perturb_subject import Subject
from labkit.parity.perturb_values import candidates, others

TINY = "tiny:llama?num_hidden_layers=2"


@pytest.fixture
def subject():
    with jax.enable_x64(True), Subject(TINY) as subject:
        yield subject


def test_a_job_attacks_and_counts():
    result = execute({"kind": "perturb", "source": TINY})
    found = Perturbation.from_dict(result["perturbation"])
    assert result["passed"] and result["specs"] == {"passed": found.total, "total": found.total} and found.holds
    assert {control.kind for control in found.controls} == {"parameter", "config", "input"} and "planted faults caught" in found.plain()


def test_a_key_that_the_slice_ignores_is_named(monkeypatch):
    made = LlamaConfig.from_hf.__func__
    monkeypatch.setattr(LlamaConfig, "from_hf", classmethod(lambda cls, hf: dataclasses.replace(made(cls, hf), rms_norm_eps=1e-4)))
    specs = [PerturbSpec("config", "rms_norm_eps", {"rms_norm_eps": 1e-2}, TRACKS), PerturbSpec("config", "hidden_act", {"hidden_act": "relu"}, TRACKS)]
    with jax.enable_x64(True), Subject(TINY) as subject:
        rows = check_configs(subject, specs)
    assert [row.passed for row in rows] == [False, True] and "obeys rms_norm_eps, and the slice ignores it" in rows[0].reason


@pytest.mark.parametrize(("sees", "reason"), [(np.cumsum, ""), (lambda x, axis: np.broadcast_to(x.sum(axis, keepdims=True), x.shape), "sees later tokens")])
def test_a_key_that_makes_the_reference_an_encoder_is_no_spec(sees, reason):
    def theirs(tokens=None, mask=None, *, at=None):
        given = np.asarray(subject.tokens if tokens is None else tokens, float)
        return (np.cumsum if at is None else lambda x, axis: 2 * sees(x, axis))(given, 1)[..., None] * np.arange(1, 9)

    subject = types.SimpleNamespace(tokens=np.arange(8).reshape(2, 4), theirs=theirs, variant=lambda config: "changed")
    subject.plain_theirs = theirs()
    found, why = moving_change(subject, [{"key": True}])
    assert (found is None) == bool(reason) and reason in why


def test_a_leaf_that_the_slice_ignores_is_named(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "__call__", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))))
    with jax.enable_x64(True), Subject(TINY) as subject:
        row = check_parameter(subject, PerturbSpec("parameter", "layers.mlp.up_proj.kernel", {"index": 1}))
    assert not row.passed and "move apart" in row.reason


def test_a_leaf_declared_dead_must_be(subject):
    row = check_parameter(subject, PerturbSpec("parameter", "norm.weight", None, NOTHING, "says the test"))
    assert not row.passed and "declared dead (says the test), and it moves the reference" in row.reason


def test_a_slice_brings_specs_and_dead_leaves_of_its_own(monkeypatch):
    import labkit.models.llama as package

    own = {"kind": "input", "target": "causality", "change": {"token": 5}, "follows": "as ever"}
    monkeypatch.setattr(package, "PERTURB_SPECS", (own,), raising=False)
    monkeypatch.setattr(package, "DEAD_LEAVES", {r"layers\.mlp\..*": "says the test"}, raising=False)
    result = perturb(TINY, kinds=("parameter", "input"), full=True, controls=False)
    assert next(row for row in result.rows if row.spec.origin == "slice").passed
    assert result.failures and all("declared dead" in row.reason and row.spec.target.startswith("layers.mlp.") for row in result.failures)


def test_other_values():
    assert others("rms_norm_eps", 1e-6) == pytest.approx([1e-4]) and others("tie", True) == [False] and others("hidden_act", "silu")[0] == "gelu_pytorch_tanh"
    assert [0.5, 1.5] == others("clip", 0.0) and others("layer_types", ["a", "b", "b"])[0] == ["b", "b", "a"] and others("name", "a path") == []
    found = candidates({"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}, "head_dim": 8, "model_type": "x"})
    assert {"rope_parameters.rope_theta", "rope_parameters=yarn", "rope_parameters=longrope", "head_dim"} <= set(found) and "model_type" not in found


def test_an_altered_directory(tmp_path):
    source = open_source(TINY)
    weight = np.asarray(source.tensors.read("model.norm.weight")) + 1
    altered = open_source(str(altered_directory(source.path, tmp_path / "a", config={"rms_norm_eps": 0.5}, tensors={"model.norm.weight": weight})))
    assert altered.config.effective["rms_norm_eps"] == 0.5 and np.array_equal(altered.tensors.read("model.norm.weight"), weight)
    assert np.array_equal(altered.tensors.read("lm_head.weight"), source.tensors.read("lm_head.weight"))
    with pytest.raises(InputError, match="no tensor gone"):
        altered_directory(source.path, tmp_path / "b", tensors={"gone": weight})
    with pytest.raises(ValueError, match="a kind among"):
        PerturbSpec("token", "x")
