"""The delta list against the installed reference, and against copies of it that differ in a known way."""

import json
import os
import re
import subprocess
import sys

import pytest

from labkit.errors import InputError
from labkit.hf.architectures import causal_lm_classes, transformers_folder
from labkit.port import delta_list
from labkit.port.compare import compare
from labkit.port.components import COMPONENTS
from labkit.port.delta import delta_of, slice_file
from labkit.port.source_tree import read_tree, source_tree

REFINED = ("gemma2", "llama", "qwen3", "qwen3_moe")


def rows_of(family, donor, component=None):
    return [row.delta for row in delta_list(family, donor).rows if component in (None, row.delta.component)]


def source_line(place):
    """The text of the line that a row cites."""
    file, _, number = place.rpartition(":")
    return (transformers_folder().parent / file).read_text().splitlines()[int(number.split("-")[0]) - 1]


@pytest.mark.parametrize(
    ("family", "component", "kind", "cited", "explanation"),
    [
        ("gemma2", "norm", "added", "output * (1.0 + self.weight.float())", "1 + weight"),
        ("gemma2", "norm", "changed", "torch.zeros(dim)", "starts at zero"),
        ("gemma2", "attention", "added", "if softcap is not None", "softcap"),
        ("gemma2", "attention", "changed", "sliding_window=self.sliding_window", "window: how far back a layer sees; softcap"),
        ("gemma2", "attention", "changed", "config.query_pre_attn_scalar**-0.5", "query_pre_attn_scalar"),
        ("gemma2", "block", "added", "self.pre_feedforward_layernorm = ", "norm order"),
        ("gemma2", "block", "added", "self.post_feedforward_layernorm(hidden_states)", "norm order"),
        ("gemma2", "block", "changed", "self.pre_feedforward_layernorm(hidden_states)", "norm order"),
        ("gemma2", "head", "added", "if self.config.final_logit_softcapping is not None", "softcap"),
        ("gemma2", "embedding", "changed", "Gemma2TextScaledWordEmbedding(", "embedding scale"),
        ("gemma2", "embedding", "added", "class Gemma2TextScaledWordEmbedding", "embedding scale"),
        ("gemma2", "mlp", "changed", "config.hidden_activation", "activation"),
        ("gemma2", "config", "added", "query_pre_attn_scalar: int = 256", "query_pre_attn_scalar"),
        ("qwen3", "attention", "added", "self.q_norm = ", "q_norm"),
        ("qwen3", "attention", "changed", "self.k_norm(self.k_proj", "k_norm"),
        ("qwen3", "attention", "changed", "sliding_window=self.sliding_window", "window"),
        ("qwen3", "mlp", "changed", "self.up_proj = nn.Linear", "bias: False; the donor config.mlp_bias"),
        ("qwen3_moe", "router", "added", "class Qwen3MoeTopKRouter", "softmax over all experts"),
        ("qwen3_moe", "experts", "added", "class Qwen3MoeExperts", "top-k"),
        ("qwen3_moe", "experts", "added", "class Qwen3MoeSparseMoeBlock", "no counterpart"),
        ("qwen3_moe", "block", "added", "layer_idx not in config.mlp_only_layers", "sparse"),
    ],
)
def test_a_known_difference_is_listed_at_its_line(family, component, kind, cited, explanation):
    found = [r for r in rows_of(family, "llama", component) if r.kind == kind and cited in source_line(r.line)]
    assert len(found) == 1, [(r.kind, source_line(r.line)) for r in rows_of(family, "llama", component) if r.line]
    assert explanation in found[0].explanation
    if kind == "changed":
        assert found[0].donor_line and found[0].donor_statement


def test_removed_rows_cite_the_donor():
    (row,) = [r for r in rows_of("gemma2", "llama", "config") if r.kind == "removed" and r.method == "mlp_bias"]
    assert (row.line, row.statement) == ("", "") and "mlp_bias: bool = False" in source_line(row.donor_line)


def test_what_only_the_donor_has_is_not_told_as_the_family_s():
    rows = [r for r in rows_of("gemma2", "qwen3", "attention") if "q_norm" in r.donor_statement]
    assert len(rows) == 2 and {r.kind for r in rows} == {"changed", "removed"} and all(r.explanation.startswith("the donor has: q_norm") for r in rows)


@pytest.mark.parametrize("family", REFINED)
def test_a_family_against_itself_has_no_rows(family):
    assert delta_list(family, family).rows == () and delta_list(family, family).similarity == 1.0


@pytest.mark.parametrize("family", REFINED)
def test_every_row_of_a_refined_family_has_its_place_in_the_slice(family):
    found = delta_list(family)
    assert found.has_slice and found.rows and not found.unanswered, [r.as_dict() for r in found.unanswered]
    for row in found.as_rows():
        assert re.fullmatch(r"labkit/\S+\.py:\d+", row["ours"]) or row["ours_reason"].startswith("N/A"), row


@pytest.fixture
def copied(tmp_path):
    """llama's modeling file after a change, as a tree."""
    llama = source_tree("llama")

    def make(before, after, *, entry="LlamaForCausalLM", count=1):
        text = llama.file.read_text()
        assert before in text
        changed = text.replace(before, after, count)
        file = tmp_path / "modeling_copy.py"
        file.write_text(changed)
        return read_tree(file, entry, config_file=llama.config_file, config_name="LlamaConfig"), changed

    return make


