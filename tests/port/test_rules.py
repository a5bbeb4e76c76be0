"""Rules from a parameter list: the in-memory state of any type comes out of what `save_pretrained` wrote, bit for bit, and goes back to it."""

import ast
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.converters.audit import audit_table
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.hf.decoder_types import decoder_only_types
from labkit.hf.quiet import quiet_transformers
from labkit.hf.renames import DiskNames, Fusion, disk_names, meta_model
from labkit.hf.tiny import build_tiny
from labkit.models.mapping import Concat, Each, Interleave, Layout, Transpose
from labkit.port.rules import Parameter, live_rules, memory_names, write_rules
from labkit.port.slice_files import _chooses_bias
from tests.port import toy
from tests.port.identity import identity

QUICK = ("mixtral", "qwen3_moe", "gpt2", "deepseek_v3", "granitemoe", "gpt_oss")
HELD_OUT = json.loads((Path(__file__).parent / "held_out.json").read_text())["types"]
# Keys without which the reference cannot run its own tiny config.
OVERRIDES = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "inkling2_loop_text": {"unpadded_vocab_size": 100},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 5},
}


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


class Saved:
    """A reference in memory and the directory that it wrote."""

    def __init__(self, model_type, folder, overrides=None, seed=0):
        self.model = build_tiny(model_type, OVERRIDES.get(model_type, {}) if overrides is None else overrides, seed)
        with quiet_transformers():
            self.model.save_pretrained(folder)
        self.source = open_source(folder)
        self.tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        self.state = {name: tensor.detach().numpy() for name, tensor in self.model.state_dict().items()}
        self.config = Config(**{**vars(self.model.config), "tie_word_embeddings": bool(self.tied)})
        self.parameters, self.plan, self.shapes, self.rows = identity(self.state, self.tied)

    def text(self):
        pairs = list(self.tied.items())
        return write_rules("some", self.parameters, disk_names(self.model, memory_names(self.parameters, pairs)), tied=pairs)

    def audit(self, text, tensors):
        return audit_table(live_rules("some", text)(self.config), self.plan, self.shapes, {name: array.shape for name, array in tensors.items()})

    def differences(self, text=None, tensors=None):
        """What is not as it was, in words. tensors: what is on disk, where that is not the directory's own."""
        tensors = {name: self.source.tensors.read(name) for name in self.source.tensors} if tensors is None else tensors
        audit = self.audit(text or self.text(), tensors)
        if not audit.passed:
            return audit.problems
        found, seen = [], set()
        for assignment in audit.expansion.assignments:
            for target, array in zip(assignment.targets, assignment.forward(tensors.__getitem__)):
                name = self.rows[target.path][target.index or 0]
                seen.add(name)
                found += [] if equal(array, self.state[name]) else [f"{name} differs in memory"]
            rows = [self.state[self.rows[t.path][t.index or 0]] for t in assignment.targets]
            back = assignment.backward(rows, lambda name: tensors[name].shape)
            found += [f"{name} differs on disk" for name, array in back.items() if not equal(array, tensors[name])]
        return found + [f"{name} is not made" for name in self.state if name not in seen and name not in self.tied]


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(model_type) -> Saved, built once."""
    made = {}

    def get(model_type):
        if model_type not in made:
            made[model_type] = Saved(model_type, tmp_path_factory.mktemp("saved") / model_type)
        return made[model_type]

    return get


@pytest.mark.parametrize("model_type", QUICK)
def test_in_memory_state_and_back(saved, model_type):
    assert not saved(model_type).differences()


@pytest.mark.slow
def test_in_memory_state_and_back_for_every_type(tmp_path):
    """All decoder-only types but those kept apart. Prints what fails and why."""
    failed = {}
    for model_type in decoder_only_types()[0]:
        if model_type not in HELD_OUT:
            try:
                found = Saved(model_type, tmp_path / model_type).differences()
            except InputError as error:
                found = [str(error)]
            if found:
                failed[model_type] = found
                print(f"{model_type}: {found[0]}")
    assert not failed


def test_a_changed_tensor_and_a_lost_rule_are_found(saved):
    mixtral = saved("mixtral")
    tensors = {name: mixtral.source.tensors.read(name) for name in mixtral.source.tensors}
    one, two = (f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight" for e in (0, 1))
    assert set(mixtral.differences(tensors=tensors | {one: tensors[two], two: tensors[one]})) == {
        "model.layers.1.mlp.experts.gate_up_proj differs in memory", f"{one} differs on disk", f"{two} differs on disk"
    }  # fmt: skip
    shorter = mixtral.text().replace('            "self_attn.q_proj.weight",\n', "")
    assert shorter != mixtral.text() and any("q_proj" in problem for problem in mixtral.differences(shorter))


def test_published_spellings_of_the_same_tensors(saved):
    mixtral, gpt2, qwen = saved("mixtral"), saved("gpt2"), saved("qwen3_5_text")
    assert not mixtral.differences(tensors={name: array for name, array in mixtral.state.items()})
    assert mixtral.audit(mixtral.text(), {**mixtral.state, "model.layers.0.block_sparse_moe.gate.weight": np.zeros(3)}).mixed
    bare = {name.removeprefix("transformer."): array for name, array in gpt2.state.items() if name != "lm_head.weight"}
    assert not gpt2.differences(tensors=bare | {"h.0.attn.bias": np.ones(4)})
    assert gpt2.differences(tensors=bare | {"h.0.attn.mask": np.ones(4)}) == ["h.0.attn.mask (4,) is read by no rule"]
    assert not qwen.differences(tensors={name.replace("model.", "model.language_model."): a for name, a in qwen.state.items() if name not in qwen.tied})


@pytest.mark.parametrize(
    "model_type, others",
    [
        ("mixtral", {"num_local_experts": 11, "num_hidden_layers": 12, "num_experts_per_tok": 3}),
        ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [], "num_hidden_layers": 3, "tie_word_embeddings": True}),
    ],
)
def test_one_table_serves_other_configs(saved, tmp_path, model_type, others):
    """What a second config has more, a parameter list from both configs tells; what it has less or in other numbers, the table bears."""
    first, second = saved(model_type), Saved(model_type, tmp_path, others)
    parameters = [*first.parameters, *second.parameters]
    pairs = list((first.tied | second.tied).items())
    text = write_rules("some", parameters, disk_names(first.model, memory_names(parameters, pairs)), tied=pairs)
    assert not first.differences(text) and not second.differences(text)


def test_the_emitted_file_reads_like_a_refined_one():
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    parameters = [Parameter("embed_tokens.embedding", "model.embed_tokens.weight", (9, 4))]
    parameters += [Parameter(f"layers.{n}.kernel", f"model.layers.{{layer}}.{n}.weight", (4, 4), (Transpose(1, 0),)) for n in names]
    parameters += [Parameter("H.layers.{i}.w.kernel", "model.H.layers.{i}.w.weight", (4, 4), (Transpose(1, 0),))]
    tied = [("lm_head.weight", "model.embed_tokens.weight")]
    disk = DiskNames(tuple(Fusion((n,), (n,)) for n in memory_names(parameters, tied)), prefixes=("model.", ""), ignored=(r"rotary\.inv",))
    text = write_rules("x-y", parameters, disk, tied=tied)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 160
    assert (
        """RULES = (
    Rule("embed_tokens.embedding", "model.embed_tokens.weight"),
    *(
        Rule(f"layers.{name}.kernel", Layout(f"model.layers.{{layer}}.{name}.weight", Transpose(1, 0)))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    ),
    Rule("H.layers.{i}.w.kernel", Layout("model.H.layers.{i}.w.weight", Transpose(1, 0))),
)
HEAD = (Rule("lm_head.kernel", Layout("lm_head.weight", Transpose(1, 0))),)
TIED = (Tied("lm_head.weight", to="model.embed_tokens.weight"),)
IGNORED = (Ignored(r"rotary\\.inv", reason="transformers leaves it unread", regex=True),)


