"""The garden: one folder per family, found lazily."""

from labkit.models.config import ConfigView, DecoderConfig, FrozenDict, TranslatedConfig, read_config
from labkit.models.registry import (
    MODEL_ENGINE_CONFIG_REGISTRY,
    MODEL_FLOPS_REGISTRY,
    MODEL_REGISTRY,
    Family,
    get_family,
    refined_families,
    register_family,
    register_folder,
)

__all__ = [
    "MODEL_ENGINE_CONFIG_REGISTRY",
    "MODEL_FLOPS_REGISTRY",
    "MODEL_REGISTRY",
    "ConfigView",
    "DecoderConfig",
    "Family",
    "FrozenDict",
    "TranslatedConfig",
    "get_family",
    "read_config",
    "refined_families",
    "register_family",
    "register_folder",
]
