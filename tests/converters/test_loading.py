"""Straight from tensors: ties, missing heads, biases, bad weights, and the one fault that coverage cannot see."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from labkit.converters import audit, load_model
from labkit.converters import loading as loading_module
from labkit.converters.filling import state_arrays
from labkit.errors import InputError
from labkit.hf.reference import Reference
from labkit.hf.tensors import TensorTable
from labkit.models import get_family
from labkit.models.mapping import Layout, Rule, RuleTable
from labkit.parity.compare import relative_error

from .conftest import rewritten

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma2"]


def layer_of(config, layer):
    segment, position, index = config.plan.locate(layer)
    return config.plan.parameter_path(segment, position), index


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_layer_lands_in_its_place(tiny, name, dtype):
    source = tiny(name)
    assert audit(source).passed
    model, config, findings = load_model(source, dtype=dtype)
    arrays = state_arrays(model)
    assert not findings and {a.dtype for a in arrays.values()} == {jnp.dtype(dtype)}
    for layer in range(config.plan.num_layers):
        path, index = layer_of(config, layer)
        disk = source.tensors.read(f"model.layers.{layer}.self_attn.q_proj.weight").astype(dtype)
        assert np.array_equal(np.asarray(arrays[f"{path}.self_attn.q_proj.kernel"][index]), disk.T)
    assert np.array_equal(np.asarray(arrays["embed_tokens.embedding"]), source.tensors.read("model.embed_tokens.weight").astype(dtype))


def test_eleven_layers_stay_in_order(tiny):
    source = tiny("llama?num_hidden_layers=11")
    model, _, _ = load_model(source)
    norm = np.asarray(state_arrays(model)["layers.input_layernorm.weight"])
    assert norm.shape[0] == 11
    for layer in range(11):
        assert np.array_equal(norm[layer], source.tensors.read(f"model.layers.{layer}.input_layernorm.weight").astype(np.float32))


def test_experts_with_distinct_constants_stay_in_order(tiny, tmp_path):
    def constants(arrays):
        for name, array in arrays.items():
            if ".experts." in name:
                array[...] = int(name.split(".experts.")[1].split(".")[0]) + 1

    model, config, _ = load_model(rewritten(tiny("qwen3_moe"), tmp_path / "m", constants))
    for path, array in state_arrays(model).items():
        if ".experts." in path:
            per_expert = np.asarray(array).reshape(*array.shape[:2], -1)
            assert np.array_equal(per_expert, np.broadcast_to(np.arange(1, array.shape[1] + 1)[None, :, None], per_expert.shape))


def fused(arrays):
    """The published expert tensors of qwen3_moe in the fused layout of transformers' modules."""
    layers = {name.split(".mlp.")[0] for name in arrays if ".experts." in name}
    for layer in layers:
        take = lambda part: [
            arrays.pop(f"{layer}.mlp.experts.{e}.{part}.weight") for e in range(sum(f"{layer}.mlp.experts." in n and f".{part}." in n for n in arrays))
        ]
        gate, up, down = take("gate_proj"), take("up_proj"), take("down_proj")
        arrays[f"{layer}.mlp.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up)])
        arrays[f"{layer}.mlp.experts.down_proj"] = np.stack(down)


def test_published_and_fused_experts_load_to_identical_models(tiny, tmp_path):
    source = tiny("qwen3_moe")
    other = rewritten(source, tmp_path / "fused", fused)
    one, two = (state_arrays(load_model(s)[0]) for s in (source, other))
    assert one.keys() == two.keys() and all(np.array_equal(one[p], two[p]) for p in one)


def test_half_fused_experts_are_refused_with_both_names(tiny, tmp_path):
    def half(arrays):
        keep = {n: a for n, a in arrays.items() if ".layers.2." not in n}
        fused(arrays)
        for name in [n for n in arrays if ".layers.2." not in n]:
            del arrays[name]
        arrays.update(keep)

    with pytest.raises(InputError, match=r"mixes two layouts of layers.mlp.experts.*gate_proj.weight and .*gate_up_proj"):
        load_model(rewritten(tiny("qwen3_moe"), tmp_path / "m", half))


def embedding_as_head(factor):
    def change(arrays):
        arrays["lm_head.weight"] = (arrays["model.embed_tokens.weight"].astype(np.float32) * factor).astype(arrays["model.embed_tokens.weight"].dtype)

    return change


def test_a_tied_head_absent_equal_or_different(tiny, tmp_path):
    source = tiny("gemma2")
    assert "lm_head.weight" not in source.tensors
    plain, _, findings = load_model(source)
    assert findings == []
    equal, _, findings = load_model(rewritten(source, tmp_path / "equal", embedding_as_head(1)))
    assert [(f["component"], f["cause"]) for f in findings] == [("lm_head.weight", "a tied tensor is on disk as well")]
    assert all(np.array_equal(state_arrays(plain)[p], state_arrays(equal)[p]) for p in state_arrays(plain))


def test_a_tied_head_that_differs_is_a_finding_and_is_used_as_the_reference_uses_it(tiny, tmp_path):
    source = rewritten(tiny("gemma2"), tmp_path / "other", embedding_as_head(2))
    model, config, findings = load_model(source)
    assert [(f["component"], f["cause"]) for f in findings] == [("lm_head.weight", "the tied head on disk differs")]
    assert "values differ" in findings[0]["evidence"] and not config.tie_word_embeddings
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (1, 9))
    want = Reference.load(source.path, "float32").logits(tokens)
    assert relative_error(np.asarray(model(jnp.asarray(tokens, jnp.int32))), want) < 1e-4
    tied = load_model(tiny("gemma2"))[0]
    assert relative_error(np.asarray(tied(jnp.asarray(tokens, jnp.int32))), want) > 1e-2


