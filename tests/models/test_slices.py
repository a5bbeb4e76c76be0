"""Every refined slice: exact against the installed reference, scan and loop, cache, padding, packing, remat, and what its call must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from labkit.converters import load_model
from labkit.hf import open_source
from labkit.hf.reference import Reference
from labkit.layers.flops import visible_pairs
from labkit.models import get_family, refined_families
from labkit.parity.compare import relative_error

MODELS = {
    "llama": "tiny:llama?num_hidden_layers=3",
    "qwen3": "tiny:qwen3?num_hidden_layers=3&use_sliding_window=true&sliding_window=5&max_window_layers=2",
    "qwen3_moe": "tiny:qwen3_moe?num_hidden_layers=3&mlp_only_layers=[0]",
    "gemma2": "tiny:gemma2?num_hidden_layers=3",
}
VARIANTS = [
    'tiny:llama?attention_bias=true&mlp_bias=true&tie_word_embeddings=true&rope_parameters={"rope_type":"llama3","rope_theta":500.0,"factor":8.0,'
    '"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":16}',
    "tiny:qwen3_moe?norm_topk_prob=true&decoder_sparse_step=2",
    "tiny:qwen3?tie_word_embeddings=true&attention_bias=true",
    "tiny:gemma2?attn_logit_softcapping=null&tie_word_embeddings=false",
]
LENGTH = 33


@functools.cache
def prepared(name):
    """(model in float64, config, tokens [2, LENGTH], reference logits)."""
    source = open_source(name)
    with jax.enable_x64(True):
        model, config, _ = load_model(source, dtype=jnp.float64)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    return model, config, tokens, Reference.load(source.path, "exact").logits(tokens)


@functools.partial(jax.jit, static_argnames=("graphdef", "scan", "remat"))
def compiled(graphdef, state, tokens, segment_ids, cache, scan, remat):
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache, scan=scan, remat=remat)


def run(graphdef, state, tokens, segment_ids=None, cache=None, *, scan=True, remat=None):
    """One compiled program per length: segments are always given."""
    segment_ids = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids, np.int32)
    return compiled(graphdef, state, tokens, segment_ids, cache, scan, remat)


@pytest.fixture(params=sorted(MODELS))
def case(request):
    model, config, tokens, want = prepared(MODELS[request.param])
    with jax.enable_x64(True):
        yield (*nnx.split(model), config, tokens, want)


def case_name(case):
    return type(case[2]).__module__.split(".")[2]


def test_every_refined_family_is_tested_here():
    assert sorted(MODELS) == refined_families()


@pytest.mark.parametrize("name", [VARIANTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS[1:])])
def test_variant_is_exact(name):
    model, _, tokens, want = prepared(name)
    with jax.enable_x64(True):
        assert relative_error(np.asarray(run(*nnx.split(model), tokens)), want) <= 1e-9


def test_scan_and_loop_are_exact(case):
    graphdef, state, _, tokens, want = case
    for scan in (True, False):
        assert relative_error(np.asarray(run(graphdef, state, tokens, scan=scan)), want) <= 1e-9


def test_a_changed_weight_is_noticed(case):
    """Control: one norm weight of the last layer, off by a thousandth."""
    graphdef, state, _, tokens, want = case
    flat = nnx.to_flat_state(state)
    path, leaf = next((p, v) for p, v in flat if "post_attention_layernorm" in map(str, p))
    value = leaf.get_raw_value()
    changed = [(p, v.replace(value.at[-1, 0].multiply(1.001)) if p == path else v) for p, v in flat]
    assert relative_error(np.asarray(run(graphdef, nnx.from_flat_state(changed), tokens)), want) > 1e-7


def test_cache_padding_and_packing(case):
    graphdef, state, config, tokens, want = case
    model = nnx.merge(graphdef, state)
    padded = np.concatenate([np.zeros((2, 4), np.int32), tokens[:, :-4]], 1)
    segments = np.concatenate([np.zeros((2, 4), np.int32), np.ones((2, LENGTH - 4), np.int32)], 1)
    plain, shifted = np.asarray(run(graphdef, state, tokens)), np.asarray(run(graphdef, state, padded, segments))
    assert relative_error(shifted[:, 4:], plain[:, :-4]) <= 1e-12
    for feed, ids in ((tokens, None), (padded, segments)):
        full = plain if ids is None else shifted
        cache, parts, start = model.init_cache(2, LENGTH + 3), [], 0
        for piece in (11, 11, *[1] * 11):
            logits, cache = run(graphdef, state, feed[:, start : start + piece], None if ids is None else ids[:, start : start + piece], cache)
            parts.append(np.asarray(logits))
            start += piece
        kept = slice(0 if ids is None else 4, None)
        assert relative_error(np.concatenate(parts, 1)[:, kept], full[:, kept]) <= 1e-12
    packed = np.asarray(run(graphdef, state, np.concatenate([tokens[:, :12], tokens[:, :21]], 1), np.repeat([[1] * 12 + [2] * 21], 2, 0)))
    assert relative_error(packed[:, :12], plain[:, :12]) <= 1e-12 and relative_error(packed[:, 12:], plain[:, :21]) <= 1e-12


def test_remat_changes_nothing(case):
    graphdef, state, _, tokens, _ = case
    policy = dict(zip(sorted(MODELS), ("full", "dots", "attention", "full")))[case_name(case)]
    plain = np.asarray(run(graphdef, state, tokens))
    assert relative_error(np.asarray(run(graphdef, state, tokens, remat=policy)), plain) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "dots", "attention"])
def test_remat_changes_no_gradient(case, policy):
    graphdef, state, _, tokens, _ = case

    def gradients(remat):
        return jax.jit(jax.grad(lambda state: jnp.sin(nnx.merge(graphdef, state)(tokens[:, :9], remat=remat)).sum()))(state)

    for a, b in zip(jax.tree.leaves(gradients(policy)), jax.tree.leaves(gradients(None))):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-12


def test_a_call_leaves_the_model_as_it_was(case):
    graphdef, state, _, tokens, _ = case
    model = nnx.merge(graphdef, state)
    jax.eval_shape(lambda tokens: model(tokens, cache=model.init_cache(2, 8), scan=False), tokens[:, :5])
    after_graphdef, after = nnx.split(model)
    assert after_graphdef == graphdef and all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state)))
    assert all(isinstance(leaf, nnx.Param) for _, leaf in nnx.to_flat_state(state))


def test_flops_grow_with_batch_and_count_the_parameters(case):
    _, state, config, _, _ = case
    family = get_family(case_name(case))
    one, two = (family.tflops(config, batch=b, length=64, log=False) for b in (1, 2))
    assert two.total == pytest.approx(2 * one.total)
    matrices = sum(leaf.get_raw_value().size for path, leaf in nnx.to_flat_state(state) if "kernel" in map(str, path))
    assert one.weights * 1e12 >= 6 * 64 * matrices
    assert visible_pairs(5) == 15 and visible_pairs(5, 2) == 9


def test_a_quantization_mode_is_refused():
    _, config, _, _ = prepared(MODELS["llama"])
    with pytest.raises(ValueError, match="no quantized form"):
        get_family("llama").create(config, rngs=nnx.Rngs(0), quant_mode_str="int8")
