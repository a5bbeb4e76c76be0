"""The translator special-cases no family: no literal or identifier in `port/` is a model type or a class prefix."""

import ast
import re
from pathlib import Path

import labkit.port
from labkit.hf.architectures import causal_lm_classes, config_classes
from labkit.port.source_tree import _ENDINGS

FOLDER = Path(labkit.port.__file__).parent

ORDINARY = {
    "clip": "torch's operation of that name (ops.py) and a component's name for clipping",
    "mamba": "the attribute under which hybrid decoders keep their state-space module, in tables of component and axis names",
}
"""Model types and prefixes that are ordinary words, each with where it stands and why that is not the family."""


def prefixes() -> set[str]:
    """`SeedOss` of `SeedOssForCausalLM`, of every causal LM."""
    found = set()
    for name in causal_lm_classes().values():
        for ending in _ENDINGS:
            if name.endswith(ending):
                found.add(name.removesuffix(ending))
                break
    return {p for p in found if p}


def words(text: str) -> set[str]:
    """Identifiers and string literals of a module's code, docstrings aside."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.add(node.value)
            found |= set(re.findall(r"[A-Za-z0-9_\-]+", node.value))
    return found


def named(text: str, types: set[str], classes: set[str]) -> set[str]:
    """Words that are a model type, or that begin with a class prefix of its own case."""
    found = set()
    for word in words(text):
        if word in types or word.replace("-", "_") in types:
            found.add(word)
        found |= {word for prefix in classes if word == prefix or re.match(rf"{prefix}(?=[A-Z])", word)}
    return found


def test_no_pass_names_a_family():
    types, classes = set(config_classes()), prefixes()
    problems = {}
    for file in sorted(FOLDER.rglob("*.py")):
        found = named(file.read_text(), types, classes) - set(ORDINARY)
        if found:
            problems[file.name] = sorted(found)
    assert not problems


def test_the_test_sees_a_named_family():
    types, classes = set(config_classes()), prefixes()
    assert named('if model_type == "seed_oss":\n    pass', types, classes) == {"seed_oss"}
    assert named("x = SeedOssAttention", types, classes) == {"SeedOssAttention"}
    assert not named('"""seed_oss in a docstring."""\nx = 1', types, classes)
