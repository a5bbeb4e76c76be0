"""Checks 3 and 4 reject a scan that differs, a scan that is none, a remat that renames, changes or is not applied, and layers that keep their index."""

import pytest
from flax import nnx

from labkit.layers import stack
from labkit.layers.plan import LayerPlan
from labkit.layers.tags import tag
from labkit.models.llama import modeling_llama
from labkit.parity.conformance import execution


def with_decoder(monkeypatch, change):
    right = modeling_llama.run_decoder
    monkeypatch.setattr(modeling_llama, "run_decoder", lambda *a, **k: change(right, a, k))


@pytest.mark.slow
def test_scan_loop_and_every_policy_agree(llama):
    for check in (execution.scan_and_loop, execution.remat):
        found = check(llama)
        assert not found.problems and found.value <= 1e-12


def test_a_loop_that_differs_by_a_billionth_is_rejected(llama, monkeypatch):
    right = stack._loop

    def off(*arguments):
        x, *rest = right(*arguments)
        return x + 1e-9, *rest

    monkeypatch.setattr(stack, "_loop", off)
    problems = execution.scan_and_loop(llama).problems
    assert problems[0].startswith("logits by loop: relative error") and any(p.startswith("gradient of norm.weight by loop") for p in problems)


def test_a_scan_that_is_a_loop_is_rejected(llama, monkeypatch):
    assert execution.scan_and_loop_forms(llama) == []
    with_decoder(monkeypatch, lambda right, a, k: right(*a, **k | {"scan": False}))
    assert "by scan, the program does not scan over layers.mlp.up_proj.kernel" in execution.scan_and_loop_forms(llama)


def test_a_remat_that_is_not_applied_or_renames_is_rejected(llama, monkeypatch):
    assert all(execution.remat_form(llama, policy) == [] for policy in execution.REMAT_POLICIES)
    with monkeypatch.context() as patch:
        with_decoder(patch, lambda right, a, k: right(*a, **k | {"remat": None}))
        assert execution.remat_form(llama, "full") == ["remat 'full' changes nothing in the program: it is not applied"]

    def renamed(right, a, k):
        x, *rest = right(*a, **k)
        return (tag(x, "rematted"), *rest) if k["remat"] else (x, *rest)

    with_decoder(monkeypatch, renamed)
    assert execution.remat_form(llama, "full") == ["remat 'full' renames: rematted"]


@pytest.mark.slow
def test_a_remat_that_changes_a_result_is_rejected(llama, monkeypatch):
    monkeypatch.setattr(execution, "REMAT_POLICIES", {"full": None})

    def changed(right, a, k):
        x, *rest = right(*a, **k)
        return (x + 1e-9, *rest) if k["remat"] else (x, *rest)

    with_decoder(monkeypatch, changed)
    assert execution.remat(llama).problems[0].startswith("logits under remat 'full': relative error")


def test_layers_of_another_form_have_another_graph_definition(llama, monkeypatch):
    right = stack._loop

    def other(plan, s, x, graphdefs, inputs, layer_step):
        model = nnx.merge(graphdefs[0], inputs[0][0])
        model.mlp.form = "loop"
        return right(plan, s, x, [nnx.split(model)[0]], inputs, layer_step)

    monkeypatch.setattr(stack, "_loop", other)
    assert any("LlamaDecoderLayer has another graph definition by loop" in problem for problem in execution.scan_and_loop_forms(llama))


def test_an_index_kept_in_layers_is_named():
    class Layer(nnx.Module):
        def __init__(self, index, width):
            self.layer_idx, self.width = index, width

    class Model(nnx.Module):
        def __init__(self, widths):
            self.layers = nnx.List([nnx.List([Layer(index, width) for index, width in enumerate(widths)])])

    plan = LayerPlan.from_kinds(["a", "b"])
    assert execution.own_indices(Model((4, 6)), plan) == ["layers keep their own index as layer_idx"]
    model = Model((4, 6))
    model.layers[0][1].layer_idx = 7
    assert execution.own_indices(model, plan) == []
