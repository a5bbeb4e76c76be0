"""Qwen3 slice."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_qwen3 import qwen3_rules
from .modeling_qwen3 import Qwen3Config, Qwen3Model, Qwen3Sharding, create_qwen3_model
from .utils_qwen3 import calculate_qwen3_tflops_per_device, configure_qwen3_engine

FAMILY = Family(
    name="qwen3",
    config=Qwen3Config,
    sharding=Qwen3Sharding,
    model=Qwen3Model,
    create=create_qwen3_model,
    rules=qwen3_rules,
    tflops=calculate_qwen3_tflops_per_device,
    configure_engine=configure_qwen3_engine,
    path=Path(__file__).parent,
)

__all__ = [
    "FAMILY",
    "Qwen3Config",
    "Qwen3Model",
    "Qwen3Sharding",
    "calculate_qwen3_tflops_per_device",
    "configure_qwen3_engine",
    "create_qwen3_model",
    "qwen3_rules",
]
