"""The mini checkpoint: embeddings, head, final norm and the first layers, as an ordinary directory that transformers loads."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

from labkit.errors import InputError
from labkit.hf.config import HFConfig
from labkit.hf.layer_names import COUNT_KEYS, is_mtp, layer_count, layer_index
from labkit.hf.safetensors_io import write_safetensors
from labkit.hf.scratch import atomic_directory, ensure_free
from labkit.hf.source import Source

TOKENIZER_FILE = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template.*|.*\.model|.*\.tiktoken|generation_config\.json|.*\.jinja"
)
# Lists that hold layer indices; every other list as long as the stack holds one entry per layer.
INDEX_LISTS = {"mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "global_attn_idxs", "moe_layers", "hybrid_layer_ids", "dense_layers", "skip_layers"}
NOT_PER_LAYER = re.compile(r"architectures|.*_token_ids?|.*id2label|.*label2id|.*tokens")
MANIFEST = "labkit_subset.json"


def write_subset(source: Source, num_layers: int, out: str | os.PathLike) -> Path:
    """Writes the first `num_layers` layers of `source` into the new folder `out` and returns it. Bytes are copied, one tensor at a time.

    The config is cut to match: the count, every per-layer list, lists of layer indices, multi-token prediction. Tokenizer files come along.
    `labkit_subset.json` lists what was dropped. Nothing appears at `out` before all of it is written.
    Raises InputError for an impossible number of layers, an output that exists, or a full disk.
    """
    total = layer_count(source.config.described)
    if total is None:
        raise InputError("The config does not say how many layers the model has", source.config.path, f"Expected one of the keys {', '.join(COUNT_KEYS)}")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= total:
        raise InputError(f"A subset of {num_layers} layers was asked for; the model has {total}", source.path, f"Ask for 1 to {total}")
    kept, dropped_mtp, dropped_layers = [], [], set()
    for name, info in source.tensors.items():
        index = layer_index(name)
        if is_mtp(name, total):
            dropped_mtp.append(name)
        elif index is not None and index >= num_layers:
            dropped_layers.add(index)
        else:
            kept.append(info)
    ensure_free(Path(out).absolute().parent, sum(info.nbytes for info in kept) + (16 << 20))
    raw = cut_config(source.config, num_layers)
    with atomic_directory(out) as folder:
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_safetensors(folder, kept, (source.tensors.read(info.name) for info in kept))
        copy_companions(source.path, folder, code=source.config.has_remote_code)
        manifest = {
            "model": source.name,
            "fingerprint": source.fingerprint,
            "layers": num_layers,
            "of": total,
            "dropped_layers": sorted(dropped_layers),
            "dropped_mtp": dropped_mtp,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return Path(out).absolute()


def copy_companions(directory: Path, out: Path, *, code: bool = False) -> list[str]:
    """Copies tokenizer and generation files, and with `code` the checkpoint's own Python files; returns their names."""
    copied = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and (TOKENIZER_FILE.fullmatch(path.name) or (code and path.suffix == ".py")):
            shutil.copyfile(path, out / path.name)
            copied.append(path.name)
    return copied


def cut_config(config: HFConfig, layers: int) -> dict:
    """config.json for the first `layers` layers. What the class derives from the count, and would now derive differently, is written out."""
    raw = copy.deepcopy(config.raw)
    text = HFConfig(raw, config.path).raw_text
    total = layer_count(config.described)
    count_key = next((key for key in COUNT_KEYS if key in text), None) or next((key for key in COUNT_KEYS if key in config.effective), None)
    if count_key is not None:  # some classes count the entries of a per-layer list instead
        text[count_key] = layers
    for key, value in list(text.items()):
        if isinstance(value, list):
            text[key] = _cut(key, value, total, layers)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    if config.known:
        after = HFConfig(raw, config.path).effective
        for key, value in config.effective.items():
            if isinstance(value, list) and after.get(key) != _cut(key, value, total, layers):
                text[key] = _cut(key, value, total, layers)
    return raw


def _cut(key: str, value: list, total: int, layers: int) -> list:
    if key in INDEX_LISTS and all(isinstance(index, int) for index in value):
        return [index for index in value if index < layers]
    return value[:layers] if len(value) == total and not NOT_PER_LAYER.fullmatch(key) else value
