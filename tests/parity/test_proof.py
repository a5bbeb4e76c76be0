"""A proof takes every step on its own, passes what is right, and rejects what is wrong by the step that can see it."""

import numpy as np
import pytest

from labkit.errors import GateError
from labkit.parity import proof
from labkit.parity.proof import Step, prove, unsharded

TINY = {"one": ["tiny:llama?num_hidden_layers=3"]}


def by_name(found):
    return {step.name: step for step in found.steps}


def test_a_right_family_is_proven_in_every_step():
    told = []
    found = prove("llama", TINY, say=told.append)
    assert found.passed and found.first_failure is None, found.plain()
    assert [step.name for step in told] == list(proof.STEPS)
    assert found.kind == "refined" and 0 < found.worst("prefill") < 1e-12
    assert found.worst("round trip") is None and found.holds("round trip")


def test_a_wrong_number_fails_where_the_reference_is_asked_and_nowhere_else(monkeypatch):
    import dataclasses

    from labkit.models.llama.modeling_llama import LlamaConfig

    right = LlamaConfig.from_hf.__func__
    monkeypatch.setattr(LlamaConfig, "from_hf", classmethod(lambda cls, hf: dataclasses.replace(right(cls, hf), rms_norm_eps=2e-4)))
    found = by_name(prove("llama", TINY, steps=("build", "load", "prefill", "loop", "round trip")))
    assert {name for name, step in found.items() if not step.passed} == {"prefill"}
    assert "relative error" in found["prefill"].reason and found["prefill"].value > 1e-6


def test_a_cache_that_forgets_fails_in_decode_and_not_in_prefill(monkeypatch):
    import jax.numpy as jnp

    from labkit.layers.cache import KVCache

    write = KVCache.write

    def forget(self, key, value, start):
        return write(self, key, jnp.where(start > 0, jnp.zeros_like(value), value), start)

    monkeypatch.setattr(KVCache, "write", forget)
    monkeypatch.setattr(proof, "_compiled", None)  # what was compiled with the right cache
    found = by_name(prove("llama", TINY, steps=("build", "load", "prefill", "decode", "pieces")))
    assert found["prefill"].passed and not found["decode"].passed and not found["pieces"].passed


def test_an_error_in_one_step_leaves_the_others(monkeypatch):
    monkeypatch.setattr(proof._Subject, "prefill", lambda self: 1 / 0)
    found = by_name(prove("llama", TINY, steps=("build", "load", "prefill", "loop", "round trip")))
    assert found["prefill"].reason == "ZeroDivisionError: division by zero" and found["prefill"].place.startswith("parity/proof.py:")
    assert found["loop"].passed and found["round trip"].passed


def test_a_family_that_is_not_there_fails_and_says_so():
    found = by_name(prove("persimmon", {"one": ["tiny:persimmon"]}))
    assert found["build"].passed and not found["load"].passed and "no slice for model type 'persimmon'" in found["load"].reason
    assert found["prefill"].reason == "not tried: the model was not loaded"


def test_a_name_that_the_reference_refuses_gives_way_to_the_next():
    found = prove("llama", {"one": ["tiny:llama?nonsense=1", *TINY["one"]]}, steps=("build",))
    assert by_name(found)["build"].passed
    refused = prove("llama", {"one": ["tiny:llama?nonsense=1"]}, steps=("build",))
    assert not refused.passed and "nonsense" in refused.first_failure.reason and len(refused.steps) == 1


@pytest.mark.parametrize(
    ("apart", "ours", "value", "told"), [(0.0, 1e-3, 1e-3, False), (1e-3, 1e-3, 0.0, True), (1e-3, 2e-3, 1e-3, True), (1e-3, 0.0, 0.0, False)]
)
def test_a_cache_is_measured_by_the_references_own_where_the_reference_contradicts_itself(monkeypatch, apart, ours, value, told):
    """apart, ours: how far the reference's cached decoding and ours lie from its full forward."""
    subject = proof._Subject()
    subject.tokens, subject.rows = np.zeros((2, 12), np.int32), 2
    full = np.linspace(1.0, 2.0, 2 * 12 * 3).reshape(2, 12, 3)
    cut = lambda array, pieces: np.split(array, np.cumsum(pieces)[:-1], axis=1)
    subject.reference = type("Reference", (), {"cached_logits": lambda self, tokens, pieces, mask=None: cut(full + 2 * apart, pieces)})()
    monkeypatch.setattr(subject, "feed", lambda pieces, mask=None: cut(full + 2 * ours, pieces), raising=False)
    error, note = subject.through_cache([7, 1, 4], lambda parts: float(np.abs(np.concatenate(parts, 1) - full).max() / 2))
    assert error == pytest.approx(value, rel=0.5, abs=1e-12) and bool(note) is told
    assert not told or "differs from its own full forward by 1.0e-03" in note


def test_one_configuration_that_fails_is_enough():
    found = proof.Proof("x", steps=[Step("prefill", "a", True, 1e-15), Step("prefill", "b", False, 2.0)])
    assert not found.holds("prefill") and found.worst("prefill") == 2.0 and not found.holds("decode")


def test_nan_is_not_small():
    assert not proof.take("x", "a", lambda: float("nan")).passed
    assert not proof.take("x", "a", lambda: float("inf")).passed


def test_weights_on_every_device_whole_are_found():
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from labkit.scale.mesh import build_mesh

    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    class Model(nnx.Module):
        def __init__(self, spec):
            self.large = nnx.Param(jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, spec)))
            self.odd = nnx.Param(jax.device_put(np.ones((17, 17), np.float32), NamedSharding(mesh, PartitionSpec())))
            self.small = nnx.Param(jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, PartitionSpec())))

    assert unsharded(Model(PartitionSpec("fsdp"))) == []
    assert unsharded(Model(PartitionSpec())) == ["large (16, 16)"]


def test_a_differing_round_trip_is_a_failure(monkeypatch):
    import labkit.converters

    monkeypatch.setattr(labkit.converters, "compare_safetensors", lambda *a, **k: ["model.norm.weight: differs"])
    found = by_name(prove("llama", TINY, steps=("build", "load", "round trip")))
    assert not found["round trip"].passed and GateError.__name__ in found["round trip"].reason and "model.norm.weight" in found["round trip"].reason


def test_scan_and_loop_are_two_programs():
    import jax

    subject = proof._Subject()
    subject.build(TINY["one"])
    with jax.enable_x64(True):
        subject.load()
        counts = [str(jax.make_jaxpr(lambda tokens: subject.model(tokens, scan=scan))(subject.tokens)).count(" scan[") for scan in (True, False)]
    assert counts[0] > counts[1]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_default_shaped_models_have_the_coincidences_that_the_class_has(model_type):
    from labkit.hf import open_source
    from labkit.hf.default_shaped import default_shaped

    config = open_source(next(iter(default_shaped(model_type)))).config
    effective, defaults = config.effective, config.defaults
    assert {key: effective[key] for key in ("rope_parameters", "rms_norm_eps", "layer_norm_epsilon") if key in effective} == {
        key: defaults[key] for key in ("rope_parameters", "rms_norm_eps", "layer_norm_epsilon") if key in defaults
    }
    if model_type == "llama":
        assert effective["num_key_value_heads"] == effective["num_attention_heads"]
    hidden = effective.get("hidden_size", effective.get("n_embd"))
    assert hidden == 64 and (effective.get("head_dim") or 16) * effective.get("num_attention_heads", effective.get("n_head")) == hidden
