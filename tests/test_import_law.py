"""The floor plan's arrows run downward only, read from the source of every file."""

import ast
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
FLOORS = ("errors", "hf", "layers", "models", "converters", "train", "scale", "parity", "port", "lab", "cli")
ONLY_HF = {"torch", "transformers", "tokenizers"}
LIGHT = {"layers": {"hf"}, "models": {"hf"}}


def imported(text: str, package: list[str]) -> list[tuple[str, int]]:
    """(module, line) of every import statement, relative ones resolved, nested ones included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found += [(name, node.lineno), *((f"{name}.{alias.name}", node.lineno) for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append((str(node.args[0].value), node.lineno))
    return found


def broken(text: str, relative: Path) -> list[str]:
    """The law's breaches in a file that lies at `relative` under src/labkit."""
    floor = relative.parts[0].removesuffix(".py")
    if floor == "__init__":
        floor = "errors"
    breaches = []
    for module, line in imported(text, ["labkit", *relative.with_suffix("").parts[:-1]]):
        parts = module.split(".")
        if parts[0] in ONLY_HF and floor != "hf":
            breaches.append(f"{relative}:{line} imports {parts[0]}, which only hf may")
        if parts[0] == "labkit" and len(parts) > 1 and parts[1] in FLOORS:
            if FLOORS.index(parts[1]) > FLOORS.index(floor) or parts[1] in LIGHT.get(floor, ()):
                breaches.append(f"{relative}:{line} ({floor}) imports {module}")
    return breaches


def test_every_file_lies_on_a_floor():
    floors = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")} - {"__init__"}
    assert floors <= set(FLOORS), floors - set(FLOORS)


def test_imports_run_downward_only():
    breaches = [b for path in sorted(ROOT.rglob("*.py")) for b in broken(path.read_text(encoding="utf-8"), path.relative_to(ROOT))]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("models/llama/modeling_llama.py", "from labkit.hf import open_source"),
        ("models/llama/modeling_llama.py", "def f():\n    import torch"),
        ("layers/rope.py", "from labkit import models"),
        ("layers/rope.py", "from ..models import registry"),
        ("layers/rope.py", "import importlib\nimportlib.import_module('labkit.parity')"),
        ("hf/source.py", "from labkit.layers.plan import LayerPlan"),
        ("parity/verdicts.py", "import transformers"),
        ("converters/rules.py", "import labkit.lab.records"),
    ],
)
def test_the_check_sees_a_breach(relative, text):
    assert broken(text, Path(relative))


@pytest.mark.parametrize(
    ("relative", "text"), [("hf/reference.py", "import torch"), ("lab/runner.py", "from labkit.hf import open_source"), ("cli.py", "import click")]
)
def test_the_check_accepts_what_the_law_allows(relative, text):
    assert broken(text, Path(relative)) == []
