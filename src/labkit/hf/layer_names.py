"""Layer indices in tensor names."""

import re

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer|decoder_layers)\.(\d+)(?=\.)")
OTHER_TOWER = re.compile(r"(^|\.)(vision|visual|audio|image|speech|mm_projector|multi_modal_projector|encoder)[\w]*\.")
MTP = re.compile(r"(^|\.)(mtp|nextn|mtp_block|mtp_layers)\b")
COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def layer_count(config: dict) -> int | None:
    """The number of decoder layers of an effective config, or None when it does not say."""
    for key in COUNT_KEYS:
        if isinstance(config.get(key), int):
            return config[key]
    return None


def layer_index(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None for tensors outside the stack and for other towers."""
    if OTHER_TOWER.search(name):
        return None
    found = LAYER.search(name)
    return int(found.group(1)) if found else None


def is_mtp(name: str, layers: int | None) -> bool:
    """True for multi-token-prediction tensors: named so, or stored as layers beyond the last decoder layer."""
    index = layer_index(name)
    return bool(MTP.search(name)) or (layers is not None and index is not None and index >= layers)
