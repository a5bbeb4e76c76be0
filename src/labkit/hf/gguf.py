"""A `.gguf` file as an ordinary safetensors directory, converted once and cached."""

import contextlib
import functools
import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

from labkit.errors import InputError
from labkit.hf.architectures import optional_keys
from labkit.hf.quiet import quiet_transformers
from labkit.hf.scratch import ensure_free, scratch_dir

CONVERSION = 2  # raise when the same GGUF would give another directory


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_directory(path: Path, scratch: str | os.PathLike | None = None, *, name: str | None = None) -> Path:
    """The converted directory in the scratch folder: bfloat16 safetensors, config, tokenizer. `name` gives a fixed folder name for a file known in advance.

    Raises InputError for a file that is not GGUF or whose architecture transformers cannot read.
    """
    if not path.is_file():
        raise InputError("There is no such GGUF file", path, "Check the path")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError("The file does not start with the GGUF magic", path, "Download it again, or give a safetensors directory")
    folder = scratch_dir(scratch) / "gguf"
    folder.mkdir(exist_ok=True)
    out = folder / f"{name or file_digest(path)[:16]}-v{CONVERSION}"
    if (out / "config.json").is_file():
        return out
    with FileLock(f"{out}.lock"):
        if not (out / "config.json").is_file():
            ensure_free(folder, 6 * path.stat().st_size)
            _convert(path, out)
    return out


def _convert(path: Path, out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with quiet_transformers(), _fast_gguf():
        try:
            config = AutoConfig.from_pretrained(**source)
            _clean(config)
            # from_pretrained would give a model that counts as quantized and refuses to be saved (and needs accelerate): fill a fresh one instead.
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)["tensors"]
            tokenizer = AutoTokenizer.from_pretrained(**source)
        except Exception as error:  # whatever a damaged or unknown file makes the parsers trip over
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise InputError(f"transformers cannot read this GGUF file: {reason}", path, "Give the original safetensors checkpoint instead") from None
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
        missing = set(missing) - set(model.all_tied_weights_keys)
        if missing or unexpected:
            raise InputError(
                f"The GGUF file and the architecture do not agree: {len(missing)} tensors missing, {len(unexpected)} unexpected",
                f"{path}, tensor {sorted([*missing, *unexpected])[0]}",
                "Give the original safetensors checkpoint instead",
            )
        model.tie_weights()
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            os.replace(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _fast_gguf():
    """A conversion in a third of the time, with the same result.

    transformers parses the file anew for config, tensors and tokenizer, and builds the table of names anew for every module: both are kept.
    The reader slices a memory map once per token: this one reads buffers. torch casts small tensors on one thread.
    """
    import gguf
    import numpy as np
    import torch

    class BufferReader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            if override_order is not None or self.byte_order == "S":
                return super()._get(offset, dtype, count, override_order)
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    reader, name_map, threads = gguf.GGUFReader, gguf.get_tensor_name_map, torch.get_num_threads()
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(BufferReader), functools.cache(name_map)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map
        torch.set_num_threads(threads)


def _clean(config) -> None:
    """What GGUF distorts. It stores float32, so 1e-5 comes back as 9.999999747378752e-06: the shortest decimal of the same float32 is what the author wrote.
    It also adds keys of its own that the config class does not know."""
    import numpy as np

    known = set(type(config)().to_dict()) | optional_keys(config.model_type)
    for key, value in list(vars(config).items()):
        if key in config.to_dict() and key not in known:
            delattr(config, key)
        elif isinstance(value, float) and float(np.float32(value)) == value:
            setattr(config, key, float(str(np.float32(value))))
