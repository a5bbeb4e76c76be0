"""Trials that confirm a cause, and what they must not confirm."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from labkit.converters import load_model
from labkit.hf.reference import Reference
from labkit.hf.source import open_source
from labkit.models.gemma2 import modeling_gemma2
from labkit.models.llama import checkpoint_mappings_llama, modeling_llama
from labkit.models.mapping import Layout, Rule
from labkit.parity.capture import capture
from labkit.parity.components import compare_components
from labkit.parity.diagnose import diagnose
from labkit.parity.transpose_trial import _with_transposed, rule_line
from tests.parity.test_components import FAULTS, table_of

SQUARE = "tiny:llama?num_hidden_layers=2&hidden_size=40&num_attention_heads=4&head_dim=10&num_key_value_heads=2"
attend = modeling_llama.attend


def sides(name):
    """source, reference's capture, model, config and tokens of a tiny model, float64."""
    import jax

    source = open_source(name)
    tokens = np.random.default_rng(0).integers(3, 100, (2, 12))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        captured = Reference.load(source.path, "exact").capture(tokens)
        model, config, _ = load_model(source, dtype=jnp.float64)
    return SimpleNamespace(source=source, model=model, config=config, tokens=tokens, captured=captured)


@pytest.fixture(scope="module")
def square():
    return sides(SQUARE)


@pytest.fixture(scope="module")
def gemma2():
    return sides("tiny:gemma2?num_hidden_layers=2")


def found(side, family, model=None):
    model = model or side.model
    table = compare_components(capture(model, side.tokens), capture(model, side.tokens, inject=side.captured), side.captured)
    return diagnose(model, family, side.config, side.tokens, side.captured, table), table


@pytest.mark.parametrize("scale", [0.123, 1.0, 0.01])
def test_a_constant_on_the_scores_is_named_with_its_key(both, x64, monkeypatch, scale):
    monkeypatch.setattr(modeling_llama, "attend", lambda *a, **k: attend(*a, **k | {"scale": scale}))
    [finding] = diagnose(both.model, "llama", both.config, both.tokens, both.captured, table_of(both))
    assert finding.certain and finding.component == "attention"
    assert f"multiplied by {scale:g} and must be by {both.config.head_dim**-0.5:.12g}, which is head_dim ** -0.5" in finding.cause
    assert "2 of 2 layers" in finding.evidence and "out = attend(" in finding.statement


def test_a_scale_of_another_key_is_named_in_the_slices_own_file(gemma2, x64, monkeypatch):
    """Below a softcap, which takes the scaled scores; and the line is the slice's, not the layer's that every slice shares."""
    config = gemma2.config
    assert config.head_dim != config.query_pre_attn_scalar and config.attn_logit_softcapping
    assert found(gemma2, "gemma2")[0] == []
    monkeypatch.setattr(modeling_gemma2, "attend", lambda *a, **k: attend(*a, **k | {"scale": config.head_dim**-0.5}))
    [finding] = found(gemma2, "gemma2")[0]
    assert finding.certain and "query_pre_attn_scalar ** -0.5" in finding.cause and "query_pre_attn_scalar" in finding.fix
    assert finding.ours.startswith("labkit/models/gemma2/modeling_gemma2.py:") and finding.statement.startswith("out = attend(q, k, v, causal_mask(")
    assert finding.through.startswith("labkit/layers/attention.py:")


def by_head(q, *a, **k):
    return attend(q * jnp.linspace(1.0, 1.1, q.shape[2])[:, None].astype(q.dtype), *a, **k)


@pytest.mark.parametrize("fault", ["mask", "grouping", "by head"])
def test_other_faults_of_attention_are_not_called_a_scale(both, x64, monkeypatch, fault):
    attribute, replacement = ("attend", by_head) if fault == "by head" else FAULTS[fault][:2]
    monkeypatch.setattr(modeling_llama, attribute, replacement)
    findings = diagnose(both.model, "llama", both.config, both.tokens, both.captured, table_of(both))
    assert findings and not any(finding.certain or "multiplied" in finding.cause for finding in findings)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "self_attn.q_proj"])
def test_a_forgotten_transpose_of_a_square_matrix_is_named_with_its_rule(square, x64, monkeypatch, name):
    assert found(square, "llama")[0] == []
    kernel = checkpoint_mappings_llama.layer_kernel

    def forgetful(of, kinds=None):
        return Rule(f"layers.{of}.kernel", Layout(f"model.layers.{{layer}}.{of}.weight")) if of == name else kernel(of, kinds)

    monkeypatch.setattr(checkpoint_mappings_llama, "layer_kernel", forgetful)
    wrong, _, _ = load_model(square.source, dtype=jnp.float64)
    [finding] = found(square, "llama", wrong)[0]
    assert finding.certain and f"layers.{name}.kernel is transposed" in finding.cause and "2 of 2 places" in finding.evidence
    assert finding.fix.startswith("add Transpose(1, 0) to the steps of the rule") and f"{name}.weight" in finding.fix
    assert finding.ours.startswith("labkit/models/llama/checkpoint_mappings_llama.py:") and "layer_kernel(name)" in finding.statement


def test_a_transpose_too_many_is_taken_out(square, x64):
    path = ("layers", "self_attn", "o_proj", "kernel")
    [finding] = found(square, "llama", _with_transposed(square.model, [(path, None)]))[0]
    assert finding.certain and finding.fix.startswith("take Transpose(") and "o_proj" in finding.fix


def test_a_square_matrix_with_wrong_numbers_is_not_called_transposed(square, x64):
    from flax import nnx

    graphdef, state = nnx.split(square.model)
    leaves = dict(nnx.to_flat_state(state))
    path = ("layers", "self_attn", "o_proj", "kernel")
    leaves[path] = leaves[path].replace(leaves[path].get_raw_value().at[..., 0, 1].add(1e-3))
    [finding] = found(square, "llama", nnx.merge(graphdef, nnx.from_flat_state(list(leaves.items()))))[0]
    assert not finding.certain and "transposed" not in finding.cause


def test_the_line_of_a_rule_is_the_familys_own(both, gemma2):
    rule, line = rule_line("gemma2", gemma2.config, "layers.self_attn.o_proj.kernel")
    assert "layers.self_attn.o_proj.kernel" in rule.targets and str(line).startswith("labkit/models/gemma2/checkpoint_mappings_gemma2.py:")
    rule, line = rule_line("llama", both.config, "embed_tokens.embedding")  # made when its file was read
    assert "embed_tokens.embedding" in line.statement
    assert rule_line("llama", both.config, "no.such.kernel")[0] is None


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_line_of_the_checklist_is_a_slices_own(both, gemma2, x64, family):
    table = table_of(both) if family == "llama" else found(gemma2, "gemma2")[1]
    assert table.rows and all(row.ours.startswith("labkit/models/") for row in table.rows), [(row.kind, row.ours) for row in table.rows]
    norms = next(row for row in table.rows if row.kind == "norms")
    assert "RMSNorm(" in norms.statement and dataclasses.is_dataclass(norms)
