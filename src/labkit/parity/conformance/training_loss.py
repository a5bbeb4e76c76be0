"""Check 5: the auxiliary loss is part of the primary loss, through `configure_<family>_engine`; `targets_segmentation` masks the cross-entropy alone."""

import re

import numpy as np

from labkit.parity.compare import log_softmax, relative_error
from labkit.parity.conformance.report import Found
from labkit.parity.conformance.trainable import relative_rows
from labkit.parity.gradients import NEGLIGIBLE, batch_of

LIMIT = 1e-12
AUX = "moe_lb_loss"
ROUTER = re.compile(r"router|(^|\.)gate(\.|$)")


def check(subject) -> Found:
    """Three ways of counting the same targets: all, every other one, none. value: the worst relative error."""
    from labkit.models.registry import MODEL_ENGINE_CONFIG_REGISTRY

    found = Found()
    if MODEL_ENGINE_CONFIG_REGISTRY[subject.model_type] is not subject.family.configure_engine:
        found.problems.append("MODEL_ENGINE_CONFIG_REGISTRY holds another function than the family's configure_engine")
    batch = batch_of(subject.tokens)
    every = batch["targets_segmentation"]
    countings = {"all": every, "half": every * (np.arange(every.shape[1]) % 2), "none": np.zeros_like(every)}
    steps = {name: subject.step(counted=counted) for name, counted in countings.items()}
    coefficient, mixture = subject.source.config.effective.get("router_aux_loss_coef"), subject.wanted[0].aux_loss is not None
    for name, step in steps.items():
        if mixture and AUX not in step.aux:
            found.problems.append(f"the reference's loss has a router's part, and the engine's aux has no {AUX}: {sorted(step.aux)}")
            return found
        if not mixture and (folded := [key for key in step.aux if "loss" in key]):
            found.problems.append(f"the reference has no auxiliary loss, and the engine returns {', '.join(folded)}")
        wanted = cross_entropy(step.logits, batch["targets"], countings[name]) + (coefficient * float(step.aux[AUX]) if mixture else 0.0)
        # With nothing counted, a dense family's loss is zero: compared with the loss of all targets.
        error = abs(step.loss - wanted) / max(abs(wanted), abs(steps["all"].loss) if not wanted else 0.0)
        found.within(error, LIMIT, f"the loss against cross-entropy {'and ' + AUX + ' ' if mixture else ''}with {name} of the targets counted")
        found.within(
            relative_error(step.logits, steps["all"].logits), LIMIT, f"logits with {name} of the targets counted: targets_segmentation reaches the model"
        )
        if mixture:
            error = relative_error(step.aux[AUX][None], steps["all"].aux[AUX][None])
            found.within(error, LIMIT, f"{AUX} with {name} of the targets counted: targets_segmentation reaches it")
    gradients = steps["none"].gradients
    if not mixture:
        found.problems += [f"{path} has a gradient although nothing is counted" for path, g in gradients.items() if np.abs(g).max() > 0]
        return found
    routers = {path: gradient for path, gradient in gradients.items() if ROUTER.search(path) and "shared" not in path and "gate_proj" not in path}
    if not routers:
        found.problems.append("no parameter of this family is called a router or a gate")
    rows = relative_rows(gradients, subject.placements, None)
    for (path, layer, _), value in rows.items():
        if path in routers and not value > NEGLIGIBLE:
            found.problems.append(f"{path}, layer {layer}: no gradient from the auxiliary loss alone")
    return found


def cross_entropy(logits, targets, counted) -> float:
    """Mean negative log-likelihood over counted positions; 0 when there is none. In numpy: not the code under test."""
    picked = np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0]
    return float(-(picked * counted).sum() / max(counted.sum(), 1))
