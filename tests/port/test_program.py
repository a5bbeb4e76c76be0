"""Names of modeling files: what they mean, across files and through bases, without importing anything."""

import ast

import pytest

from labkit.errors import InputError
from labkit.port.program import Program, Symbol, clone, node_key
from tests.port import toy

BASE = """
import math
from torch import nn
from ...activations import ACT2FN
from ..toy.modeling_toy import ToyForCausalLM as Twin
LIMIT = 4
try:
    import fast
except ImportError:
    fast = None
class Norm(nn.Module):
    eps = 1e-6
    def forward(self, x):
        return x
class Block(Norm):
    scale: float = 2.0
    def forward(self, x):
        return self.norm(x)
"""
TOY = """
from torch import nn
from ..base.modeling_base import Block as BaseBlock, LIMIT
from ..missing.modeling_missing import Gone
from .configuration_toy import ToyConfig
class ToyBlock(BaseBlock, nn.Module):
    eps = 1e-5
class ToyForCausalLM(ToyBlock):
    def extra(self):
        return LIMIT
def helper(x): return x
"""


@pytest.fixture
def program(tmp_path):
    made = toy.program(tmp_path, TOY)
    base = tmp_path / "models/base/modeling_base.py"
    base.parent.mkdir(parents=True)
    base.write_text(BASE)
    return made


def test_names_are_resolved_across_files_and_renames(program):
    assert program.resolve(toy.FILE, "BaseBlock") == Symbol("class", "models/base/modeling_base.py", "Block")
    assert program.resolve(toy.FILE, "LIMIT") == Symbol("value", "models/base/modeling_base.py", "LIMIT")
    assert program.resolve(toy.FILE, "helper") == Symbol("function", toy.FILE, "helper")
    assert program.resolve("models/base/modeling_base.py", "Twin") == Symbol("class", toy.FILE, toy.ENTRY)
    assert program.resolve("models/base/modeling_base.py", "ACT2FN") == Symbol("external", "activations", "ACT2FN")
    assert program.resolve(toy.FILE, "ToyConfig") == Symbol("external", "models/toy/configuration_toy", "ToyConfig")


def test_names_that_lead_nowhere_are_said_to(program):
    assert program.resolve(toy.FILE, "Gone").kind == "external"
    assert program.resolve(toy.FILE, "nobody") == Symbol("unknown", toy.FILE, "nobody")


def test_methods_and_class_values_are_found_as_python_would(program):
    owner, node = program.method(toy.FILE, toy.ENTRY, "forward")
    assert owner.name == "Block" and ast.unparse(node.body[0]) == "return self.norm(x)"
    assert [b.name for b in program.bases(toy.FILE, toy.ENTRY)] == ["ToyBlock", "Block", "Norm"]
    assert ast.unparse(program.class_value(toy.FILE, toy.ENTRY, "eps")) == "1e-05"
    assert ast.unparse(program.class_value(toy.FILE, toy.ENTRY, "scale")) == "2.0"
    assert program.method(toy.FILE, toy.ENTRY, "absent") is None and program.class_value(toy.FILE, toy.ENTRY, "absent") is None
    assert "nn.Module" in program.base_names(toy.FILE, toy.ENTRY)


def test_functions_by_key(program):
    assert program.function(f"{toy.FILE}::helper").name == "helper"
    assert program.function(f"{toy.FILE}::{toy.ENTRY}.forward").name == "forward"
    for key in (f"{toy.FILE}::ToyBlock", f"{toy.FILE}::nobody", "models/none/modeling_none.py::f", f"{toy.FILE}::{toy.ENTRY}.absent"):
        assert program.function(key) is None


def test_every_node_knows_its_place_and_keeps_it_when_copied(program):
    call = next(n for n in ast.walk(program.file("models/base/modeling_base.py").tree) if isinstance(n, ast.Call))
    assert call.origin == ("models/base/modeling_base.py", node_key(call)) and clone(call).origin == call.origin
    assert not hasattr(ast.Constant(1), "origin")


def test_an_entry_that_the_file_does_not_define_is_an_error(program):
    with pytest.raises(InputError, match="does not define Other"):
        Program(toy.FILE, "Other", folder=program.folder)
