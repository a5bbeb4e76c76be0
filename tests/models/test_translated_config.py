"""Configs of translated slices: fields from keys, aliases, defaults; frozen, hashable, strictly read."""

import dataclasses
from typing import ClassVar

import pytest

from labkit.errors import InputError
from labkit.models import FrozenDict, TranslatedConfig, get_family, read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(TranslatedConfig):
    ALIASES: ClassVar = {"hidden_size": "n_embd"}

    hidden_size: object
    rope_parameters: object = None
    layer_types: object = ()
    scale: object = 1.5


FAMILY = dataclasses.replace(get_family("llama"), name="example", config=Example)
HF = {"n_embd": 8, "rope_parameters": {"full": {"rope_type": "yarn", "factors": [1, [2, 3]]}}, "layer_types": ["a", "b"], "model_type": "example"}


def test_fields_come_from_their_keys_frozen():
    config, reading = read_config(FAMILY, HF, {})
    assert (config.hidden_size, config.layer_types, config.scale) == (8, ("a", "b"), 1.5)
    full = config.rope_parameters["full"]
    assert full["rope_type"] == full.rope_type == "yarn" and full["factors"] == (1, (2, 3)) and full.get("factor") is None and "factor" not in full
    assert {**config.rope_parameters} == {"full": full} and full == {"rope_type": "yarn", "factors": [1, [2, 3]]}
    assert reading["n_embd"] == ("read", "") and hash(config) == hash(read_config(FAMILY, {**HF}, {})[0]) and config == read_config(FAMILY, {**HF}, {})[0]
    changed = read_config(FAMILY, {**HF, "rope_parameters": {"full": {"rope_type": "linear"}}}, {})[0]
    assert changed != config and hash(changed) != hash(config)


def test_a_key_that_nothing_reads_is_named():
    with pytest.raises(InputError, match="multiplier = 2"):
        read_config(FAMILY, {**HF, "multiplier": 2}, {"multiplier": 1})
    assert read_config(FAMILY, {**HF, "multiplier": 1}, {"multiplier": 1})[1]["multiplier"] == ("default", "")


def test_a_missing_key_takes_the_default_or_is_named():
    assert read_config(FAMILY, {"n_embd": 8}, {})[0].rope_parameters is None and read_config(FAMILY, {"hidden_size": 9}, {})[0].hidden_size == 9
    with pytest.raises(InputError, match="'hidden_size'"):
        read_config(FAMILY, {"scale": 2.0}, {})


def test_a_frozen_dict_cannot_be_changed():
    frozen = FrozenDict({"a": 1})
    with pytest.raises(TypeError):
        frozen["a"] = 2
    with pytest.raises(AttributeError):
        _ = frozen.b
