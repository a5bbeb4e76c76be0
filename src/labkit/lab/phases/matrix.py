"""Errors by captured name, arranged as components by layer for the heat map."""

import re
from collections.abc import Mapping

import numpy as np

ORDER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.q_rope",
    "self_attn.k_rope",
    "self_attn.attn",
    "self_attn.o_proj",
    "self_attn",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp.gate",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp",
    "post_feedforward_layernorm",
    "(block)",
)


def by_layer(free: Mapping[str, float], isolated: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    """(free, isolated, components, layers): arrays [components, layers] with NaN where a layer lacks a component. Names outside the layers are left out."""
    cells = {}
    for which, errors in enumerate((free, isolated)):
        for name, error in errors.items():
            match = re.fullmatch(r"layers\.(\d+)(?:\.(.+?))?(?:#\d+)?", name)
            if match:
                cells[which, match.group(2) or "(block)", int(match.group(1))] = max(
                    error, cells.get((which, match.group(2) or "(block)", int(match.group(1))), 0.0)
                )
    found = list(dict.fromkeys(component for _, component, _ in cells))
    components = sorted(found, key=lambda c: (ORDER.index(c) if c in ORDER else len(ORDER) - 1.5, found.index(c)))
    layers = sorted({layer for _, _, layer in cells})
    grids = [np.array([[cells.get((which, c, layer), np.nan) for layer in layers] for c in components]) for which in (0, 1)]
    return *grids, components, [str(layer) for layer in layers]
