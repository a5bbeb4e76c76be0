"""The reference: exact means float64 throughout, loaded means loaded to the bit, recorded means every module and no trace left."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.errors import InputError
from labkit.hf.exact import exact_mode
from labkit.hf.recording import modeling_modules
from labkit.hf.reference import Reference, _compare_with_disk
from labkit.hf.source import open_source

TOKENS = np.random.default_rng(0).integers(3, 100, (2, 14))


@pytest.fixture(scope="module")
def llama():
    return open_source("tiny:llama?num_hidden_layers=2").path


@pytest.fixture(scope="module")
def mixture():
    return open_source("tiny:qwen3_moe?num_hidden_layers=2").path


@pytest.fixture(scope="module")
def exact(llama):
    return Reference.load(llama, "exact")


def changed(path, out, change=None, **config):
    """A copy of a checkpoint with other tensors or config values."""
    shutil.copytree(path, out)
    tensors = load_file(out / "model.safetensors")
    if change is not None:
        tensors = change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps(values))
    return out


def test_exact_mode_lifts_upcasts_and_cleans_up():
    narrow = torch.ones(2, dtype=torch.float64)
    with exact_mode():
        assert narrow.float().dtype is narrow.to(torch.float32).dtype is torch.zeros(1).dtype is torch.float64
        assert torch.softmax(narrow, 0, dtype=torch.float32).dtype is torch.float64
        assert torch.arange(3, dtype=torch.int64).float().dtype is torch.float64
    with pytest.raises(ZeroDivisionError), exact_mode():
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float32 and narrow.float().dtype is torch.float32


@pytest.mark.parametrize("which", ["llama", "mixture"])
def test_weights_are_the_stored_ones_to_the_bit(which, request, tmp_path):
    path = changed(request.getfixturevalue(which), tmp_path / "bf16", lambda tensors: {n: t.to(torch.bfloat16) for n, t in tensors.items()})
    reference = Reference.load(path, "exact")
    assert reference.findings == [] and all(p.dtype is torch.float64 for p in reference.model.parameters())
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(reference.model.get_input_embeddings().weight, stored.double())
    frequencies = reference.model.model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float64 and not torch.equal(frequencies, frequencies.float().double())


def test_a_weight_that_differs_from_the_file_is_named(mixture):
    reference = Reference.load(mixture, "exact")
    assert _compare_with_disk(reference.model, mixture) == []
    with torch.no_grad():
        reference.model.model.layers[0].mlp.experts.gate_up_proj[3, 1, 2] += 1e-9
    with pytest.raises(InputError, match=r"experts\.3\.gate_proj\.weight"):
        _compare_with_disk(reference.model, mixture)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which,name", [("llama", "model.layers.1.mlp.up_proj.weight"), ("mixture", "model.layers.0.mlp.experts.2.up_proj.weight")])
def test_a_stored_nan_or_infinity_is_named_and_not_another_layout(which, name, value, request, tmp_path, refused):
    def spoil(tensors):
        tensors[name][3, 4] = value
        return tensors

    path = changed(request.getfixturevalue(which), tmp_path / "spoilt", spoil)
    said = refused(lambda: Reference.load(path, "exact"), name, f"holds {value} at index [3, 4]")
    assert "layout" not in said
    from labkit.converters import load_model

    assert refused(lambda: load_model(open_source(path)), f"holds {value} at index [3, 4]") == said  # `convert` says the same
    assert Reference.load(request.getfixturevalue(which), "exact").findings == []  # control: the same checkpoint without it


def test_upcasts_in_float32_would_spoil_a_float64_model(exact):
    tokens = torch.from_numpy(TOKENS)
    wanted = exact.logits(TOKENS)
    with torch.no_grad():
        spoilt = exact.model(tokens, use_cache=False).logits.numpy()
    assert np.abs(spoilt - wanted).max() / np.abs(wanted).max() > 1e-9
    assert np.array_equal(exact.logits(TOKENS), wanted)


def test_modes_agree_within_their_precision(llama, exact):
    wanted = exact.logits(TOKENS)
    assert wanted.dtype == np.float64
    for mode, limit in (("float32", 1e-5), ("bfloat16", 0.2)):
        logits = Reference.load(llama, mode).logits(TOKENS)
        error = np.abs(logits - wanted).max() / np.abs(wanted).max()
        assert logits.dtype == np.float32 and 1e-9 < error < limit


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    "change, words",
    [
        (without("model.layers.1.mlp.up_proj.weight"), "lacks: model.layers.1.mlp.up_proj.weight"),
        (without("lm_head.weight"), "lacks: lm_head.weight"),
        (lambda tensors: tensors | {"model.layers.1.self_attn.extra.weight": torch.ones(2)}, "does not use: model.layers.1.self_attn.extra.weight"),
        (lambda tensors: tensors | {"model.norm.weight": torch.ones(3)}, "another shape than the reference's: model.norm.weight"),
    ],
)
def test_a_false_oracle_is_refused(llama, tmp_path, change, words):
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        Reference.load(changed(llama, tmp_path / "m", change), "float32")


def test_unknown_modes_and_bad_tokens_are_refused(llama, exact):
    with pytest.raises(InputError, match="unknown reference mode"):
        Reference.load(llama, "float16")
    for tokens in (np.zeros((2, 0), int), np.full((1, 3), 10**6), np.full((1, 3), -1), np.zeros(4, int), np.zeros((1, 4))):
        with pytest.raises(InputError):
            exact.logits(tokens)


def test_infinite_logits_are_refused(llama, tmp_path):
    huge = lambda weight: weight / weight.abs().max() * 3e38  # finite each, and beyond float32 once added up
    path = changed(llama, tmp_path / "m", lambda tensors: tensors | {"lm_head.weight": huge(tensors["lm_head.weight"])})
    with pytest.raises(InputError, match="not finite"):
        Reference.load(path, "float32").logits(TOKENS)


def test_a_tied_head_absent_equal_or_different(tmp_path):
    path = open_source("tiny:llama?num_hidden_layers=1&tie_word_embeddings=true").path
    reference = Reference.load(path, "float32")
    wanted = reference.logits(TOKENS)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    equal = Reference.load(changed(path, tmp_path / "equal", lambda tensors: tensors | {"lm_head.weight": embedding.clone()}), "float32")
    assert np.array_equal(equal.logits(TOKENS), wanted) and equal.findings == reference.findings == []
    different = Reference.load(changed(path, tmp_path / "different", lambda tensors: tensors | {"lm_head.weight": embedding + 1}), "float32")
    assert len(different.findings) == 1 and "runs with the stored head" in different.findings[0]
    assert not np.allclose(different.logits(TOKENS), wanted)


def test_greedy_ignores_penalties_stop_tokens_and_sampling(llama, tmp_path):
    plain = Reference.load(llama, "float32").greedy(TOKENS[:1], 9)
    path = changed(llama, tmp_path / "m")
    settings = {"repetition_penalty": 5.0, "eos_token_id": plain[0, 14:].tolist(), "do_sample": True, "temperature": 9.0, "no_repeat_ngram_size": 1}
    (path / "generation_config.json").write_text(json.dumps(settings))
    reference = Reference.load(path, "float32")
    tokens, trace = reference.greedy_trace(TOKENS[:1], 9)
    assert np.array_equal(tokens, plain) and tokens.shape == (1, 23) and trace.shape[0] == 9
    assert np.array_equal(trace.argmax(-1), tokens[0, 14:])
    stepwise = TOKENS[:1]
    for _ in range(9):
        stepwise = np.concatenate([stepwise, reference.logits(stepwise)[:, -1:].argmax(-1)], 1)
    assert np.array_equal(stepwise, plain)
    with pytest.raises(InputError, match="one row"):
        reference.greedy(TOKENS, 3)


def test_capture_records_every_module_and_leaves_no_hook(exact):
    modules = modeling_modules(exact.model)
    before = [dict(vars(module)) for module in modules]
    capture = exact.capture(TOKENS)
    assert np.array_equal(capture.outputs["logits"], exact.logits(TOKENS)) and np.array_equal(capture.outputs["lm_head"], capture.outputs["logits"])
    assert capture.silent == [] and set(capture.fires.values()) == {1} and capture.weighted <= set(capture.outputs)
    assert np.array_equal(capture.inputs["layers.1"], capture.outputs["layers.0"])
    assert np.array_equal(capture.inputs["embed_tokens"], TOKENS)
    heads = capture.outputs["layers.0.self_attn.q_rope"]
    assert heads.shape == (2, 14, 6, 10) and capture.outputs["layers.0.self_attn.k_rope"].shape == (2, 14, 2, 10)
    assert capture.outputs["layers.0.self_attn.attn"].reshape(2, 14, -1).tolist() == capture.inputs["layers.0.self_attn.o_proj"].tolist()
    # The rotation leaves position 0 as it is and changes later ones.
    assert np.array_equal(heads[:, 0], capture.inputs["layers.0.self_attn.q_rope"][:, 0])
    assert not np.allclose(heads[:, 1:], capture.inputs["layers.0.self_attn.q_rope"][:, 1:])
    with pytest.raises(RuntimeError):
        from labkit.hf.recording import recording

        with recording(exact.model):
            raise RuntimeError
    assert before == [dict(vars(module)) for module in modules]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in exact.model.modules())


def test_capture_of_a_mixture_has_logits_choice_and_weights(mixture):
    capture = Reference.load(mixture, "exact").capture(TOKENS)
    logits, indices, weights = (capture.outputs[f"layers.0.mlp.gate{end}"] for end in ("", ".indices", ".weights"))
    assert logits.shape == (28, 8) and indices.shape == weights.shape == (28, 3)
    assert np.array_equal(np.sort(np.argsort(-logits)[:, :3]), np.sort(indices)) and np.allclose(weights.sum(-1), 1, atol=1e-12)


def test_left_padding_is_masked(exact):
    padded, mask = np.concatenate([np.full((2, 3), 5), TOKENS], 1), np.repeat([[0] * 3 + [1] * 14], 2, 0)
    wanted = exact.logits(TOKENS)
    assert np.abs(exact.logits(padded, mask)[:, 3:] - wanted).max() / np.abs(wanted).max() < 1e-12
    assert np.abs(exact.logits(padded)[:, 3:] - wanted).max() / np.abs(wanted).max() > 1e-3
    with pytest.raises(InputError, match="does not fit"):
        exact.logits(TOKENS, mask)
