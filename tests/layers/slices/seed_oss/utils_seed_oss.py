"""Seed-OSS' FLOPs and loss."""

from labkit.models.llama.utils_llama import calculate_llama_tflops_per_device, configure_llama_engine

calculate_seed_oss_tflops_per_device = calculate_llama_tflops_per_device
configure_seed_oss_engine = configure_llama_engine
