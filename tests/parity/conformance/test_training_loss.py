"""Check 5 rejects an auxiliary loss that is left out, weighted otherwise or masked by the targets, and a mask of targets that reaches attention."""

import pytest

from labkit.layers.loss import causal_lm_loss, mixture_lm_loss
from labkit.parity.conformance import training_loss
from labkit.parity.conformance.subject import Subject

FAULTS = {
    "left out": (causal_lm_loss, "the engine's aux has no moe_lb_loss"),
    "half its weight": (
        lambda model, batch: mixture_lm_loss(model, batch, coefficient=model.config.router_aux_loss_coef / 2),
        "the loss against cross-entropy",
    ),
    "targets mask attention": (
        lambda model, batch: mixture_lm_loss(model, batch | {"inputs_segmentation": batch["targets_segmentation"]}),
        "targets_segmentation reaches the model",
    ),
}


def masked(model, batch):
    """The auxiliary loss times the share of targets that are counted."""
    loss, aux = mixture_lm_loss(model, batch)
    share = (batch["targets_segmentation"] != 0).astype(loss.dtype).mean()
    aux = aux | {"moe_lb_loss": aux["moe_lb_loss"] * share}
    return loss - model.config.router_aux_loss_coef * aux["moe_lb_loss"] / share * (1 - share), aux


@pytest.mark.slow
def test_a_mixture_and_a_dense_family_pass(mixture, llama):
    for subject in (mixture, llama):
        found = training_loss.check(subject)
        assert not found.problems and found.value <= 1e-12


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[] if f == "targets mask attention" else pytest.mark.slow) for f in FAULTS])
def test_a_wrong_loss_is_rejected(mixture, monkeypatch, fault):
    loss, words = FAULTS[fault]
    monkeypatch.setattr(Subject, "loss_fn", property(lambda self: (loss, True)))
    assert any(words in problem for problem in training_loss.check(mixture).problems)


@pytest.mark.slow
def test_targets_that_mask_the_auxiliary_loss_are_rejected(mixture, monkeypatch):
    monkeypatch.setattr(Subject, "loss_fn", property(lambda self: (masked, True)))
    assert any("moe_lb_loss with half of the targets counted" in problem for problem in training_loss.check(mixture).problems)


def test_a_dense_family_with_an_auxiliary_loss_is_rejected(llama, monkeypatch):
    def more(model, batch):
        loss, aux = causal_lm_loss(model, batch)
        return loss, aux | {"z_loss": loss * 0}

    monkeypatch.setattr(Subject, "loss_fn", property(lambda self: (more, True)))
    assert any("the engine returns z_loss" in problem for problem in training_loss.check(llama).problems)
