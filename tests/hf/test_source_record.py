"""What running instrumented modeling files of the installed transformers records."""

import ast
import sys

import numpy as np
import pytest

from labkit.errors import InputError
from labkit.hf.architectures import transformers_folder
from labkit.hf.instrument import position_key
from labkit.hf.instrumented import instrumented_models
from labkit.hf.observer import Observer
from labkit.hf.reference import Reference
from labkit.hf.source_record import SourceRecord, main, record_sources, record_sources_here
from labkit.hf.threads import one_thread
from labkit.hf.tiny import tiny_directory

FILE = "models/qwen3_moe/modeling_qwen3_moe.py"


@pytest.fixture(scope="module")
def record():
    return record_sources(["tiny:qwen3_moe?num_hidden_layers=2", "tiny:qwen3_moe?num_hidden_layers=2&norm_topk_prob=false"])


@pytest.fixture(scope="module")
def find():
    """find(table, text, scope): what a table holds for the first expression of a function that unparses to `text`."""
    tree = ast.parse((transformers_folder() / FILE).read_text())
    functions = {
        f"{outer.name}.{inner.name}": inner
        for outer in tree.body
        if isinstance(outer, ast.ClassDef)
        for inner in outer.body
        if hasattr(inner, "body") and hasattr(inner, "name")
    }

    def look(table, scope, text):
        node = next(node for node in ast.walk(functions[scope]) if isinstance(node, (ast.expr, ast.arg)) and ast.unparse(node) == text)
        return table[FILE].get(position_key(node))

    return look


def test_nodes(record, find):
    forward = "Qwen3MoeExperts.forward"
    assert find(record.nodes, forward, "self.gate_up_proj") == ["param:f:3"]
    assert find(record.nodes, forward, "top_k_index: torch.Tensor") == ["array:i:2"]
    assert find(record.nodes, forward, "torch.where(expert_mask[expert_idx])") == ["tuple"]
    assert find(record.nodes, forward, "top_k_pos") == ["array:i:1"]
    assert find(record.nodes, "Qwen3MoeRotaryEmbedding.forward", "self.inv_freq") == ["buffer:f:1"]
    assert find(record.nodes, "Qwen3MoeAttention.forward", "cache: Cache | None") == ["cache", "none"]


def test_tests_and_constants_unite_models(record, find):
    assert find(record.tests, "Qwen3MoeTopKRouter.forward", "self.norm_topk_prob") == [False, True]
    assert find(record.constants, "Qwen3MoeTopKRouter.forward", "self.norm_topk_prob") is None
    assert find(record.constants, "Qwen3MoeTopKRouter.forward", "self.top_k") == 3


def test_callees(record, find):
    assert find(record.callees, "Qwen3MoeDecoderLayer.forward", "self.mlp(hidden_states)") == [
        f"{FILE}::Qwen3MoeMLP.forward",
        f"{FILE}::Qwen3MoeSparseMoeBlock.forward",
    ]
    assert find(record.callees, "Qwen3MoeMLP.forward", "self.gate_proj(x)") == ["external::torch.nn.modules.linear.Linear.forward"]
    assert find(record.callees, "Qwen3MoeForCausalLM.__init__", "Qwen3MoeModel(config)") == [f"{FILE}::Qwen3MoeModel"]
    assert record.functions[FILE]["load_balancing_loss_func"] == 0
    assert record.functions[FILE]["Qwen3MoeAttention.forward"] == 2 * 2 * (1 + 4 + 1)


def test_attributes_state_and_notes(record):
    experts = record.attributes[f"{FILE}::Qwen3MoeExperts"]
    assert experts["gate_up_proj"]["tensors"] == [[model, "param", True, "float64", [8, 80, 72]] for model in (0, 1)]
    assert record.attributes[f"{FILE}::Qwen3MoeRotaryEmbedding"]["inv_freq"]["tensors"][0][:3] == [0, "buffer", False]
    assert record.attributes[f"{FILE}::Qwen3MoeAttention"]["layer_idx"]["values"] == [0, 1]
    assert record.modules[0]["model.layers.0.self_attn"] == f"{FILE}::Qwen3MoeAttention"
    assert record.state[1]["lm_head.weight"] == ["float64", [131, 72]]
    assert record.config[1]["norm_topk_prob"] is False
    assert record.notes == []
    assert SourceRecord.from_json(record.to_json()) == SourceRecord.from_json(SourceRecord.from_json(record.to_json()).to_json())


def test_the_copy_gives_the_reference_s_logits_to_the_bit_and_leaves_no_trace():
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    directory = tiny_directory("tiny:llama")
    tokens = np.arange(48).reshape(2, 24)
    own = Reference.load(directory)
    with one_thread():
        module, expected = sys.modules[type(own.model).__module__], own.logits(tokens)
    observer = Observer()
    with one_thread(), instrumented_models(observer):
        copy = Reference.load(directory, verify=False)
        assert type(copy.model) is not type(own.model)
        assert np.array_equal(copy.logits(tokens), expected)
    assert observer.tables()["functions"]["models/llama/modeling_llama.py"]["LlamaAttention.forward"] == 5
    assert sys.modules[type(own.model).__module__] is module
    again = Reference.load(directory, verify=False).model
    assert type(again) is LlamaForCausalLM is type(own.model)
    assert isinstance(again, AutoModelForCausalLM._model_mapping[type(again.config)])


def test_a_directory_that_is_no_model_is_refused_through_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main([str(tmp_path / "out.json"), str(tmp_path)]) == 0
    with pytest.raises(InputError, match="cannot load the reference"):
        SourceRecord.from_json((tmp_path / "out.json").read_text())
    with pytest.raises(InputError):
        record_sources_here([])


def test_tensors_made_in_the_default_dtype_are_told_from_those_that_ask_for_one():
    record = record_sources_here(["tiny:xglm?num_layers=1"])
    table = record.attributes["models/xglm/modeling_xglm.py::XGLMSinusoidalPositionalEmbedding"]["weights"]
    assert table["narrow"] is True
    record = record_sources_here(["tiny:llama?num_hidden_layers=1"])
    assert record.attributes["models/llama/modeling_llama.py::LlamaRotaryEmbedding"]["inv_freq"]["narrow"] is False
