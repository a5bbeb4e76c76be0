"""The lengths at which a decoder becomes another function, by config."""

import pytest

from labkit.hf import open_source
from labkit.hf.changing_lengths import lengths_of, position_limit

BASE = {"num_hidden_layers": 2, "max_position_embeddings": 512}
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, []),
        ({"sliding_window": 300}, [("sliding_window", 300)]),
        ({"sliding_window": None}, []),
        ({"sliding_window": 300, "use_sliding_window": False}, []),
        ({"sliding_window": 300, "layer_types": ["full_attention"] * 2}, []),
        ({"sliding_window": 300, "layer_types": ["full_attention", "sliding_attention"]}, [("sliding_window", 300)]),
        ({"attention_chunk_size": 128, "layer_types": ["chunked_attention", "full_attention"]}, [("attention_chunk_size", 128)]),
        ({"attention_window_size": 48}, [("attention_window_size", 48)]),
        ({"chunk_size": 16, "mamba_chunk_size": 16}, []),
        ({"index_topk": 99}, [("index_topk", 99)]),
        ({"index_topk": 9, "compress_rates": {"compressed_sparse_attention": 4}}, [("index_topk x compress_rates (9 x 4)", 36)]),
        ({"rope_parameters": {**ROPE, "rope_type": "longrope"}}, [("original_max_position_embeddings", 64)]),
        ({"rope_parameters": {"rope_type": "longrope"}}, [("max_position_embeddings", 512)]),
        ({"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, [("max_position_embeddings", 512)]),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, []),
        ({"rope_parameters": {**ROPE, "rope_type": "llama3"}}, []),
        ({"rope_parameters": {"full_attention": {**ROPE, "rope_type": "longrope"}}}, [("original_max_position_embeddings", 64)]),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn", "llama_4_scaling_beta": 0.1}}, [("original_max_position_embeddings", 64)]),
        ({"floor_scale": 8192, "attn_temperature_tuning": True}, [("floor_scale", 8192)]),
        ({"floor_scale": 8192, "attn_temperature_tuning": False}, []),
    ],
)
def test_the_lengths_of_a_config(config, found):
    assert [(each.key, each.length) for each in lengths_of(BASE | config)] == found


def test_positions_that_are_learned_have_a_limit():
    assert position_limit(open_source("tiny:gpt2")) == 320
    assert position_limit(open_source("tiny:llama")) is None
