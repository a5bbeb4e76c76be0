"""A port that is right without a cache and wrong with one: the place where it leaves its own full forward first comes back, with the slice's line."""

import jax.numpy as jnp
import numpy as np
import pytest

from labkit.layers.cache import KVCache
from labkit.models.llama import modeling_llama
from labkit.parity import greedy
from labkit.parity.cached import cached_against_reference, ways_of_feeding
from labkit.parity.cached_faults import name_cached_faults
from labkit.parity.jobs import execute
from tests.parity.conftest import TINY

attend, causal_mask, apply_rope, mlp, write = (
    modeling_llama.attend,
    modeling_llama.causal_mask,
    modeling_llama.apply_rope,
    modeling_llama.LlamaMLP.__call__,
    KVCache.write,
)


@pytest.fixture(autouse=True)
def compiled_anew():
    """A compiled call does not see a function that is replaced after it."""
    greedy._forward.clear_cache()
    yield
    greedy._forward.clear_cache()


def single(x):
    return 1.0001 if x.shape[1] == 1 else 1.0


def without_second_residual(self, x, *, tokens, rope, cache):
    attended, cache = self.self_attn(self.input_layernorm(x), tokens=tokens, rope=rope, cache=cache)
    x = x * single(x) + attended
    return x + self.mlp(self.post_attention_layernorm(x)), cache, {}


def seeing_padding(tokens):
    return causal_mask(type(tokens)(tokens.positions, tokens.segment_ids, tokens.slots, jnp.ones_like(tokens.key_segment_ids), tokens.key_slots))


FAULTS = {
    "queries of single tokens": ("attend", lambda q, *a, **k: attend(q * single(q), *a, **k), "attention", "self_attn.attn", "out = attend("),
    "rotation of single tokens": ("apply_rope", lambda x, *a: apply_rope(x, *a) * single(x), "rope", "self_attn.q_rope", "q, k = tag("),
    "mlp of single tokens": ("LlamaMLP.__call__", lambda self, x: mlp(self, x) * single(x), "mlp", "layers.0.mlp", ""),
    "residual of single tokens": ("LlamaDecoderLayer.__call__", without_second_residual, "block", "post_attention_layernorm (input)", ""),
}
QUICK = ("queries of single tokens", "residual of single tokens")


def named(both):
    ways = ways_of_feeding(both.model, both.tokens)
    errors, _ = cached_against_reference(both.model, both.reference, both.tokens, ways=ways)
    return name_cached_faults(both.model, both.tokens, ways, errors, both.captured), errors


def test_a_right_cache_has_no_finding(both, x64):
    findings, errors = named(both)
    assert findings == [] and max(errors.values()) < 1e-12


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS])
def test_the_first_place_that_leaves_the_full_forward_is_named(both, x64, monkeypatch, name):
    target, replacement, kind, place, statement = FAULTS[name]
    owner, _, attribute = target.rpartition(".")
    monkeypatch.setattr(getattr(modeling_llama, owner) if owner else modeling_llama, attribute, replacement)
    [finding], errors = named(both)
    assert finding.component == kind and place in finding.cause, finding
    assert finding.certain is ("residual" not in name)  # a residual goes around the place that shows it
    assert "'padded'" not in finding.evidence.partition("(right:")[0] and errors["padded"] < 1e-12
    assert "in the call with token 6," in finding.evidence
    if statement:
        assert finding.ours.startswith("labkit/models/llama/modeling_llama.py:") and finding.statement.startswith(statement)


def test_a_cache_that_writes_beside_its_slot_is_found_at_attention(both, x64, monkeypatch):
    monkeypatch.setattr(KVCache, "write", lambda self, key, value, start: write(self, key, jnp.roll(value, 1, 2), start))
    [finding], _ = named(both)
    assert finding.component == "attention" and finding.certain and "layers.0.self_attn.attn" in finding.cause


def test_padding_that_stays_visible_is_found_without_a_cache(both, x64, monkeypatch):
    monkeypatch.setattr(modeling_llama, "causal_mask", seeing_padding)
    findings, errors = named(both)
    assert errors["steps"] < 1e-12 < errors["padded"] and findings
    assert all(finding.component == "attention" for finding in findings) and "with padding" in findings[0].cause


@pytest.mark.slow
@pytest.mark.parametrize("job", [{"kind": "components", "length": 20, "cache_length": 20}, {"kind": "exact", "lengths": [20], "capture_length": 12}])
def test_the_jobs_of_diagnose_and_of_phase_4_name_it(job, monkeypatch):
    from labkit.lab.diagnose import Diagnosis

    job = job | {"source": TINY, "control": False}
    right = execute(job)
    assert right["passed"] and right["diagnosis"] == [] and len(right["checks"]) >= 5
    greedy._forward.clear_cache()
    monkeypatch.setattr(modeling_llama, "attend", FAULTS["queries of single tokens"][1])
    wrong = execute(job)
    assert not wrong["passed"] and wrong["table"]["passed"]
    [finding] = wrong["diagnosis"]
    assert finding["component"] == "attention" and "out = attend(" in finding["statement"]
    shown = Diagnosis(TINY, "llama", "model", wrong)
    assert shown.exit_code == 1 and "out = attend(" in shown.plain() and "cache: steps" in shown.plain() and finding in shown.as_json()["findings"]
    shown = Diagnosis(TINY, "llama", "model", right)
    assert shown.exit_code == 0 and "Decoding through the cache agrees" in shown.plain()


def test_a_random_error_of_the_logits_alone_is_told_as_such(both, x64, monkeypatch):
    """What no place of the loop shows is not blamed on a component."""
    ways = ways_of_feeding(both.model, both.tokens)
    [finding] = name_cached_faults(both.model, both.tokens, ways, dict.fromkeys(ways, 0.0) | {"steps": 1e-3}, both.captured)
    assert finding.component == "cache" and not finding.certain and np.isfinite(ways["steps"].error)
