"""Strict configs: every key is read, irrelevant for a reason, or at its default; and the registry."""

import sys

import pytest

from labkit.errors import BlockedError, InputError
from labkit.hf import open_source
from labkit.models import MODEL_ENGINE_CONFIG_REGISTRY, MODEL_FLOPS_REGISTRY, MODEL_REGISTRY, get_family, read_config, refined_families, register_folder


@pytest.fixture(scope="module")
def gemma2():
    return open_source("tiny:gemma2").config


def read(config, **changes):
    return read_config(get_family(config.model_type), {**config.effective, **changes}, config.defaults)


def test_reading_accounts_for_every_key(gemma2):
    config, reading = read(gemma2)
    assert set(reading) == set(gemma2.effective)
    assert reading["query_pre_attn_scalar"] == ("read", "") and reading["use_cache"][0] == "irrelevant" and reading["use_cache"][1]
    assert config.query_pre_attn_scalar == gemma2.effective["query_pre_attn_scalar"] != config.head_dim


def test_an_unread_key_off_its_default_is_named(gemma2):
    with pytest.raises(InputError, match=r"embedding_multiplier = 12\.0 \(unknown to the installed config class\)"):
        read(gemma2, embedding_multiplier=12.0)


def test_an_unset_unknown_key_is_no_reason_to_refuse(gemma2):
    assert read(gemma2, embedding_multiplier=None)[1]["embedding_multiplier"] == ("default", "")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_bidirectional_attention": True}, "causal decoder"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral' is not one of"),
    ],
)
def test_a_value_that_the_slice_cannot_obey_is_refused(gemma2, changes, message):
    with pytest.raises(InputError, match=message):
        read(gemma2, **changes)


def test_a_missing_key_is_named(gemma2):
    effective = {key: value for key, value in gemma2.effective.items() if key != "intermediate_size"}
    with pytest.raises(InputError, match="intermediate_size"):
        read_config(get_family("gemma2"), effective, gemma2.defaults)


def test_registries_are_lazy_mappings():
    assert set(refined_families()) <= set(MODEL_REGISTRY) == set(MODEL_FLOPS_REGISTRY) == set(MODEL_ENGINE_CONFIG_REGISTRY)
    assert MODEL_REGISTRY["llama"].__name__ == "create_llama_model"
    with pytest.raises(KeyError):
        MODEL_REGISTRY["no_such_family"]


def test_a_family_without_a_slice_is_a_wall_that_names_what_there_is():
    with pytest.raises(BlockedError, match="no slice for model type 'no_such_family'.*llama"):
        get_family("no_such_family")


def test_a_slice_from_outside_the_package_registers(tmp_path, monkeypatch):
    folder = tmp_path / "my_llama"
    folder.mkdir()
    (folder / "modeling_my_llama.py").touch()
    (folder / "__init__.py").write_text(
        "import dataclasses\nfrom labkit.models.llama import FAMILY as base\nFAMILY = dataclasses.replace(base, name='my_llama')\n"
    )
    from labkit.models import registry

    monkeypatch.setattr(registry, "_registered", {})
    register_folder(folder)
    family = get_family("my_llama")
    assert (family.name, family.source, family.path) == ("my_llama", "refined", folder) and "my_llama" in MODEL_REGISTRY
    sys.modules.pop("labkit_slices.my_llama", None)