def x_y_rules(config) -> RuleTable:
    \"\"\"The rule table of one config.\"\"\"
    return RuleTable(*RULES, *(TIED if config.tie_word_embeddings else HEAD), *IGNORED, optional=True, prefixes=("model.", ""))
"""
        in text
    )
    assert len(live_rules("x-y", text)(Config(tie_word_embeddings=True)).tied) == 1
    assert not live_rules("x-y", text)(Config(tie_word_embeddings=False)).tied


def test_rotary_permutations_are_the_references():
    from transformers.core_model_loading import PermuteForRope

    disk = DiskNames((Fusion(("q.weight",), ("wq.weight",), (("rope", (0,), "to_halves", "num_attention_heads"),)),))
    text = write_rules("some", [Parameter("q.kernel", "q.weight", (12, 5), (Transpose(1, 0),))], disk)
    (rule,) = live_rules("some", text)(Config(num_attention_heads=3)).rules
    weight = np.arange(60.0).reshape(12, 5)
    wanted = PermuteForRope().convert({"wq": torch.from_numpy(weight)}, ["wq"], ["q"], config=Config(num_attention_heads=3))["q"].numpy()
    (made,) = rule.layouts[0].forward([weight])
    assert equal(made.T, wanted) and equal(rule.layouts[0].backward([made], [(12, 5)])[0], weight)


def test_operations_become_steps():
    def layout(operations, memory=("a",), disk=("x",), shapes=((4, 6),), steps=((),)):
        parameters = [Parameter(f"p.{m}", m, s, t) for m, s, t in zip(memory, shapes, steps)]
        (rule,) = live_rules("some", write_rules("some", parameters, DiskNames((Fusion(memory, disk, operations),))))(Config()).rules
        return rule.layouts[0]

    assert layout((("concat", 0),), disk=("x", "y")) == Layout(("x", "y"), Concat(0))
    assert layout((("swap", 0, 1), ("interleave", 1))) == Layout("x", Transpose(1, 0), Interleave(1))
    two = layout((("chunk", 0),), memory=("a", "b"), shapes=((4, 6),) * 2, steps=((Transpose(1, 0),), ()))
    assert two.steps[1] == Each((Transpose(1, 0),), ())
    with pytest.raises(InputError, match="by Magic of transformers, which no exact step says"):
        layout((("unknown", "Magic"),))
    with pytest.raises(InputError, match="no parameter takes b"):
        write_rules("some", [Parameter("p.a", "a", (4,))], DiskNames((Fusion(("a", "b"), ("x",), (("chunk", 0),)),)))
    with pytest.raises(InputError, match="is made from a and from b"):
        write_rules("some", [Parameter("p", "a", (4,)), Parameter("p", "b", (4,))], DiskNames((Fusion(("a",), ("a",)), Fusion(("b",), ("b",)))))
    with pytest.raises(InputError, match="No name on disk is known for b"):
        write_rules("some", [Parameter("p", "b", (4,))], DiskNames(()))


def test_patterns_go_through_transformers_table_like_names(saved):
    model = meta_model(saved("mixtral").model.config.to_dict())
    found = disk_names(model, ["model.layers.{layer}.mlp.experts.down_proj", "model.layers.3.mlp.gate.weight"])
    block = "block_sparse_moe"
    assert [f.disk for f in found.fusions] == [(f"model.layers.{{layer}}.{block}.experts.{{expert}}.w2.weight",), (f"model.layers.3.{block}.gate.weight",)]


@pytest.mark.parametrize(("attribute", "wanted"), [("chosen", True), ("either", True), ("never", False), ("always", False), ("absent", False)])
def test_a_bias_that_the_config_chooses_has_a_rule_whether_or_not_a_run_showed_it(tmp_path, attribute, wanted):
    text = f"""
        from torch import nn

        class Attn(nn.Module):
            def __init__(self, config):
                self.chosen = nn.Linear(4, 4, bias=config.attention_bias)
                self.either = nn.Linear(4, 4, bias=config.attention_bias) if config.rank else None
                self.never = nn.Linear(4, 4, bias=False)
                self.always = nn.Linear(4, 4)

        class {toy.ENTRY}(nn.Module):
            def forward(self, input_ids):
                return input_ids
    """
    context = types.SimpleNamespace(program=toy.program(tmp_path, text))
    assert _chooses_bias(context, {"layers.0.attn": f"{toy.FILE}::Attn"}, f"layers.0.attn.{attribute}") is wanted
    assert not _chooses_bias(context, {}, f"layers.0.attn.{attribute}") and not _chooses_bias(context, {"attn": "external::Sequential"}, "attn.0")
