"""The config of a slice: a field for each attribute that the code reads, defaults, aliases and properties from the reference's class."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import pytest

from labkit.models.config import TranslatedConfig
from labkit.port.config_class import ConfigClass
from labkit.port.program import Program
from tests.port import toy

BASE = """
class BaseConfig:
    attribute_map = {"num_layers": "n_layer"}
    eps: float = 1e-6
    window: int = 8
"""
CONFIG = """
from ..base.configuration_base import BaseConfig
class ToyConfig(BaseConfig):
    model_type = "toy"
    window: int = 16
    kinds: list = ["a", "b"]
    table: dict = None
    def __init__(self, n_layer=2, width=32, bias=False, **kwargs):
        super().__init__(**kwargs)
    @property
    def half(self):
        "Half of the width."
        return self.width // 2
    @property
    def quarter(self):
        return self.half // 2
    def method(self):
        return self.width
"""
RECORDED = [
    {"n_layer": 2, "width": 32, "bias": False, "eps": 1e-6, "kinds": ["a"], "table": None, "window": 16, "spare": 1},
    {"n_layer": 3, "width": 32, "bias": True, "eps": 1, "kinds": ["b"], "table": {"x": 1}, "window": None, "spare": 2},
]


@pytest.fixture
def config(tmp_path):
    for name, text in (("base", BASE), ("toy", CONFIG)):
        (tmp_path / f"models/{name}").mkdir(parents=True)
        (tmp_path / f"models/{name}/configuration_{name}.py").write_text(text)
    program = Program(toy.FILE, toy.ENTRY, folder=tmp_path) if toy.write(tmp_path, f"class {toy.ENTRY}: pass") else None
    return ConfigClass(program, "models/toy/configuration_toy.py", "ToyConfig")


def written(config, attributes, recorded=RECORDED):
    """(the class that the lines make, the lines)."""
    lines = config.lines("ToyConfig", attributes, recorded)
    scope = {"dataclasses": dataclasses, "TranslatedConfig": TranslatedConfig, "ClassVar": ClassVar, "Mapping": Mapping}
    exec("\n".join(["@dataclasses.dataclass(frozen=True, kw_only=True)", "class ToyConfig(TranslatedConfig):", *lines]), scope)
    return scope["ToyConfig"], lines


def test_only_what_is_read_is_a_field_with_the_references_default(config):
    made, lines = written(config, dict.fromkeys(["width", "bias", "eps", "window", "kinds", "table"]))
    own = made()
    assert (own.width, own.bias, own.eps, own.window, own.kinds, own.table) == (32, False, 1e-6, 16, ("a", "b"), None)
    text = "\n".join(lines)
    assert "spare" not in text and "n_layer" not in text and "half" not in text
    assert "    width: int = 32" in lines and "    bias: bool = False" in lines and "    window: int | None = 16" in lines
    assert "    eps: float = 1e-06" in lines and "    table: Mapping | None = None" in lines


def test_other_spellings_are_aliases(config):
    made, _ = written(config, {"num_layers": None, "width": None})
    assert made.ALIASES == {"num_layers": "n_layer"} and made().num_layers == 2
    plain, _ = written(config, {"width": None})
    assert not plain.__dict__.get("ALIASES")


def test_properties_come_with_what_they_read(config):
    made, lines = written(config, {"quarter": None})
    assert made().quarter == 8 and "    width: int = 32" in lines and "Half" not in "\n".join(lines)
    assert not any("def method" in line for line in lines)


def test_a_property_that_a_checkpoint_gives_is_a_field(config):
    _, lines = written(config, {"half": None}, [{"half": 7}, {"half": 9}])
    assert lines == ["    half: int = None"]


def test_the_default_of_getattr_wins(config):
    import ast

    made, _ = written(config, {"absent": ast.Constant(3), "width": ast.Constant(5)})
    assert (made().absent, made().width) == (3, 5)


def test_keys_that_nothing_reads_are_listed_with_the_reason(config):
    config.lines("ToyConfig", {"width": None, "half": None}, RECORDED)
    text = "\n".join(config.irrelevant({"bias": ["modeling_x.py:7 `self.bias = config.bias`", "modeling_x.py:9 `if config.bias`"]}, RECORDED))
    assert (
        "'bias': 'read at modeling_x.py:7 `self.bias = config.bias` and 1 more: no logit" in text and "'spare': \"the reference's code never reads it\"" in text
    )
    assert "'width'" not in text
    config.lines("ToyConfig", dict.fromkeys(RECORDED[0]), RECORDED)
    assert config.irrelevant({}, [{"width": 1}]) == []
