"""Inverse frequencies by a config, for every rope type of transformers (`ROPE_INIT_FUNCTIONS` of `modeling_rope_utils.py` and a family's own default)."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from labkit.layers.precision import wide_dtype
from labkit.layers.rope import Rope, inverse_frequencies

SCALED = ("llama3", "yarn", "longrope")


def rope_parameters(config, layer_type: str | None = None) -> dict:
    """`config.rope_parameters`, of one layer type when given, with what `standardize_rope_params` of transformers adds: plain numbers."""
    given = getattr(config, "rope_parameters", None) or {}
    given = given[layer_type] if layer_type is not None and layer_type in given else given
    given = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    given.setdefault("rope_type", given.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if given.get(key) is None and getattr(config, key, None) is not None:
            given[key] = getattr(config, key)
    if given["rope_type"] in SCALED:
        if layer_type is None and getattr(config, "original_max_position_embeddings", None) is not None:
            given["original_max_position_embeddings"] = config.original_max_position_embeddings
        given.setdefault("original_max_position_embeddings", getattr(config, "max_position_embeddings", None))
    return given


def rope_init(config, positions=None, *, default=None, layer_type: str | None = None, head_dim_key: str = "head_dim"):
    """(inv_freq [rotated / 2] in at least float32, attention_scaling), as `ROPE_INIT_FUNCTIONS[rope_type](config, ...)` of transformers gives them.

    positions: int [batch, length] of the call, None at construction; "dynamic" and "longrope" look at the highest. default: what the family computes for the
    type "default", called as default(config) or default(config, layer_type=layer_type) -> (inv_freq, attention_scaling); None: the plain formula. Numpy
    unless the type looks at positions that are given. Raises ValueError for an unknown type.
    """
    given = rope_parameters(config, layer_type)
    rope_type, wide = given["rope_type"], np.dtype(wide_dtype(config.dtype))
    if rope_type == "default" and default is not None:
        return default(config) if layer_type is None else default(config, layer_type=layer_type)
    head_dim = getattr(config, head_dim_key, None) or config.hidden_size // config.num_attention_heads
    partial = given.get("partial_rotary_factor")
    partial = 1.0 if partial is None else partial
    if rope_type not in ("default", "linear", "dynamic", "proportional", *SCALED):
        raise ValueError(f"rope_parameters: rope type {rope_type!r} is not one of default, linear, dynamic, yarn, longrope, llama3, proportional")
    if rope_type == "yarn" and layer_type is not None:
        # The reference reads `truncate` from the outer mapping, whatever the layer type.
        given["truncate"] = config.rope_parameters.get("truncate", True)
    numbers = tuple((key, value) for key, value in given.items() if key not in ("rope_type", "type", "rope_theta"))
    turned = head_dim if rope_type == "proportional" else int(head_dim * partial)
    rope = Rope(rope_type, float(given["rope_theta"]), turned, getattr(config, "max_position_embeddings", None), numbers)
    if positions is None or rope_type not in ("dynamic", "longrope"):
        inv_freq, scaling = inverse_frequencies(rope, config.dtype, np.asarray(0))
        return np.asarray(inv_freq, wide), scaling
    return inverse_frequencies(rope, config.dtype, jnp.max(positions) + 1)
