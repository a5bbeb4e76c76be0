"""The reference's choices imposed: followed exactly, and rounding told apart from routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.converters import load_model
from labkit.errors import GateError, InputError
from labkit.hf import open_source
from labkit.hf.reference import Reference
from labkit.parity import frozen_topk as frozen_module
from labkit.parity.compare import relative_error
from labkit.parity.frozen_topk import FrozenTopK, frozen_topk, run_routed
from labkit.port.slices import ensure_slice

NAME = "tiny:qwen3_moe?num_hidden_layers=2"


@pytest.fixture(scope="module")
def source():
    return open_source(NAME)


@pytest.fixture(scope="module")
def tokens(source):
    return np.random.default_rng(0).integers(3, source.config.effective["vocab_size"], (2, 40))


@pytest.fixture(scope="module")
def captured(source, tokens):
    return Reference.load(source.path, "float32").capture(tokens)


@pytest.fixture(scope="module")
def report(source, tokens, captured):
    own = Reference.load(source.path, "bfloat16").logits(tokens)
    return frozen_topk(load_model(source, dtype=jnp.bfloat16)[0], captured, tokens, own_logits=own)


def test_bfloat16_is_nearer_to_the_reference_with_its_choices(report):
    assert report.followed and report.free.shape == report.frozen.shape == (2, 40)
    assert report.frozen.mean() < report.free.mean() / 2, "routing is most of the difference of this tiny mixture"
    assert 0.8 < np.mean(list(report.agreement.values())) < 1
    assert all(key.startswith("layers.") for key in report.agreement)


def test_each_flip_has_its_margin_and_is_a_tie_within_the_noise(report):
    assert report.flips and report.within_noise
    for flip in report.flips:
        assert not set(flip.ours) & set(flip.reference) and len(flip.ours) == len(flip.reference)
        assert 0 <= flip.margin <= 2 * flip.noise
    assert "margin" in report.plain()


def test_in_float64_nothing_flips_and_imposing_changes_nothing(source, tokens):
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        captured = Reference.load(source.path, "exact").capture(tokens)
        report = frozen_topk(load_model(source, dtype=jnp.float64)[0], captured, tokens)
    assert not report.flips and set(report.agreement.values()) == {1.0} and max(report.free.max(), report.frozen.max()) < 1e-12


def test_what_is_imposed_is_followed(source, tokens, captured):
    """A model whose router is broken gives the reference's logits again once the choices are the reference's."""
    from flax import nnx

    frozen = FrozenTopK.recorded(captured)
    model, _, _ = load_model(source, dtype=jnp.float32)
    graphdef, state = nnx.split(model)
    flat = [(path, leaf.replace(-leaf.get_raw_value()) if path[-2:] == ("gate", "kernel") else leaf) for path, leaf in nnx.to_flat_state(state)]
    broken = nnx.merge(graphdef, nnx.from_flat_state(flat))
    assert relative_error(run_routed(broken, tokens).logits, captured.outputs["logits"]) > 1e-2
    assert relative_error(run_routed(broken, tokens, frozen).logits, captured.outputs["logits"]) < 1e-4


def test_choices_of_other_tokens_are_seen(source, tokens, captured):
    """Control: the recorded choices in another order of tokens."""
    frozen = FrozenTopK.recorded(captured)
    moved = FrozenTopK(*({name: np.roll(array, 1, 0) for name, array in part.items()} for part in (frozen.indices, frozen.weights, frozen.logits)))
    model, _, _ = load_model(source, dtype=jnp.float32)
    assert relative_error(run_routed(model, tokens, moved).logits, captured.outputs["logits"]) > 1e-2
    with pytest.raises(GateError, match="choices are imposed on layers.0.mlp.gate"):
        run_routed(model, tokens[:, :20], frozen)


def test_a_router_that_does_not_choose_the_largest_logits_has_no_margin():
    logits = np.array([[3.0, 2.9, 1.0], [0.0, 1.0, 2.0]])
    theirs = FrozenTopK({"layers.4.gate": np.array([[0], [2]])}, {}, {"layers.4.gate": logits})
    ours = FrozenTopK({"layers.4.gate": np.array([[1], [2]])}, {}, {"layers.4.gate": logits + 0.06 * np.array([-1, 1, 1])})
    (flip,) = frozen_module._flips(ours, theirs)
    assert (flip.layer, flip.position, flip.ours, flip.reference) == (4, 0, (1,), (0,)) and abs(flip.margin - 0.1) < 1e-9 and abs(flip.noise - 0.06) < 1e-9
    corrected = FrozenTopK({"layers.4.gate": np.array([[0], [0]])}, {}, theirs.logits)
    assert [flip.margin for flip in frozen_module._flips(ours, corrected)] == [None, None]


def test_a_dense_model_has_no_routing():
    source = open_source("tiny:llama?num_hidden_layers=2")
    with pytest.raises(InputError, match="no router"):
        FrozenTopK.recorded(Reference.load(source.path, "float32").capture(np.full((1, 5), 7)))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "granitemoe", "olmoe", "glm4_moe", "qwen3_next"])
def test_translated_mixtures_follow_too(model_type):
    source = open_source(f"tiny:{model_type}")
    ensure_slice(source).require()
    tokens = np.random.default_rng(0).integers(3, 100, (2, 40))
    report = frozen_topk(load_model(source, dtype=jnp.bfloat16)[0], Reference.load(source.path, "float32").capture(tokens), tokens)
    assert report.followed and report.frozen.mean() <= report.free.mean()
