"""Small configurations chosen so that together they run the optional branches."""

import pytest

from labkit.errors import InputError
from labkit.hf.source_record import record_sources_here
from labkit.hf.tiny import parse_tiny, tiny_directory
from labkit.hf.variants import _Search, record_variants


def test_a_switch_takes_both_sides_and_every_spelling_builds():
    variants = record_variants("gpt_neox")
    assert variants[0] == "tiny:gpt_neox" and 2 <= len(variants) <= 7
    flipped = [parse_tiny(name)[1] for name in variants]
    assert any(overrides.get("use_parallel_residual") is False for overrides in flipped)
    assert any(overrides.get("rope_parameters", {}).get("rope_type") == "yarn" for overrides in flipped)
    assert not any("use_cache" in overrides for overrides in flipped)
    assert all((tiny_directory(name) / "config.json").is_file() for name in variants)
    both = record_sources_here(variants).tests["models/gpt_neox/modeling_gpt_neox.py"]
    alone = record_sources_here(variants[:1]).tests["models/gpt_neox/modeling_gpt_neox.py"]
    assert alone.keys() <= both.keys()
    assert sum(len(truths) for truths in both.values()) > sum(len(truths) for truths in alone.values())


def test_layers_of_every_kind_where_the_plain_model_has_one():
    variants = record_variants("granitemoehybrid")
    kinds = [parse_tiny(name)[1].get("layer_types", []) for name in variants]
    assert any("full_attention" in pattern and len(set(pattern)) > 1 for pattern in kinds)


def test_unknown_type_is_refused(refused):
    refused(lambda: record_variants("lama"), "lama", "llama")


class _Fake(_Search):
    """Builds whatever does not hold both a and b."""

    def branches(self, overrides):
        return None if {"a", "b"} <= overrides.keys() else frozenset(overrides)


@pytest.mark.parametrize(
    "group, expected",
    [
        ([{"a": 1}, {"c": 1}], {"a": 1, "c": 1}),
        ([{"a": 1}, {"b": 1}, {"c": 1}], {"a": 1, "c": 1}),
        ([{"c": 1}, {"c": 2}, {"d": 1}], {"c": 1, "d": 1}),
        ([{"a": 1, "b": 1}], {}),
    ],
)
def test_choices_that_do_not_go_together_are_parted(group, expected):
    assert _Fake("llama", None)._grow({}, group) == expected


def test_the_first_failure_is_reported_when_nothing_builds(monkeypatch):
    search = _Search("llama", None)
    monkeypatch.setattr(search, "_branches", lambda overrides: None)
    search.failure = InputError("refused")
    with pytest.raises(InputError, match="refused"):
        search.run()
