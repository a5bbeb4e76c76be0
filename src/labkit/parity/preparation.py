"""A process made ready for tiny models on pretended devices, before anything is computed in it."""

import os

DEVICES = 8
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for programs that run once on few tokens: compiling them takes longer than running."""


def device_flags(devices: int, before: str = "") -> str:
    """The value of XLA_FLAGS for so many pretended devices, after what it held `before`."""
    return f"{before} {QUICK} --xla_force_host_platform_device_count={devices}".strip()


def prepare() -> None:
    """Make this process one for exact comparisons: CPU, eight devices, compiled code shared through the scratch folder."""
    from labkit.hf.scratch import scratch_dir

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the partitioner remarks on every gather from a table that it reshards
    os.environ["XLA_FLAGS"] = device_flags(DEVICES, os.environ.get("XLA_FLAGS", ""))
    import jax

    # Imported packages have read their environment already, so jax is told directly.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(scratch_dir() / "jax-cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
