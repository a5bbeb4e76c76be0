"""A `.gguf` file as an ordinary safetensors directory, converted once and cached."""
import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

from labkit.errors import InputError
from labkit.hf.scratch import ensure_free, scratch_dir

CONVERSION = 1      # raise when the same GGUF would give another directory


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
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        config = AutoConfig.from_pretrained(**source)
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, NotImplementedError) as error:
        raise InputError(f"transformers cannot read this GGUF file: {' '.join(str(error).split())[:300]}", path, "Give the original safetensors checkpoint instead") from None
    # The result counts as quantized and refuses to be saved; a fresh model with the same state does not.
    config.tie_word_embeddings = quantized.config.tie_word_embeddings
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
