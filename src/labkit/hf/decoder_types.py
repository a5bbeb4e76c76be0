"""Which causal-LM types of the installed transformers are decoders of text, by rule; every other one with the rule that leaves it out."""

import functools

from labkit.hf.architectures import causal_lm_classes, modeling_file
from labkit.hf.quiet import quiet_transformers

_SIDE_TOWERS = ("vision", "audio", "vq", "image", "speech", "encoder", "patcher", "depth_decoder")


@functools.cache
def decoder_only_types() -> tuple[tuple[str, ...], dict[str, str]]:
    """(model types in order, {excluded type: reason}) over the table of `AutoModelForCausalLM`. Imports transformers' config classes.

    Left out: types that share another type's class, sequence-to-sequence halves, encoders that can be run causally, wrappers with a second tower, drafters.
    """
    with quiet_transformers():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        chosen, excluded, owners = [], {}, {}
        for model_type, architecture in causal_lm_classes().items():
            reason = _exclusion(model_type, architecture, CONFIG_MAPPING)
            if reason is None and architecture in owners:
                reason = f"the same class as {owners[architecture]}"
            if reason is None:
                owners[architecture] = model_type
                chosen.append(model_type)
            else:
                excluded[model_type] = reason
    return tuple(sorted(chosen)), dict(sorted(excluded.items()))


def _exclusion(model_type: str, architecture: str, configs) -> str | None:
    try:
        config_class = configs[model_type]
    except (KeyError, ImportError):
        return "the installed transformers has no config class for it"
    if modeling_file(model_type) is None:
        return "no modeling file of its own"
    if "text_config" in (getattr(config_class, "sub_configs", None) or {}):
        return "a wrapper around a text tower"
    side = [name for name in getattr(config_class, "sub_configs", None) or {} if any(word in name for word in _SIDE_TOWERS)]
    if side:
        return f"a wrapper with further towers ({', '.join(side)}); its text tower is a type of its own"
    if not architecture.endswith(("CausalLM", "LMHeadModel", "LMHead", "ForTokenGeneration")):
        return f"{architecture} is not a causal LM alone"
    try:
        config = config_class()
    except Exception as error:
        return f"its config class cannot be built without arguments ({type(error).__name__})"
    if getattr(config, "is_encoder_decoder", False):
        return "half of a sequence-to-sequence model"
    if getattr(config, "is_decoder", True) is False and hasattr(config, "add_cross_attention"):
        return "an encoder that can be run causally"
    if getattr(config, "is_encoder", False) or getattr(config, "attn_type", None) == "bi":
        return "bidirectional unless told otherwise"
    if hasattr(config, "cross_attention_hidden_size"):
        return "half of a model that reads images"
    if "Assistant" in architecture:
        return "a drafter that reads another model's states"
    return None
