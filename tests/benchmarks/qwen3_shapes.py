"""A checkpoint with the shapes of Qwen3-0.6B (1.19 GB in bfloat16), made on the spot from random bits, one tensor in memory at a time."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from labkit.hf.safetensors_io import Slot, write_safetensors

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def slots(config=CONFIG) -> list[Slot]:
    c = config
    hidden, inner, width, kv = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = {
        "input_layernorm": (hidden,), "mlp.down_proj": (hidden, inner), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,), "self_attn.k_norm": (c["head_dim"],), "self_attn.k_proj": (kv, hidden), "self_attn.o_proj": (hidden, width),
        "self_attn.q_norm": (c["head_dim"],), "self_attn.q_proj": (width, hidden), "self_attn.v_proj": (kv, hidden),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(c["num_hidden_layers"]) for name, shape in layer.items()}
    return [Slot(name, "BF16", shape) for name, shape in (shapes | {"model.norm.weight": (hidden,)}).items()]


def random_bits(slot: Slot, seed: int) -> np.ndarray:
    """Finite bfloat16 values of every mantissa: random bits whose exponent stays below 192."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, slot.shape, dtype=np.uint16)
    bits &= np.uint16(0xDFFF)
    return bits.view(ml_dtypes.bfloat16)


def write_checkpoint(folder: Path, config=CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    wanted = slots(config)
    write_safetensors(folder, wanted, (random_bits(slot, i) for i, slot in enumerate(wanted)))
    return folder
