"""Seed-OSS slice, written by hand in the form that the translator emits."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_seed_oss import seed_oss_rules
from .modeling_seed_oss import SeedOssConfig, SeedOssForCausalLM, SeedOssSharding, create_seed_oss_model
from .utils_seed_oss import calculate_seed_oss_tflops_per_device, configure_seed_oss_engine

FAMILY = Family(
    name="seed_oss",
    config=SeedOssConfig,
    sharding=SeedOssSharding,
    model=SeedOssForCausalLM,
    create=create_seed_oss_model,
    rules=seed_oss_rules,
    tflops=calculate_seed_oss_tflops_per_device,
    configure_engine=configure_seed_oss_engine,
    path=Path(__file__).parent,
    source="translated",
)
