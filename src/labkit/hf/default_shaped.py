"""`tiny:` names of default-shaped checkpoints: small, and otherwise as the config class has it; the tiny rules themselves avoid every coincidence."""

import json
from collections.abc import Iterator

from labkit.hf.quiet import quiet_transformers
from labkit.hf.tiny_rules import TOKENS, VALUES, tiny_values
from labkit.hf.variant_choices import layer_kinds

HIDDEN, HEADS, HEAD_DIM = 64, 4, 16
_HIDDEN_KEYS = "hidden_size n_embd d_model n_embed dim embed_dim word_embed_proj_dim embedding_size".split()
_HEAD_KEYS = "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads".split()
_KEY_VALUE_KEYS = "num_key_value_heads num_kv_heads".split()
_OTHER_SIZES = {"intermediate_size": 128, "n_inner": 256, "ffn_dim": 256, "vocab_size": 128, "vocab_size_per_layer_input": 128}


def default_shaped(model_type: str) -> Iterator[str]:
    """Tiny names, first choice first: later ones give up sizes, then values, that the class or its model refuses.

    Numbers that are not sizes (eps, rope base, multipliers, softcaps) are the class's own; head size times heads is the hidden size and key-value heads are as
    many as heads wherever the class has it so.
    """
    with quiet_transformers():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        defaults = CONFIG_MAPPING[model_type]().to_dict()
    base = tiny_values(defaults)
    values = {key: defaults[key] for key in base if (key in VALUES or key == "rope_parameters") and key not in ("mlp_only_layers", *TOKENS)}
    sizes = _sizes(defaults, base)
    yield _name(model_type, values | sizes)
    # A class may leave the kinds of its layers to the checkpoint.
    yield from (_name(model_type, values | sizes | kinds) for kinds in layer_kinds(model_type))
    yield _name(model_type, values)
    yield _name(model_type, {"seed": 1})


def _sizes(defaults: dict, base: dict) -> dict:
    hidden = next((defaults[key] for key in _HIDDEN_KEYS if key in base and isinstance(defaults[key], int)), None)
    heads = next((defaults[key] for key in _HEAD_KEYS if key in base and isinstance(defaults[key], int)), None)
    sizes = dict.fromkeys((key for key in _HIDDEN_KEYS if key in base), HIDDEN) | dict.fromkeys((key for key in _HEAD_KEYS if key in base), HEADS)
    sizes |= {key: HEADS if defaults[key] in (None, heads) else HEADS // 2 for key in _KEY_VALUE_KEYS if key in base}
    if "head_dim" in base:
        whole = defaults["head_dim"] is None or not (hidden and heads) or defaults["head_dim"] * heads == hidden
        sizes["head_dim"] = HEAD_DIM if whole else 2 * HEAD_DIM
    return sizes | {key: size for key, size in _OTHER_SIZES.items() if key in base}


def _name(model_type: str, overrides: dict) -> str:
    return f"tiny:{model_type}?" + "&".join(f"{key}={json.dumps(value)}" for key, value in overrides.items())