@pytest.mark.parametrize(
    ("before", "after", "component"),
    [
        ("hidden_states = residual + hidden_states", "hidden_states = residual - hidden_states", "block"),
        ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, x1), dim=-1)", "rope"),
        ("variance + self.variance_epsilon", "variance - self.variance_epsilon", "norm"),
        ("self.scaling = self.head_dim**-0.5", "self.scaling = self.head_dim**-1.0", "attention"),
        ("scaling=self.scaling,", "scaling=self.scaling * 2,", "attention"),
        ("attn_weights = attn_weights + attention_mask", "attn_weights = attn_weights - attention_mask", "attention"),
        ("if attention_mask is not None:", "if attention_mask is None:", "attention"),
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x)) + self.up_proj(x)", "mlp"),
        ("eps: float = 1e-6", "eps: float = 1e-5", "norm"),
        ("bias=config.mlp_bias)", "bias=True)", "mlp"),
        ("config.num_attention_heads // config.num_key_value_heads", "config.num_key_value_heads // config.num_attention_heads", "attention"),
    ],
)
def test_one_operator_gives_one_row_at_its_line(copied, before, after, component):
    tree, text = copied(before, after)
    (row,) = compare(tree, source_tree("llama"))
    expected = next(i for i, (a, b) in enumerate(zip(text.splitlines(), source_tree("llama").file.read_text().splitlines()), 1) if a != b)
    assert (row.component, row.line.rsplit(":", 1)[1]) == (component, str(expected))


def test_a_statement_left_out_is_one_row_at_the_donor_s_line(copied):
    (row,) = compare(copied("hidden_states = self.norm(hidden_states)", "hidden_states = hidden_states")[0], source_tree("llama"))
    assert (row.kind, row.component, row.line) == ("removed", "norm", "") and "self.norm(hidden_states)" in source_line(row.donor_line)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)\n", "attn_weights = attn_weights\n"),
        ("self.gradient_checkpointing = False", "self.gradient_checkpointing = True"),
        ("hidden_states: torch.Tensor, n_rep: int", "hidden_states, n_rep"),
        ("Rotates half the hidden dims of the input.", "Turns them."),
        ('raise ValueError("You must', 'raise KeyError("You must'),
    ],
)
def test_what_is_not_computed_gives_no_row(copied, before, after):
    assert compare(copied(before, after)[0], source_tree("llama")) == []


def test_another_family_s_name_gives_no_row(copied):
    tree, _ = copied("Llama", "Vicuna", entry="VicunaForCausalLM", count=-1)
    assert tree.prefix == "Vicuna" and compare(tree, source_tree("llama")) == []


def test_what_no_slice_answers_is_unanswered(copied):
    """A copy with a new submodule, a new config key and a new class, against the slice of llama, which has none of them."""
    llama = source_tree("llama")
    for before, after, reason in [
        ("self.is_causal = True", "self.is_causal = True\n        self.q_norm = LlamaRMSNorm(self.head_dim)", "has no q_norm"),
        ("self.scaling = self.head_dim**-0.5", "self.scaling = config.query_pre_attn_scalar**-0.5", "does not read query_pre_attn_scalar"),
        ("self.mlp = LlamaMLP(config)", "self.mlp = LlamaGatedMoe(config)", "no class for GatedMoe"),
    ]:
        tree, text = copied(before, after)
        if "GatedMoe" in after:
            tree.file.write_text(
                text.replace(
                    "class LlamaDecoderLayer", "class LlamaGatedMoe(nn.Module):\n    def forward(self, x):\n        return x\n\n\nclass LlamaDecoderLayer"
                )
            )
            tree = read_tree(tree.file, "LlamaForCausalLM")
        found = delta_of(tree, llama, 1.0, slice_file=slice_file("llama"))
        assert any(reason in row.ours_reason for row in found.unanswered), [r.as_dict() for r in found.rows]


def test_the_donor_is_the_nearest_slice():
    found = delta_list("seed_oss")
    assert found.donor == "llama" and 0.9 < found.similarity < 1 and not found.has_slice and len(found.unanswered) == len(found.rows)
    assert delta_list("mellum").donor == "qwen3_moe" and delta_list("qwen3").donor == "llama"


def test_a_checkpoint_s_own_values_are_compared():
    from labkit.hf import open_source

    rows = {r.delta.method: r.delta for r in delta_list(open_source("tiny:llama?rms_norm_eps=0.01"), "llama").rows}
    assert rows["rms_norm_eps"].line.startswith("config.json:") and "1e-06" in rows["rms_norm_eps"].donor_statement
    assert not {"vocab_size", "hidden_size", "bos_token_id", "architectures"} & set(rows)


def test_an_unknown_type_is_refused_with_a_name_that_exists():
    with pytest.raises(InputError, match="no causal LM of type 'qwen33'"):
        delta_list("qwen33")


def test_torch_is_not_imported():
    code = "import sys; from labkit.port import delta_list; delta_list('gemma2'); print('torch' in sys.modules, 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]


def sound(model_type):
    found = delta_list(model_type)
    assert json.loads(json.dumps(found.as_dict()))["family"] == model_type
    for row in found.rows:
        d = row.delta
        assert d.component in COMPONENTS and d.kind in ("changed", "added", "removed")
        assert bool(d.line) == (d.kind != "removed") and bool(d.donor_line) == (d.kind != "added")
        assert all(source_line(place).strip() for place in (d.line, d.donor_line) if place)


@pytest.mark.parametrize("model_type", ["seed_oss", "olmo2", "deepseek_v3", "mamba2", "gpt-sw3", "exaone"])
def test_other_types(model_type):
    sound(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(causal_lm_classes()))
def test_every_type(model_type):
    sound(model_type)
