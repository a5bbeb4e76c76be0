"""Seeded faults come back under their names; a right port has none."""

import copy

import pytest

from labkit.models.llama import modeling_llama
from labkit.parity.capture import capture
from labkit.parity.components import compare_components
from labkit.parity.controls import rebuild, with_wrong_eps
from labkit.parity.diagnose import diagnose
from tests.parity.test_components import FAULTS, modeling_attend, table_of


def found(both, model=None, config=None):
    return diagnose(model or both.model, "llama", config or both.config, both.tokens, both.captured, table_of(both, model))


def test_a_right_port_has_no_finding(both, x64):
    assert found(both) == []


def test_a_wrong_eps_is_named_with_the_right_value(both, x64):
    config, key, right, _ = with_wrong_eps(both.config)
    [finding] = found(both, rebuild(both.model, "llama", config), config)
    assert finding.certain and f"{key} is" in finding.cause and f"must be {right:g}" in finding.cause
    assert finding.reference.startswith("transformers/models/llama/modeling_llama.py:")
    assert finding.ours.startswith("labkit/models/llama/modeling_llama.py:") and "RMSNorm(" in finding.statement


SEEDED = {
    "rope layout": ("apply_rope", FAULTS["rope pairs neighbours"][1], "rope", "pairs neighbours", True),
    "no rotation": ("apply_rope", lambda x, cos, sin: x, "rope", "does not rotate", True),
    "output scaled": ("attend", lambda *a, **k: modeling_attend(*a, **k) * 3, "attention", "x the reference", True),
    "score scale": ("attend", lambda *a, scale, **k: modeling_attend(*a, scale=2 * scale, **k), "attention", "the attention scores are multiplied by", True),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_faults_are_named(both, x64, monkeypatch, name):
    attribute, replacement, kind, words, certain = SEEDED[name]
    monkeypatch.setattr(modeling_llama, attribute, replacement)
    finding = found(both)[0]
    assert finding.component == kind and words in finding.cause + finding.evidence and finding.certain is certain, finding


def test_a_missing_module_is_a_finding(both, x64):
    isolated = copy.copy(both.isolated)
    del isolated["layers.1.mlp.up_proj"]
    table = compare_components(capture(both.model, both.tokens), isolated, both.captured)
    [finding] = diagnose(both.model, "llama", both.config, both.tokens, both.captured, table)
    assert "layers.1.mlp.up_proj" in finding.cause
