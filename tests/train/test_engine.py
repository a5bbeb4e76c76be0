"""The update's loss and gradients equal the reference's own, parameter by parameter, the auxiliary loss included."""

import jax
import numpy as np
import pytest

from labkit.errors import BlockedError
from labkit.hf.gradients import loss_and_gradients
from labkit.parity.conformance import Subject
from labkit.parity.conformance.subject import exactly
from labkit.parity.gradients import batch_of, compare_gradients, labels_of, through_rules
from labkit.train.data import split_batch
from labkit.train.engine import TrainingEngine, family_engine
from tests.train.test_step import gradients_and_metrics

LIMIT = 1e-9


@pytest.mark.parametrize(("name", "parts"), [("tiny:llama?num_hidden_layers=2", 2), ("tiny:qwen3_moe?num_hidden_layers=2", 1)])
def test_loss_and_gradients_equal_the_reference(name, parts):
    with exactly():
        subject = Subject(name)
        tokens, mask = subject.tokens[:2, :17], np.ones((2, 17), np.int32)
        mask[0, :6] = 0
        wanted = loss_and_gradients(subject.reference, tokens, labels_of(tokens, mask), mask)
        mapped = through_rules(subject.source, subject.family, subject.config, wanted.gradients)
        ours, metrics = gradients_and_metrics(subject.model, subject.model_type, split_batch(batch_of(tokens, mask), parts))
        aux = float(metrics["moe_lb_loss"]) if "moe_lb_loss" in metrics else None
        table = compare_gradients(ours, float(metrics["loss"]), aux, mapped, wanted)
        assert table.worst[0] < LIMIT, table.worst
        assert len(table.errors) == len(ours) > 10 and (table.aux_loss is not None) == ("moe" in name)
        # The control: padding that the loss counts.
        blind = batch_of(tokens, mask)
        blind["targets_segmentation"][0, :6] = 1
        wrong, metrics = gradients_and_metrics(subject.model, subject.model_type, split_batch(blind, parts))
        assert compare_gradients(wrong, float(metrics["loss"]), aux, mapped, wanted).worst[0] > 1e-3


def test_the_engines_own_gradients_are_those_of_the_update():
    with exactly():
        subject = Subject("tiny:llama?num_hidden_layers=2")
        batch = batch_of(subject.tokens[:2, :9])
        loss, aux, gradients = jax.jit(family_engine("llama").loss_and_gradients)(subject.model, batch)
        ours, metrics = gradients_and_metrics(subject.model, "llama", split_batch(batch, 1))
        leaves = jax.tree.leaves(gradients)
        assert aux == {} and abs(float(loss) - metrics["loss"]) < 1e-12 and len(leaves) == len(ours)
        assert max(np.abs(np.asarray(a) - b).max() for a, b in zip(leaves, ours.values())) < 1e-12


def test_an_engine_without_a_loss_says_so():
    with pytest.raises(ValueError, match="no loss"):
        TrainingEngine().loss(None, {})


def test_a_family_that_the_garden_lacks_is_blocked():
    with pytest.raises(BlockedError, match="no slice for model type 'nobody'"):
        family_engine("nobody")
