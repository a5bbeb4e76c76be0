"""A `.gguf` file becomes an ordinary directory, once."""

import gguf
import numpy as np
import pytest

from labkit.hf import open_source

HIDDEN, HEADS, KV, INNER, LAYERS = 64, 4, 2, 96, 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnop", "ab"]


def write_gguf(path, *, skip=None):
    """A llama of two layers in float32, with a tokenizer of letters. Returns the tensors as written."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("two layers")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (HIDDEN * KV // HEADS, HIDDEN),
                "attn_v": (HIDDEN * KV // HEADS, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
                "attn_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
            }.items()
        }
    arrays = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items() if name != skip}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def test_converted_once_to_an_ordinary_directory(tmp_path):
    from transformers import AutoModelForCausalLM

    arrays = write_gguf(tmp_path / "two.gguf")
    source = open_source(tmp_path / "two.gguf", scratch=tmp_path / "scratch")
    assert (source.name, source.origin, source.config.model_type) == ("two", "gguf", "llama")
    assert source.config.raw["rms_norm_eps"] == 1e-5 and source.config.effective["rope_parameters"] == {"rope_theta": 5000.0, "rope_type": "default"}
    assert source.config.effective["tie_word_embeddings"] is True and "lm_head.weight" not in source.tensors
    assert {info.dtype for info in source.tensors.values()} == {"BF16"} and len(source.tensors) == len(arrays)
    import ml_dtypes

    written = arrays["blk.1.ffn_up.weight"].astype(ml_dtypes.bfloat16)
    assert source.tensors.read("model.layers.1.mlp.up_proj.weight").tobytes() == written.tobytes()
    _, info = AutoModelForCausalLM.from_pretrained(source.path, output_loading_info=True)
    assert not any(info.values())
    date = (source.path / "config.json").stat().st_mtime_ns
    assert (open_source(tmp_path / "two.gguf", scratch=tmp_path / "scratch").path / "config.json").stat().st_mtime_ns == date


def test_a_tensor_is_missing(tmp_path, refused):
    write_gguf(tmp_path / "bad.gguf", skip="blk.1.ffn_up.weight")
    refused(lambda: open_source(tmp_path / "bad.gguf", scratch=tmp_path / "scratch"), "missing", "model.layers.1.mlp.up_proj.weight")
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.suffix != ".lock" and path.is_file()]


@pytest.mark.parametrize("content, message", [(b"", "magic"), (b"PK\x03\x04", "magic"), (b"GGUF", "cannot read"), (b"GGUF" + bytes(64), "cannot read")])
def test_no_gguf(tmp_path, refused, content, message):
    (tmp_path / "x.gguf").write_bytes(content)
    refused(lambda: open_source(tmp_path / "x.gguf", scratch=tmp_path / "scratch"), message, "x.gguf")


def test_absent(tmp_path, refused):
    refused(lambda: open_source(tmp_path / "absent.gguf"), "no such GGUF file")


def test_a_file_that_is_no_gguf(tmp_path, refused):
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(lambda: open_source(tmp_path / "model.safetensors"), "not .gguf", "directory")


def test_a_directory_of_ggufs_says_to_name_the_file(tmp_path, refused):
    from .conftest import write_config

    (write_config(tmp_path) / "a.gguf").write_bytes(b"GGUF")
    refused(lambda: open_source(tmp_path), "GGUF", "a.gguf")
