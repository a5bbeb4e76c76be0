"""The three verdicts: the right port passes, each wrong one fails, and none is given on other arithmetic than it claims."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.converters import load_model
from labkit.errors import GateError, InputError
from labkit.hf.goldens import make_goldens, read_goldens, write_goldens
from labkit.hf.reference import Reference
from labkit.parity import verdicts
from labkit.parity.controls import rebuild, with_wrong_eps
from labkit.parity.jobs import execute
from labkit.parity.verdicts import bfloat16_verdict, compare_greedy, exact_verdict, float32_verdict, golden_verdict, require_highest_precision
from tests.parity.conftest import TINY

PROMPTS = [np.random.default_rng(n).integers(3, 100, n) for n in (5, 40, 200)]


@pytest.fixture(scope="module")
def float32(both):
    model, config, _ = load_model(both.source, dtype=jnp.float32)
    return SimpleNamespace(model=model, config=config, reference=Reference.load(both.source, "float32"))


@pytest.fixture(scope="module")
def exact_result():
    return execute({"kind": "exact", "source": TINY, "lengths": [4, 40, 200], "cache_length": 12})


def test_exact_passes_and_its_control_fails(exact_result):
    verdict = exact_verdict(exact_result)
    assert exact_result["diagnosis"] == []
    assert verdict.passed and verdict.value <= 1e-12 and verdict.limit == 1e-9
    control = exact_result["control"]
    assert not control["passed"] and control["rel_error"] > 1e-9 and control["max_kl"] < 1e-4
    assert set(exact_result["checks"]) >= {"loop against the reference", "cache: steps", "cache: padded steps", "left padding against the reference"}
    json.dumps(verdict.as_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"max_rel_error": 1.1e-9},
        {"max_rel_error": float("nan")},
        {"max_rel_error": float("inf")},
        {"passed": False},
        {"control": {"passed": True}},
        {"table": {"passed": False, "missing": ["norm"]}},
    ],
)
def test_exact_fails_on_any_of_its_parts(exact_result, change):
    assert not exact_verdict(exact_result | change).passed


def test_a_wrong_port_fails_the_exact_job(monkeypatch, both):
    from labkit.parity import jobs

    def wrong_side(source, progress):
        config, *_ = with_wrong_eps(both.config)
        return both.source, both.reference, rebuild(both.model, "llama", config), config, []

    monkeypatch.setattr(jobs, "_both", wrong_side)
    result = execute({"kind": "exact", "source": TINY, "lengths": [12], "capture_length": 12, "cache_length": 0, "control": False})
    assert not result["passed"] and not exact_verdict(result).passed and exact_verdict(result).value > 1e-6
    named = result["diagnosis"][0]
    assert named["component"] == "norms" and "eps" in named["cause"] and named["certain"] and "modeling_llama.py:" in named["reference"]


def test_float32_passes(float32, both):
    verdict = float32_verdict(float32.model, float32.reference, both.reference, PROMPTS, steps=16)
    assert verdict.passed and verdict.value <= 1e-9 and verdict.details["matmul_precision"] == "highest"
    assert verdict.details["greedy"]["matched"] == verdict.details["greedy"]["tokens"] == 48 and not verdict.details["greedy"]["ties"]
    assert [len(verdict.details["arrays"][f"kl/{i}"]) for i in range(3)] == [5, 40, 200]


def test_float32_fails_a_scaled_head(float32, both):
    """Greedy tokens stay the same; the distribution does not."""
    state = jax.tree.map(lambda x: x, float32.model)
    state.lm_head.kernel[...] = state.lm_head.kernel[...] * 1.01
    verdict = float32_verdict(state, float32.reference, both.reference, PROMPTS, steps=4)
    assert not verdict.passed and verdict.value > 1e-6 and not verdict.details["greedy"]["splits"]
    state.lm_head.kernel[...] = state.lm_head.kernel[...] / 1.01


@pytest.mark.parametrize("precision", ["default", "bfloat16", "float32"])
def test_float32_is_refused_at_another_precision(float32, both, precision):
    with pytest.raises(GateError, match="jax_default_matmul_precision"):
        float32_verdict(float32.model, float32.reference, both.reference, PROMPTS, precision=precision)
    with pytest.raises(GateError):
        require_highest_precision()


def test_float32_is_refused_for_other_sides(float32, both):
    with pytest.raises(GateError, match="references in float32 and exact"):
        float32_verdict(float32.model, both.reference, both.reference, PROMPTS)
    half, _, _ = load_model(both.source, dtype=jnp.bfloat16)
    with pytest.raises(GateError, match="bfloat16 logits"):
        float32_verdict(half, float32.reference, both.reference, PROMPTS)
    for prompts in (PROMPTS[:2], [*PROMPTS[:2], PROMPTS[2][:199]]):
        with pytest.raises(InputError, match="three lengths"):
            float32_verdict(float32.model, float32.reference, both.reference, prompts)


class Undecided:
    """A reference that chooses the second best at one step of a real trace, whose two best it puts `gap` apart."""

    def __init__(self, reference, step, gap):
        self.reference, self.step, self.gap = reference, step, gap

    def greedy_trace(self, tokens, steps):
        sequence, trace = self.reference.greedy_trace(tokens[:, :], self.step + 1)
        best, second = np.argsort(-trace[self.step])[:2]
        trace[self.step, second] = trace[self.step, best] + self.gap
        prefix = np.concatenate([sequence[:, :-1], [[second]]], 1)
        rest, more = self.reference.greedy_trace(prefix, steps - self.step - 1)
        return rest, np.concatenate([trace, more])


def test_a_split_within_the_noise_is_a_tie_and_beyond_it_fails(float32):
    prompt = PROMPTS[1]
    tie = compare_greedy(float32.model, Undecided(float32.reference, 3, 1e-6), prompt, 8, noise=1e-4)
    assert tie["matched"] == 7 and len(tie["ties"]) == 1 and tie["ties"][0]["step"] == 3 and tie["ties"][0]["gap"] < 1e-4 and not tie["splits"]
    split = compare_greedy(float32.model, Undecided(float32.reference, 3, 1e-2), prompt, 8, noise=1e-4)
    assert split["matched"] == 3 and split["splits"][0]["step"] == 3 and not split["ties"]


def test_bfloat16_is_held_to_the_references_own_error(float32, both):
    tokens = np.random.default_rng(0).integers(3, 100, (4, 128))
    half, _, _ = load_model(both.source, dtype=jnp.bfloat16)
    own = Reference.load(both.source, "bfloat16")
    verdict = bfloat16_verdict(half, own, float32.reference, tokens)
    assert verdict.passed and verdict.limit == pytest.approx(1.5 * verdict.details["reference"]["mean"]) and verdict.details["positions"] == 512
    blurred = jax.tree.map(lambda x: x, half)
    blurred.lm_head.kernel[...] = (blurred.lm_head.kernel[...] * 1.05).astype(jnp.bfloat16)
    assert not bfloat16_verdict(blurred, own, float32.reference, tokens).passed
    with pytest.raises(InputError, match="512 positions"):
        bfloat16_verdict(half, own, float32.reference, tokens[:3])
    with pytest.raises(GateError, match="computes in float32"):
        bfloat16_verdict(float32.model, own, float32.reference, tokens)


def test_goldens_stand_in_for_the_reference(float32, tmp_path, monkeypatch):
    path = write_goldens(tmp_path / "g.jsonl", make_goldens(float32.reference, [("a", PROMPTS[0]), ("b", PROMPTS[1])], steps=6))
    goldens = read_goldens(path)
    assert golden_verdict(float32.model, goldens).passed
    wrong = goldens[0].logits.copy()
    wrong[:, 0] += 0.1
    assert not golden_verdict(float32.model, [dataclasses.replace(goldens[0], logits=wrong)]).passed
    other = goldens[0].greedy.copy()
    other[-1] = (other[-1] + 1) % 100
    assert not golden_verdict(float32.model, [dataclasses.replace(goldens[0], greedy=other)]).passed
    with pytest.raises(InputError, match="no goldens"):
        golden_verdict(float32.model, [])
    with pytest.raises(GateError):
        golden_verdict(float32.model, goldens, precision="default")


def test_limits_are_the_designs():
    assert (verdicts.EXACT_LIMIT, verdicts.FLOAT32_KL_LIMIT, verdicts.BFLOAT16_RATIO_LIMIT, verdicts.NOISE_FACTOR) == (1e-9, 1e-6, 1.5, 10)