def test_an_untied_model_without_a_head_is_refused(tiny, tmp_path):
    source = tiny("llama")
    assert source.config.effective["tie_word_embeddings"] is False
    with pytest.raises(InputError, match="lm_head.weight"):
        rewritten(source, tmp_path / "m", lambda arrays: arrays.pop("lm_head.weight"))
    headless = dataclasses.replace(source, tensors=TensorTable({n: i for n, i in source.tensors.items() if n != "lm_head.weight"}))
    with pytest.raises(InputError, match="no tensor lm_head.weight for lm_head.kernel <- lm_head.weight"):
        load_model(headless)


def test_biases_are_loaded_when_the_config_has_them_and_refused_when_not(tiny, tmp_path):
    source = tiny("llama?attention_bias=true&mlp_bias=true")
    model, config, _ = load_model(source)
    disk = source.tensors.read("model.layers.1.self_attn.q_proj.bias").astype(np.float32)
    assert np.abs(disk).max() > 0 and np.array_equal(state_arrays(model)["layers.self_attn.q_proj.bias"][1], disk)
    with pytest.raises(InputError, match=r"model.layers.0.mlp.down_proj.bias .* is read by no rule"):
        load_model(rewritten(source, tmp_path / "m", config=lambda raw: raw.update(mlp_bias=False)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name_and_index(tiny, tmp_path, bad):
    def spoil(arrays):
        arrays["model.layers.2.mlp.up_proj.weight"][3, 4] = bad

    with pytest.raises(InputError, match=rf"model.layers.2.mlp.up_proj.weight .* holds {bad} at index \[3, 4\]"):
        load_model(rewritten(tiny("llama"), tmp_path / "m", spoil))


def test_a_value_that_overflows_the_dtype_is_refused(tiny, tmp_path):
    def large(arrays):
        arrays["model.norm.weight"] = np.full(arrays["model.norm.weight"].shape, 1e6, np.float32)

    source = rewritten(tiny("llama"), tmp_path / "m", large)
    load_model(source, dtype=jnp.float32)
    with pytest.raises(InputError, match="norm.weight is inf"):
        load_model(source, dtype=jnp.float16)


@pytest.mark.parametrize("shape", ["rows", "columns"])
def test_a_shape_that_does_not_fit_is_refused_with_both_shapes_and_the_rule(tiny, tmp_path, shape):
    def reshape(arrays):
        old = arrays["model.embed_tokens.weight"]
        arrays["model.embed_tokens.weight"] = np.concatenate([old, old[:5]]) if shape == "rows" else old.T.copy()

    with pytest.raises(
        InputError, match=r"becomes \(.*\), but embed_tokens.embedding \(.*\) is needed, in embed_tokens.embedding <- model.embed_tokens.weight"
    ):
        load_model(rewritten(tiny("llama"), tmp_path / "m", reshape))


def with_table(monkeypatch, change):
    real = get_family("llama")
    table = lambda config: RuleTable(*(change(e) for e in real.rules(config)))
    monkeypatch.setattr(loading_module, "get_family", lambda name: dataclasses.replace(real, rules=table))


def test_a_missing_transpose_on_a_square_matrix_passes_the_audit_and_fails_against_the_reference(tiny, monkeypatch):
    """Coverage counts names and shapes; only values can tell a square matrix from its transpose."""
    from labkit.hf.reference import Reference

    source = tiny("llama?num_hidden_layers=1&hidden_size=48&num_attention_heads=6&num_key_value_heads=2&head_dim=8")
    tokens = np.arange(3, 40)[None]
    want = Reference.load(source, "float32").logits(tokens)
    error = lambda model: float(np.abs(np.asarray(model(jnp.asarray(tokens))) - want).max() / np.abs(want).max())
    right, _, _ = load_model(source)
    assert error(right) < 1e-5
    with_table(monkeypatch, lambda e: Rule(e.targets, Layout(e.layouts[0].sources)) if isinstance(e, Rule) and e.targets[0].endswith("q_proj.kernel") else e)
    assert audit(source).passed
    wrong, _, _ = load_model(source)
    assert error(wrong) > 1e-2


def test_a_rule_that_leaves_a_part_unfilled_is_caught_by_the_poison(tiny, monkeypatch):
    monkeypatch.setattr(
        loading_module, "write_row", lambda array, index, view: None if index == 1 else array.__setitem__(... if index is None else index, view)
    )
    with pytest.raises(InputError, match=r"is nan at index \[1, 0"):
        load_model(tiny("llama"))


def test_float64_parameters_come_from_the_stored_values(tiny):
    import jax

    with jax.enable_x64(True):
        model, _, _ = load_model(tiny("llama"), dtype=jnp.float64)
        array = state_arrays(model)["norm.weight"]
        assert array.dtype == jnp.float64 and np.array_equal(np.asarray(array), tiny("llama").tensors.read("model.norm.weight").astype(np.float64))


def test_stray_dtypes_are_read(tiny, tmp_path):
    def mix(arrays):
        arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32) + np.float32(1e-6)
        arrays["model.layers.0.mlp.up_proj.weight"] = arrays["model.layers.0.mlp.up_proj.weight"].astype(ml_dtypes.bfloat16)

    source = rewritten(tiny("llama"), tmp_path / "m", mix)
    model, _, _ = load_model(source)
    assert np.array_equal(state_arrays(model)["norm.weight"], source.tensors.read("model.norm.weight"))
