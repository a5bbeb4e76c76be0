"""Qwen3Moe slice."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_qwen3_moe import qwen3_moe_rules
from .modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeModel, Qwen3MoeSharding, create_qwen3_moe_model
from .utils_qwen3_moe import calculate_qwen3_moe_tflops_per_device, configure_qwen3_moe_engine

FAMILY = Family(
    name="qwen3_moe",
    config=Qwen3MoeConfig,
    sharding=Qwen3MoeSharding,
    model=Qwen3MoeModel,
    create=create_qwen3_moe_model,
    rules=qwen3_moe_rules,
    tflops=calculate_qwen3_moe_tflops_per_device,
    configure_engine=configure_qwen3_moe_engine,
    path=Path(__file__).parent,
)

__all__ = [
    "FAMILY",
    "Qwen3MoeConfig",
    "Qwen3MoeModel",
    "Qwen3MoeSharding",
    "calculate_qwen3_moe_tflops_per_device",
    "configure_qwen3_moe_engine",
    "create_qwen3_moe_model",
    "qwen3_moe_rules",
]
