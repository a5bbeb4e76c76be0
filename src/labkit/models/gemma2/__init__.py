"""Gemma2 slice."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_gemma2 import gemma2_rules
from .modeling_gemma2 import Gemma2Config, Gemma2Model, Gemma2Sharding, create_gemma2_model
from .utils_gemma2 import calculate_gemma2_tflops_per_device, configure_gemma2_engine

FAMILY = Family(
    name="gemma2",
    config=Gemma2Config,
    sharding=Gemma2Sharding,
    model=Gemma2Model,
    create=create_gemma2_model,
    rules=gemma2_rules,
    tflops=calculate_gemma2_tflops_per_device,
    configure_engine=configure_gemma2_engine,
    path=Path(__file__).parent,
)

__all__ = [
    "FAMILY",
    "Gemma2Config",
    "Gemma2Model",
    "Gemma2Sharding",
    "calculate_gemma2_tflops_per_device",
    "configure_gemma2_engine",
    "create_gemma2_model",
    "gemma2_rules",
]
