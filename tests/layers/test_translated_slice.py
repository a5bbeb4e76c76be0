"""A slice in the emitted form, written by hand, on the runtime alone: exact against the installed reference in every way of calling it."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from labkit.converters import load_model
from labkit.hf import open_source
from labkit.hf.reference import Reference
from labkit.models import get_family, read_config, register_folder, registry
from labkit.parity.cached import cached_equals_full
from labkit.parity.capture import capture
from labkit.parity.compare import relative_error
from labkit.parity.components import compare_components
from labkit.parity.greedy import GreedyDecoder
from labkit.scale.mesh import build_mesh

NAME, LENGTH = "tiny:seed_oss?num_hidden_layers=3", 24


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_folder(Path(__file__).parent / "slices" / "seed_oss")


@functools.cache
def prepared():
    """(model in float64, config, tokens [2, LENGTH], reference)."""
    source = open_source(NAME)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        model, config, findings = load_model(source, dtype=jnp.float64)
    assert not findings
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    return model, config, tokens, Reference.load(source.path, "exact")


@pytest.fixture
def case():
    made = prepared()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield made


@functools.partial(jax.jit, static_argnames=("graphdef", "scan", "remat"))
def compiled(graphdef, state, tokens, segment_ids, scan=True, remat=None):
    return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, scan=scan, remat=remat)


def run(model, tokens, segment_ids=None, **options):
    segment_ids = np.ones_like(tokens) if segment_ids is None else segment_ids
    return np.asarray(compiled(*nnx.split(model), tokens, segment_ids, **options))


def test_scan_loop_and_remat_are_exact(case):
    model, _, tokens, reference = case
    want = reference.logits(tokens)
    for options in ({}, {"scan": False}, {"remat": "full"}, {"remat": "attention", "scan": False}):
        assert relative_error(run(model, tokens, **options), want) <= 1e-9, options


def test_left_padding_is_the_references(case):
    model, _, tokens, reference = case
    mask = np.ones_like(tokens)
    mask[0, :7] = 0
    assert relative_error(run(model, tokens, mask), reference.logits(tokens, mask), mask) <= 1e-9
    assert relative_error(run(model, tokens), reference.logits(tokens, mask), mask) > 1e-3, "control: padding that is not masked"


def test_packed_segments_do_not_see_each_other(case):
    model, _, tokens, _ = case
    packed = run(model, np.concatenate([tokens[:, :9], tokens[:, : LENGTH - 9]], 1), np.repeat([[1] * 9 + [2] * (LENGTH - 9)], 2, 0).astype(np.int32))
    plain = run(model, tokens)
    assert relative_error(packed[:, :9], plain[:, :9]) <= 1e-12 and relative_error(packed[:, 9:], plain[:, : LENGTH - 9]) <= 1e-12


def test_the_cache_step_by_step_in_pieces_and_padded(case):
    model, _, tokens, _ = case
    errors = cached_equals_full(model, tokens, prefill=20)
    assert set(errors) == {"steps", "pieces", "padded", "padded steps"} and max(errors.values()) <= 1e-12


def test_greedy_decoding_scanned_and_unrolled_is_the_references(case):
    model, _, tokens, reference = case
    want = reference.greedy(tokens[:1, :9], 6)
    assert np.array_equal(GreedyDecoder(model)(tokens[:1, :9], 6), want)
    assert np.array_equal(GreedyDecoder(model, unroll=True)(tokens[:1, :9], 6), want)


def test_every_component_is_exact_alone(case):
    model, _, tokens, reference = case
    captured = reference.capture(tokens)
    table = compare_components(capture(model, tokens), capture(model, tokens, inject=captured), captured)
    assert table.passed and not table.missing and not table.extra
    assert {"rope", "attention", "mlp", "norms", "block", "head"} <= {row.kind for row in table.rows}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_abstract_compiled_and_eager_construction_give_one_state(compiled):
    source = open_source(NAME)
    family = get_family("seed_oss")
    config, reading = read_config(family, source.config.effective, source.config.defaults)
    assert reading["rope_parameters"] == ("read", "") and config.rope_parameters["rope_type"] == "default"
    mesh = build_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    create = lambda: family.create(config, rngs=nnx.Rngs(3), mesh=mesh)
    eager, abstract = create(), nnx.eval_shape(create)

    def tree(model):
        leaves = nnx.to_flat_state(nnx.state(model))
        return {path: (leaf.get_raw_value().shape, leaf.get_raw_value().dtype, leaf.get_metadata("out_sharding")) for path, leaf in leaves}

    assert tree(eager) == tree(abstract)
    for path, leaf in nnx.to_flat_state(nnx.state(eager)):
        array = leaf.get_raw_value()
        shape = array.shape[1:] if path[0] == "layers" else array.shape
        assert len(shape) < 2 or not array.sharding.is_fully_replicated, path
    if compiled:
        jitted = nnx.jit(create)()
        assert tree(jitted) == tree(eager)
        for (_, a), (_, b) in zip(nnx.to_flat_state(nnx.state(eager)), nnx.to_flat_state(nnx.state(jitted))):
            np.testing.assert_allclose(a.get_raw_value(), b.get_raw_value(), rtol=1e-5, atol=1e-6)


def test_a_config_that_asks_for_more_is_refused():
    source = open_source(NAME)
    with pytest.raises(ValueError, match="no quantized form"):
        config, _ = read_config(get_family("seed_oss"), source.config.effective, source.config.defaults)
        get_family("seed_oss").create(config, rngs=nnx.Rngs(0), quant_mode_str="int8")


def test_a_wrong_epsilon_is_noticed(case):
    """Control: the same weights under another epsilon."""
    model, config, tokens, reference = case
    wrong = dataclasses.replace(config, rms_norm_eps=config.rms_norm_eps * 30)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: get_family("seed_oss").create(wrong, rngs=nnx.Rngs(0))))
    changed = nnx.merge(graphdef, nnx.state(model))
    assert relative_error(run(changed, tokens), reference.logits(tokens)) > 1e-6


def teardown_module():
    for name in [name for name in sys.modules if name.startswith("labkit_slices.seed_oss")]:
        sys.modules.pop(name)
