"""The reference's training loss and its gradients: what its own forward makes of labels, and what autograd makes of that."""

import contextlib
import inspect
from dataclasses import dataclass

import numpy as np

from labkit.errors import InputError, LabError
from labkit.hf.exact import exact_mode
from labkit.hf.quiet import quiet_transformers
from labkit.hf.recording import to_numpy
from labkit.hf.threads import one_thread

NOT_COUNTED = -100
"""The label of a position that the reference's loss leaves out."""


@dataclass(frozen=True)
class LossAndGradients:
    """loss: the whole of it. aux_loss: the router's part before its coefficient, None where the reference has none. gradients: tensor name on disk -> array,
    zeros for a parameter that the loss does not reach."""

    loss: float
    aux_loss: float | None
    gradients: dict[str, np.ndarray]


def loss_and_gradients(reference, tokens, labels, attention_mask=None) -> LossAndGradients:
    """The loss of tokens [batch, length] against labels of the same shape (the reference shifts them; -100 is not counted), and every parameter's gradient.

    The router's load-balancing loss is asked for where the reference has one. In the reference's own mode: float64 for "exact". Raises InputError when the
    labels do not fit, LabError when the reference returns no loss.
    """
    import torch

    labels = np.asarray(labels)
    if labels.shape != np.asarray(tokens).shape:
        raise InputError(f"labels {labels.shape} do not fit tokens {np.asarray(tokens).shape}")
    model = reference.model
    arguments = reference._arguments(tokens, attention_mask) | {"labels": torch.from_numpy(labels.astype(np.int64)), "use_cache": False}
    frozen = frozen_names(reference)
    named = {name: parameter for name, parameter in model.named_parameters() if name not in frozen}
    mode = exact_mode() if reference.mode == "exact" else contextlib.nullcontext()
    with one_thread(), quiet_transformers(), _asking_for_routers(model, arguments), mode:
        try:
            for parameter in named.values():
                parameter.requires_grad_(True)
            with torch.enable_grad():
                out = model(**arguments)
                if getattr(out, "loss", None) is None:
                    raise LabError("the reference returned no loss", type(model).__name__, "report this family: its loss has another form")
                out.loss.backward()
            found = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in named.items()}
        finally:
            for parameter in named.values():
                parameter.requires_grad_(False)
                parameter.grad = None
    aux = getattr(out, "aux_loss", None)
    aux = None if aux is None or isinstance(aux, int | float) else float(aux.detach())
    return LossAndGradients(float(out.loss.detach()), aux, {name: to_numpy(tensor) for name, tensor in _published(model, found).items()})


@contextlib.contextmanager
def _asking_for_routers(model, arguments: dict):
    """Router logits in the outputs, by the argument or by the config, whichever this reference has."""
    if "output_router_logits" in inspect.signature(model.forward).parameters:
        arguments["output_router_logits"] = True
    if not hasattr(model.config, "output_router_logits"):
        yield
        return
    before = model.config.output_router_logits
    model.config.output_router_logits = True
    try:
        yield
    finally:
        model.config.output_router_logits = before


def frozen_names(reference) -> set[str]:
    """Names in the state dict of what the reference does not train: saved buffers, and parameters that it makes without a gradient."""
    import torch
    from transformers import AutoModelForCausalLM

    model = reference.model
    with quiet_transformers(), torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(model.config)
    saved = set(model.state_dict())
    return {name for name, _ in model.named_buffers() if name in saved} | {name for name, p in fresh.named_parameters() if not p.requires_grad}


def frozen_tensors(reference) -> set[str]:
    """`frozen_names` as they stand on disk."""
    names, state = frozen_names(reference), reference.model.state_dict()
    return set(_published(reference.model, {name: state[name] for name in names})) if names else set()


def _published(model, tensors: dict) -> dict:
    """The tensors under the names and in the shapes in which the reference saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    with quiet_transformers():
        return revert_weight_conversion(model, dict(tensors))
