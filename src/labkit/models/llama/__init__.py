"""Llama slice."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_llama import llama_rules
from .modeling_llama import LlamaConfig, LlamaModel, LlamaSharding, create_llama_model
from .utils_llama import calculate_llama_tflops_per_device, configure_llama_engine

FAMILY = Family(
    name="llama",
    config=LlamaConfig,
    sharding=LlamaSharding,
    model=LlamaModel,
    create=create_llama_model,
    rules=llama_rules,
    tflops=calculate_llama_tflops_per_device,
    configure_engine=configure_llama_engine,
    path=Path(__file__).parent,
)

__all__ = [
    "FAMILY",
    "LlamaConfig",
    "LlamaModel",
    "LlamaSharding",
    "calculate_llama_tflops_per_device",
    "configure_llama_engine",
    "create_llama_model",
    "llama_rules",
]
