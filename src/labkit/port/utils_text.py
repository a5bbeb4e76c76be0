"""The text of a translated slice's `utils_<family>.py`: its FLOPs and its loss for the training engine. What they count and add up is shared code."""

from labkit.port.rules_text import identifier


def write_utils(family: str, *, experts_per_token: str | None = None, router_coefficient: str | None = None) -> str:
    """The module's text. It imports `create_<family>_model` from the module with the model.

    experts_per_token: the config field that says how many experts a token visits, for a mixture. router_coefficient: the config field with the weight of the
    load-balancing loss, where the reference's loss has one (the mixture then reports `router_logits`). Both must be fields of the slice's config class.
    """
    name = identifier(family)
    loss = "causal_lm_loss" if router_coefficient is None else "mixture_lm_loss"
    imports = [
        "from labkit.layers.flops import TrainingFlops, decoder_training_flops",
        f"from labkit.layers.loss import {loss}",
        f"from .modeling_{name} import create_{name}_model",
    ]
    arguments = ["config", f"create_{name}_model", "batch=batch", "length=length"]
    if experts_per_token is not None:
        arguments.append(f"experts_per_token=config.{experts_per_token}")
    arguments.append("log=log")
    call = f"    return decoder_training_flops({', '.join(arguments)})"
    if len(call) > 160:
        call = "    return decoder_training_flops(\n" + "".join(f"        {a},\n" for a in arguments) + "    )"
    about = "one device" + ("" if experts_per_token is None else "; a token is counted with the experts it visits")
    lines = [
        f'"""{family}: FLOPs and the loss for the training engine."""',
        "",
        *imports,
        "",
        "",
        f"def calculate_{name}_tflops_per_device(config, *, batch: int, length: int, log: bool = True) -> TrainingFlops:",
        f'    """Operations of one training step on `batch` sequences of `length` tokens on {about}."""',
        call,
        "",
        "",
        f"def configure_{name}_engine(engine):",
    ]
    if router_coefficient is None:
        lines += ['    """The engine with this family\'s loss."""', f"    return engine.with_loss_fn({loss}, has_aux=True)"]
    else:
        lines += [
            '    """The engine with this family\'s loss, the load-balancing loss folded in."""',
            "",
            "    def loss(model, batch):",
            f"        return mixture_lm_loss(model, batch, coefficient=model.config.{router_coefficient}, top_k=model.config.{experts_per_token})",
            "",
            "    return engine.with_loss_fn(loss, has_aux=True)",
        ]
    return "\n".join(lines) + "\n"
