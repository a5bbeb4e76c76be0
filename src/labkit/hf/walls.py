"""What the lab cannot bring up, and why: found from config and headers, never by failing later."""

import re
from dataclasses import dataclass

from labkit.hf import architectures
from labkit.hf.resemblance import resembling
from labkit.hf.source import Source

_SCALE = re.compile(r"(weight_scale(_inv|_2)?|\.scales?|_scales?|scale_inv|qzeros|g_idx|\.absmax|_packed|_blocks)$")
_INTEGERS = {"U8", "I8", "I32", "U32", "I64", "U64"}
_NARROW_FLOATS = {"F8_E4M3", "F8_E5M2", "F8_E8M0"}


@dataclass(frozen=True)
class Wall:
    """what: the obstacle. why: the key, tensor or version that shows it. next: what a person can do."""

    what: str
    why: str
    next: str


def walls(source: Source) -> list[Wall]:
    """Obstacles before the model can be brought up, none for a model that the reference can run from plain float weights."""
    config, found = source.config, []
    if not config.known:
        if config.has_remote_code:
            if not config.trust_remote_code:
                found.append(
                    Wall(
                        f"The model runs code of its own: model_type {config.model_type} is not part of the installed transformers",
                        f"{config.path}, key auto_map",
                        "Read the Python files of the checkpoint; if you trust them, pass trust_remote_code",
                    )
                )
        else:
            found.append(
                Wall(
                    f"The architecture {config.model_type} is unknown to the installed transformers",
                    f"{config.path}, key model_type",
                    f"{resembling(source)} Otherwise install a transformers version that has it".strip(),
                )
            )
    elif config.model_type not in architectures.causal_lm_classes():
        found.append(
            Wall(
                f"{config.model_type} is no causal language model of the installed transformers",
                f"{config.path}, key model_type",
                "The lab brings up decoder-only text models",
            )
        )
    if config.known and config.effective.get("is_encoder_decoder"):
        found.append(Wall("The model is an encoder-decoder", f"{config.path}, key is_encoder_decoder", "The lab brings up decoder-only text models"))
    quantization = config.raw.get("quantization_config") or config.raw_text.get("quantization_config")
    scaled = next((name for name in source.tensors if _SCALE.search(name)), None)
    packed = next(
        (
            info
            for info in source.tensors.values()
            if info.dtype in _NARROW_FLOATS or (info.dtype in _INTEGERS and info.name.endswith(("weight", "_packed", "qweight", "_blocks")))
        ),
        None,
    )
    if quantization:
        method = quantization.get("quant_method", "an unnamed method") if isinstance(quantization, dict) else quantization
        found.append(
            Wall(f"The weights are quantized ({method})", f"{config.path}, key quantization_config", "Use the original checkpoint in bfloat16 or float32")
        )
    elif packed is not None:
        evidence = f"{packed.shard.name}, tensor {packed.name} is {packed.dtype}" + (
            f", with scales such as {scaled}" if scaled else ", and no scales go with it"
        )
        found.append(Wall("The weights are quantized although the config does not say so", evidence, "Use the original checkpoint in bfloat16 or float32"))
    return found
