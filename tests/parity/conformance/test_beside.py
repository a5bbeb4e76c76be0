"""What stands beside the eight checks rejects a wrong number, a wrong gradient behind a right loss, a cache that forgets and segments that see each other."""

import jax
import pytest

from labkit.layers import attention
from labkit.models.llama import modeling_llama
from labkit.parity.conformance import beside
from labkit.parity.gradients import batch_of, labels_of


@pytest.mark.slow
def test_the_right_slice_passes_all(llama):
    for check in (beside.exact, beside.loss_and_gradients, beside.batch, beside.packing):
        found = check(llama)
        assert not found.problems and found.value <= 1e-9


def test_a_gradient_twice_too_large_behind_a_right_loss_is_named(llama, monkeypatch):
    right = modeling_llama.LlamaMLP.__call__

    def doubled(self, x):
        out = right(self, x)
        return 2 * out - jax.lax.stop_gradient(out)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", doubled)
    problems = beside.loss_and_gradients(llama).problems
    assert not any(problem.startswith("loss") for problem in problems)
    assert any(problem.startswith("gradient of layers.mlp.down_proj.kernel: relative error") for problem in problems)


@pytest.mark.slow
def test_an_auxiliary_loss_that_counts_padding_is_rejected(mixture, monkeypatch):
    from labkit.models.qwen3_moe import modeling_qwen3_moe

    right = modeling_qwen3_moe.routing_statistics
    monkeypatch.setattr(modeling_qwen3_moe, "routing_statistics", lambda p, i, counted: right(p, i, counted | True))
    problems = beside.loss_and_gradients(mixture).problems
    assert problems and all("left-padded" in problem for problem in problems)


@pytest.mark.slow
def test_a_missing_module_comes_first(llama, monkeypatch):
    right = modeling_llama.LlamaDecoderLayer.__init__

    def without(self, *arguments, **keywords):
        right(self, *arguments, **keywords)
        weight = self.input_layernorm
        self.input_layernorm = nnx_identity(weight)

    def nnx_identity(norm):
        class Same(type(norm)):
            def __call__(self, x):
                return x

        norm.__class__ = Same
        return norm

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", without)
    assert beside.exact(llama).problems[0].startswith("layers.0.input_layernorm in isolation")


@pytest.mark.slow
def test_a_cache_that_forgets_fails_in_decode(llama, monkeypatch):
    import jax.numpy as jnp

    from labkit.layers.cache import KVCache

    write = KVCache.write
    assert not beside.decode(llama).problems
    monkeypatch.setattr(KVCache, "write", lambda self, key, value, start: write(self, key, jnp.where(start > 0, jnp.zeros_like(value), value), start))
    vars(llama).pop("_forward")
    assert any("position 7, 7 tokens first" in problem for problem in beside.decode(llama).problems)


def test_segments_that_see_each_other_are_rejected(llama, monkeypatch):
    import dataclasses

    import jax.numpy as jnp

    right = attention.causal_mask
    one = lambda ids: (ids != 0).astype(jnp.int32)
    blind = lambda tokens, *more: right(dataclasses.replace(tokens, segment_ids=one(tokens.segment_ids), key_segment_ids=one(tokens.key_segment_ids)), *more)
    monkeypatch.setattr(modeling_llama, "causal_mask", blind)
    problems = beside.packing(llama).problems
    assert any(problem.startswith("the second segment") for problem in problems)


@pytest.mark.slow
def test_both_sides_in_float32_and_a_round_trip(llama, monkeypatch):
    import labkit.converters

    assert not beside.float32(llama).problems and not beside.round_trip(llama).problems
    monkeypatch.setattr(labkit.converters, "compare_safetensors", lambda *a, **k: ["model.norm.weight: differs"])
    assert beside.round_trip(llama).problems[0] == "scanned: model.norm.weight: differs"


def test_labels_and_batch_count_the_same_targets():
    import numpy as np

    tokens, mask = np.arange(12).reshape(2, 6) + 3, np.ones((2, 6), int)
    mask[0, :2] = 0
    labels, batch = labels_of(tokens, mask), batch_of(tokens, mask)
    counted = batch["targets_segmentation"] != 0
    theirs = labels[:, 1:] != -100
    assert (counted[:, :-1] == theirs).all() and not counted[:, -1].any()
    assert (batch["targets"][counted] == labels[:, 1:][theirs]).all()
