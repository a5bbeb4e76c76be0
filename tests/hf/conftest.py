"""Small checkpoints written by the safetensors library itself, and helpers that damage them."""

import json
from pathlib import Path

import numpy as np
import pytest

from labkit.errors import InputError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": False,
}


def write_shard(path: Path, names, seed=0) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    save_file({name: generator.standard_normal((3, 4)).astype(np.float32) for name in names}, path)


def write_config(folder: Path, **changes) -> Path:
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    """Three shards with two tensors each, an index and a config. Headers only: shapes do not fit the config, which this floor does not check."""
    weight_map = {}
    for number in (1, 2, 3):
        name = f"model-{number:05d}-of-00003.safetensors"
        tensors = [f"model.layers.{number - 1}.mlp.up_proj.weight", f"model.layers.{number - 1}.mlp.down_proj.weight"] + (
            ["lm_head.weight"] if number == 3 else []
        )
        write_shard(tmp_path / name, tensors, number)
        weight_map.update(dict.fromkeys(tensors, name))
    write_index(tmp_path, weight_map)
    write_config(tmp_path)
    return tmp_path


@pytest.fixture
def refused():
    """refused(call, *parts): the call raises an InputError with exit code 2 whose one paragraph holds every part. Returns the paragraph."""

    def check(call, *parts) -> str:
        with pytest.raises(InputError) as caught:
            call()
        text = caught.value.paragraph()
        assert caught.value.exit_code == 2
        assert "\n" not in text
        for part in parts:
            assert part in text, f"{part!r} is not in {text!r}"
        return text

    return check
