"""Everything that reads what Hugging Face ships. Importing this package imports neither torch nor transformers."""

from labkit.hf.config import HFConfig
from labkit.hf.scratch import ensure_free, scratch_dir
from labkit.hf.slug import slugify
from labkit.hf.source import Source, open_source
from labkit.hf.subset import write_subset
from labkit.hf.tensors import TensorInfo, TensorTable

__all__ = ["HFConfig", "Source", "TensorInfo", "TensorTable", "ensure_free", "open_source", "scratch_dir", "slugify", "write_subset"]
