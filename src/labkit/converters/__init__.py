"""Rules both ways: Hugging Face tensors, NNX state, Orbax checkpoints."""

from labkit.converters.audit import Audit
from labkit.converters.checkpoint import read_metadata
from labkit.converters.compare import compare_safetensors
from labkit.converters.convert import Conversion, convert
from labkit.converters.export import Export, export
from labkit.converters.loading import audit, effective_config, load_model
from labkit.converters.restore import restore

__all__ = ["Audit", "Conversion", "Export", "audit", "compare_safetensors", "convert", "effective_config", "export", "load_model", "read_metadata", "restore"]
