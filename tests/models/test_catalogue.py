"""What goes wrong when people port causal LMs: every row of the public-reports catalogue on config discovery (A) and on layer maths (D) as a test, by its id.

`EXACT`: small models that show the row, each equal to the reference in float64. `ELSEWHERE`: rows that are about discovery, measures or verdicts, and the test
that stands for them. The other rows have a function of their own here.
"""

import contextlib
import importlib
import json

import jax
import numpy as np
import pytest

from labkit.hf.altered import altered_directory
from labkit.hf.config import HFConfig
from labkit.hf.decoder_pattern import pattern_of
from labkit.hf.source import open_source
from labkit.hf.tiny import parse_tiny
from labkit.models import refined_families
from labkit.parity.compare import kl_per_position, relative_error
from labkit.parity.perturb_subject import Subject
from labkit.port.slices import ensure_slice

LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=16)
QUARTER = dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.25)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3, 1.4], long_factor=[4.0, 6.0, 9.0, 12.0, 20.0])
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


def tiny(model_type: str, **values) -> str:
    return f"tiny:{model_type}?" + "&".join(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in values.items())


EXACT = {
    "A4": [tiny("mistral", head_dim=None, sliding_window=None)],
    "A5": [tiny(kind, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=size) for kind in ("llama", "qwen3") for size in (16, 4)],
    "A7": [
        tiny("qwen3", num_hidden_layers=4, sliding_window=3, use_sliding_window=False),
        tiny("qwen3", num_hidden_layers=4, sliding_window=3, use_sliding_window=True, max_window_layers=28),
        tiny("qwen3", num_hidden_layers=4, sliding_window=3, use_sliding_window=True, max_window_layers=2),
        tiny("qwen2", num_hidden_layers=4, sliding_window=3, use_sliding_window=True, max_window_layers=2),
    ],
    "A8": [
        tiny("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
        tiny("smollm3", num_hidden_layers=4, no_rope_layers=None, no_rope_layer_interval=4),
        tiny("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1]),
    ],
    "A10": [tiny("gemma2", hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=12)],
    "A11": [tiny("gemma", hidden_act=name) for name in ("gelu", "gelu_pytorch_tanh")],
    "D1": [
        tiny("gpt_neox", num_attention_heads=4, hidden_size=64, rope_parameters=QUARTER),
        tiny("glm4", head_dim=16, rope_parameters=QUARTER),
        tiny("phi3", hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=QUARTER),
    ],
    "D2": [
        tiny("deepseek_v3", rope_parameters={**YARN, **scales})
        for scales in ({"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0, "mscale_all_dim": 0.0}, {})
    ],
    "D4": [tiny("llama", rope_parameters=LLAMA3)],
    "D5": [
        tiny("gemma3_text", num_hidden_layers=7, layer_types=(["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]), rope_parameters=GEMMA3)
    ],
    "D7": [
        tiny("llama"),
        tiny("cohere"),
        tiny("deepseek_v3", rope_interleave=True),
        tiny("deepseek_v3", rope_interleave=False),
        tiny("gptj"),
    ],
    "D10": [tiny("gemma2", attn_logit_softcapping=1.0, final_logit_softcapping=2.0)],
    "D13": [
        tiny("granite", embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.5, logits_scaling=6.0),
        tiny("minicpm3", scale_emb=12, scale_depth=1.4, dim_model_base=18),
    ],
    "D14": [tiny("cohere"), tiny("cohere2", num_hidden_layers=5, sliding_window=3)],
    "D16": [tiny("qwen3_moe", norm_topk_prob=value, num_experts=6, num_experts_per_tok=2) for value in (True, False)]
    + [tiny("qwen2_moe", norm_topk_prob=value, num_experts=6, num_experts_per_tok=2) for value in (True, False)]
    + [tiny("mixtral", num_local_experts=6, num_experts_per_tok=2), tiny("olmoe", norm_topk_prob=False)],
    "D18": [tiny("deepseek_v3", norm_topk_prob=value, routed_scaling_factor=2.5, n_shared_experts=shared) for value in (True, False) for shared in (1, 2)]
    + [tiny("glm4_moe", norm_topk_prob=value, routed_scaling_factor=2.5) for value in (True, False)],
    "D21": [tiny("llama4_text", attention_chunk_size=4, floor_scale=4, attn_temperature_tuning=True)],
}

ELSEWHERE = {
    "A2": ("tests.hf.test_config", "test_rope_spellings_agree"),
    "A3": ("tests.hf.test_config", "test_contradicting_spellings"),
    "A9": ("tests.hf.test_source", "test_an_untied_model_without_a_head"),
    "A13": ("tests.hf.test_config", "test_rope_spellings_agree"),
    "D20": ("tests.parity.test_verdicts", "test_bfloat16_is_held_to_the_references_own_error"),
    "D22": ("tests.parity.test_components", None),
    "D24": ("tests.parity.test_verdicts", "test_float32_is_refused_at_another_precision"),
    "D25": ("tests.parity.test_compare", "test_kl_ignores_a_constant_and_is_never_negative"),
    "D26": ("tests.parity.test_verdicts", "test_a_split_within_the_noise_is_a_tie_and_beyond_it_fails"),
    "D27": ("tests.parity.test_diagnose", "test_seeded_faults_are_named"),
    "D30": ("tests.parity.test_verdicts", "test_bfloat16_is_held_to_the_references_own_error"),
}
HERE = {"A1", "D3", "D9", "D12", "D15", "D17", "D19", "D23"}
ROWS = {f"A{n}" for n in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13)} | {f"D{n}" for n in (*range(1, 6), 7, 9, 10, *range(12, 28), 30)}


@contextlib.contextmanager
def attacked(name: str, **changed):
    """A `Subject` on a tiny model, or on one with tensors changed: `changes` of (name -> array)."""
    model_type = parse_tiny(name)[0]
    ensure_slice(model_type).require()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), Subject(name, **changed) as subject:
        yield subject


def with_tensors(name: str, change, folder):
    """The tiny model with tensors changed, as another source: change(tensor name, array) -> the array or another."""
    source = open_source(name)
    arrays = {key: np.asarray(source.tensors.read(key)) for key in source.tensors}
    changed = {key: new for key, array in arrays.items() if (new := change(key, array)) is not array}
    assert changed
    ensure_slice(source.config.model_type).require()
    return open_source(str(altered_directory(source.path, folder / "changed", tensors=changed)))


@contextlib.contextmanager
def changed_model(name: str, change, folder):
    source = with_tensors(name, change, folder)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), Subject(source) as subject:
        yield subject


def quick(name: str) -> bool:
    """Refined slices need no translation."""
    return parse_tiny(name)[0] in refined_families()


CASES = [
    pytest.param(parse_tiny(name)[0], name, id=f"{row}-{number}-{parse_tiny(name)[0]}", marks=() if quick(name) and number in (0, 2) else pytest.mark.slow)
    for row, names in EXACT.items()
    for number, name in enumerate(names)
]


def test_every_row_is_a_test():
    assert ROWS == set(EXACT) | set(ELSEWHERE) | HERE
    for row in HERE:
        assert any(name.startswith(f"test_{row}_") for name in globals()), row
    for module, function in ELSEWHERE.values():
        assert function is None or hasattr(importlib.import_module(module), function), (module, function)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_exact(family, name):
    with attacked(name) as subject:
        assert subject.base_error <= 1e-9


def test_A1_both_spellings_of_a_rope_table_are_one_model(tmp_path):
    """`rope_parameters` alone, and `rope_theta` with `rope_scaling`: equal effective configs. Export hands config.json back as it was."""
    source = open_source(tiny("llama", rope_parameters={**LLAMA3, "original_max_position_embeddings": 64, "factor": 8.0}))
    raw = json.loads((source.path / "config.json").read_text())
    table = raw.pop("rope_parameters")
    old = {**raw, "rope_theta": table.pop("rope_theta"), "rope_scaling": table}
    assert HFConfig(old, tmp_path / "config.json").effective == source.config.effective
    assert HFConfig({**old, "rope_theta": 10000.0}, tmp_path / "config.json").effective != source.config.effective
    from labkit.converters import convert, export

    convert(source, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (source.path / "config.json").read_bytes()


def test_A7_windows_are_on_the_layers_that_have_them():
    tables = [pattern_of(open_source(name).config.described).windows for name in EXACT["A7"][:3]]
    assert tables == [(None,) * 4, (None,) * 4, (None, None, 3, 3)]


@pytest.mark.slow
def test_A8_the_interval_means_the_list():
    """`no_rope_layers` holds 1 for layers that rotate: [1, 1, 1, 0] and an interval of 4 are one model, [1, 0, 1, 1] another."""
    logits = []
    for name in EXACT["A8"]:
        with attacked(name) as subject:
            logits.append(subject.plain_ours)
    assert relative_error(logits[0], logits[1]) <= 1e-12 < 1e-6 < relative_error(logits[2], logits[1])


@pytest.mark.slow
@pytest.mark.parametrize("length", [6, 8, 9, 12])
def test_D3_longrope_takes_the_table_of_the_length(length):
    table = {**LONG, "original_max_position_embeddings": 8}
    with attacked(tiny("phi3", hidden_size=60, num_attention_heads=6, head_dim=10, rope_parameters=table, max_position_embeddings=64)) as subject:
        tokens = subject.tokens[:, :length]
        assert relative_error(subject.ours(tokens), subject.theirs(tokens)) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("around", [0.0, 1.0])
def test_D9_norm_weights_near_0_and_near_1(kind, around, tmp_path):
    """A unit offset that is missing, or applied twice, shows at one of the two."""
    rng = np.random.default_rng(0)

    def change(key, array):
        return (around + 0.05 * rng.standard_normal(array.shape)).astype(array.dtype) if "norm" in key else array

    with changed_model(tiny(kind), change, tmp_path) as subject:
        assert subject.base_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind, key, neutral", [("granite", "logits_scaling", 1.0), ("cohere", "logit_scale", 1.0), ("minicpm3", "dim_model_base", 72)])
def test_D12_a_scale_of_the_logits_is_not_seen_by_argmax(kind, key, neutral):
    """The control: without the scale every first choice agrees, KL is large, and the exact comparison fails."""
    with attacked(tiny(kind, **({"dim_model_base": 9} if kind == "minicpm3" else {}))) as subject:
        assert subject.base_error <= 1e-9
        model, _ = subject.load_ours(subject.variant(config={key: neutral}))
        wrong = subject.ours(model=model)
        assert np.array_equal(wrong.argmax(-1), subject.plain_theirs.argmax(-1))
        assert relative_error(wrong, subject.plain_theirs) > 0.1 and kl_per_position(wrong, subject.plain_theirs).max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("olmo2", marks=pytest.mark.slow), pytest.param("olmoe", marks=pytest.mark.slow)])
def test_D15_query_norms_are_per_head_or_over_all_heads(kind):
    with attacked(tiny(kind)) as subject:
        size = open_source(tiny(kind)).tensors["model.layers.0.self_attn.q_norm.weight"].shape[0]
        config = subject.source.config.effective
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        assert size == (head_dim if kind == "qwen3" else head_dim * config["num_attention_heads"])
        assert subject.base_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_D17_a_correction_bias_selects_and_does_not_weigh(kind, tmp_path):
    def change(key, array):
        return array + np.eye(array.shape[0], dtype=array.dtype)[3] * 12 if key.endswith("e_score_correction_bias") else array

    with changed_model(tiny(kind, n_group=2, topk_group=1), change, tmp_path) as subject:
        assert subject.base_error <= 1e-9
        with attacked(tiny(kind, n_group=2, topk_group=1)) as plain:
            assert relative_error(subject.plain_ours, plain.plain_ours) > 1e-3


@pytest.mark.slow
def test_D19_a_shared_expert_and_its_gate(tmp_path):
    def change(key, array):
        return array * 5 if "shared_expert_gate" in key else array

    with changed_model(tiny("qwen2_moe"), change, tmp_path) as subject:
        config = subject.source.config.effective
        assert config["shared_expert_intermediate_size"] != config["moe_intermediate_size"]
        assert subject.base_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_D23_every_token_to_the_same_experts(kind, tmp_path):
    """Dropless: no token is lost where all of a batch go to three experts."""

    def change(key, array):
        return np.where(np.arange(array.shape[0]) < 3, 50.0, 0.0).astype(array.dtype) if key.endswith("e_score_correction_bias") else array

    with changed_model(tiny(kind, n_group=1, topk_group=1), change, tmp_path) as subject:
        assert subject.base_error <= 1e-9
