"""`rope_init` against the installed `ROPE_INIT_FUNCTIONS`, every type, at several lengths, per layer type."""

import copy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labkit.hf.exact import exact_mode
from labkit.layers.rope_types import rope_init
from labkit.models.config import FrozenDict

MAX = 64
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0 + i for i in range(8)]}
PARAMETERS = {
    "linear": {"factor": 8.0},
    "linear partial": {"factor": 8.0, "partial_rotary_factor": 0.5},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0},
    "yarn ratio": {"factor": None, "original_max_position_embeddings": 16, "truncate": False},
    "yarn mscale": {"factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn default length": {"factor": 4.0},
    "longrope": {"original_max_position_embeddings": 8, "factor": 8.0, **FACTORS},
    "longrope ratio": {"original_max_position_embeddings": 8, **FACTORS},
    "llama3": {"factor": 32.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional factor": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


def hf_config(name, nested=False):
    parameters = {"rope_type": name.split()[0], "rope_theta": 500.0, **PARAMETERS[name]}
    common = dict(hidden_size=48, num_attention_heads=3, head_dim=16, max_position_embeddings=MAX)
    if nested:
        both = {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        return Gemma3TextConfig(**common, num_hidden_layers=2, layer_types=list(both), rope_parameters=both)
    return LlamaConfig(**common, rope_parameters=parameters)


def ours(config, positions=None, **options):
    fields = {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
    return rope_init(SimpleNamespace(**fields, rope_parameters=FrozenDict(config.rope_parameters), dtype=jnp.float64), positions, **options)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_equals_the_reference_at_construction_and_at_lengths(name, nested):
    config = hf_config(name, nested)
    layer_type = "full_attention" if nested else None
    for length in (None, 6, 9, 65, 200):
        options = {} if length is None else {"seq_len": torch.tensor(length) if name == "dynamic" else length}
        with exact_mode():
            want, factor = ROPE_INIT_FUNCTIONS[name.split()[0]](copy.deepcopy(config), layer_type=layer_type, **options)
        with jax.enable_x64(True):
            positions = None if length is None else jnp.arange(length, dtype=jnp.int32)[None]
            got, got_factor = ours(config, positions, layer_type=layer_type)
        assert got.dtype == np.float64 and got_factor == factor
        np.testing.assert_allclose(np.asarray(got), want.double().numpy(), rtol=1e-14, atol=0)


def test_construction_gives_numpy_and_the_call_a_traced_value():
    config = hf_config("dynamic")
    with jax.enable_x64(True):
        assert isinstance(ours(config)[0], np.ndarray)
        frequencies = jax.jit(lambda positions: ours(config, positions)[0])
        short, long = (np.asarray(frequencies(jnp.arange(40, dtype=jnp.int32)[None] + shift)) for shift in (0, 100))
        np.testing.assert_array_equal(short, ours(config)[0])
    assert np.abs(long / short - 1).max() > 0.1, "control: beyond the maximum the base grows"


def test_the_familys_default_is_asked_for_the_type_default():
    config = hf_config("linear", nested=True)
    asked = []
    default = lambda config, layer_type=None: (asked.append(layer_type) or np.ones(3), 0.5)
    assert ours(config, default=default, layer_type="sliding_attention")[1] == 0.5 and asked == ["sliding_attention"]
    assert ours(config, default=default, layer_type="full_attention")[1] == 1.0 and len(asked) == 1


def test_an_unknown_type_is_refused():
    config = SimpleNamespace(rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}, head_dim=16, dtype=jnp.float32)
    with pytest.raises(ValueError, match="'spiral' is not one of"):
        rope_init(config)
