"""Rope against the installed transformers, every type, applied and not only tabulated."""

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as hf

from labkit.hf.exact import exact_mode
from labkit.layers.rope import Rope, apply_rope, inverse_frequencies, rope_table

HEAD_DIM, MAX = 16, 64
PARAMETERS = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0},
    "yarn mscale": {"factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.9, "truncate": False},
    "yarn mscale equal": {"factor": 40.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn attention_factor": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.7},
    "longrope": {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0 + i for i in range(8)],
        "factor": 8.0,
    },
    "llama3": {"factor": 32.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def both(name, length, theta=500.0):
    """(ours, reference): applied q and k [1, length, heads, head_dim] in float64."""
    parameters = {"rope_type": name.split()[0], "rope_theta": theta, **PARAMETERS[name]}
    config = LlamaConfig(hidden_size=48, num_attention_heads=3, head_dim=HEAD_DIM, max_position_embeddings=MAX, rope_parameters=dict(parameters))
    rope = Rope.from_parameters(config.rope_parameters, head_dim=HEAD_DIM, max_position_embeddings=MAX)
    x = np.random.RandomState(0).randn(1, length, 3, HEAD_DIM)
    with exact_mode(), torch.no_grad():
        cos, sin = hf.LlamaRotaryEmbedding(config)(torch.from_numpy(x), torch.arange(length)[None])
        q, k = hf.apply_rotary_pos_emb(torch.from_numpy(x), torch.from_numpy(x[..., ::-1].copy()), cos, sin, unsqueeze_dim=2)
    with jax.enable_x64(True):
        table = rope_table(np.arange(length, dtype=np.int32)[None], rope, np.float64)
        ours = [np.asarray(apply_rope(y, *table)) for y in (x, x[..., ::-1])]
    return ours, [q.numpy(), k.numpy()]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("length", [6, 9, 100], ids="length{}".format)
def test_applied_queries_and_keys_equal_the_reference(name, length):
    ours, reference = both(name, length)
    for a, b in zip(ours, reference):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "default"])
def test_a_scaling_that_is_parsed_and_not_applied_is_noticed(name):
    """Catalogue D4: the same comparison with plain frequencies must fail."""
    _, reference = both(name, 100)
    ours, _ = both("default", 100)
    assert np.abs(ours[0] - reference[0]).max() > 1e-2


def test_partial_rotation_leaves_the_other_channels_alone():
    rope = Rope.from_parameters({"rope_theta": 100.0, "partial_rotary_factor": 0.25}, head_dim=HEAD_DIM, max_position_embeddings=MAX, partial=True)
    x = np.random.RandomState(1).randn(1, 9, 2, HEAD_DIM).astype(np.float32)
    turned = np.asarray(apply_rope(x, *rope_table(np.arange(9)[None], rope, np.float32)))
    assert np.array_equal(turned[..., 4:], x[..., 4:]) and np.array_equal(turned[:, 0], x[:, 0])
    assert np.abs(turned[:, 7, :, :4] - x[:, 7, :, :4]).max() > 0.1


def test_thresholds_name_the_lengths_worth_probing():
    rope = Rope.from_parameters({"rope_type": "longrope", "rope_theta": 1e4, **PARAMETERS["longrope"]}, head_dim=HEAD_DIM, max_position_embeddings=MAX)
    short, long = (inverse_frequencies(rope, np.float32, length)[0] for length in (8, 9))
    assert rope.thresholds() == [8] and not np.allclose(short, long)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"rope_type": "spiral", "rope_theta": 1.0}, "'spiral' is not one of default, dynamic"),
        ({"rope_theta": 1.0, "surprise": 3}, "nothing here reads surprise"),
        ({"rope_theta": 1.0, "partial_rotary_factor": 0.5}, "rotates whole heads"),
    ],
)
def test_what_is_not_understood_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        Rope.from_parameters(parameters, head_dim=HEAD_DIM, max_position_embeddings=MAX)
