"""The notebooks hold no outputs and no logic."""

import ast
import inspect

import nbformat
import pytest

from labkit import lab
from labkit.lab.phases import PHASES, phase_class
from labkit.lab.places import PACKAGE
from labkit.lab.runner import read_parameters

FOLDER = PACKAGE.parents[1] / "notebooks"
LONGEST_CELL = 4


def faults(notebook, longest: int = LONGEST_CELL) -> list[str]:
    """What a notebook must not have: stored outputs or counts, other than one parameters cell, long cells, anything but labkit calls."""
    code = [c for c in notebook.cells if c.cell_type == "code"]
    tagged = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    found = [] if len(tagged) == 1 else [f"{len(tagged)} parameters cells"]
    for cell in code:
        if cell.outputs or cell.execution_count is not None:
            found.append(f"outputs are stored: {cell.source[:40]}")
        if cell in tagged:
            continue
        if len(cell.source.splitlines()) > longest:
            found.append(f"a cell of {len(cell.source.splitlines())} lines")
        allowed = (ast.Expr, ast.Assign, ast.ImportFrom)
        found += [f"logic in a cell: {cell.source[:40]}" for node in ast.parse(cell.source).body if not isinstance(node, allowed)]
    if notebook.cells[0].cell_type != "markdown" or not notebook.cells[0].source.startswith("# "):
        found.append("it does not open with what the phase does")
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if cell.cell_type == "code" and before.cell_type != "markdown":
            found.append(f"a cell without a word before it: {cell.source[:40]}")
    return found


@pytest.fixture(params=PHASES)
def phase(request):
    number = request.param
    path = FOLDER / f"{number:02}_{PHASES[number]}.ipynb"
    return number, path, nbformat.read(path, as_version=4)


def test_it_is_thin_and_stripped(phase):
    assert faults(phase[2]) == []


def test_its_parameters_are_the_phase_s_own(phase):
    number, path, notebook = phase
    parameters = read_parameters(path)
    signature = inspect.signature(phase_class(number).__init__).parameters
    assert {name: default for name, (_, default) in parameters.items() if name != "model"} == {
        n: p.default for n, p in signature.items() if n not in ("self", "model")
    }
    call = next(c.source for c in notebook.cells if "phase = lab." in c.source)
    (made,) = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
    assert {k.arg: k.value.id for k in made.keywords} == {name: name for name in parameters}
    assert hasattr(lab, made.func.attr) and made.func.attr == PHASES[number]


def test_its_cells_are_the_phase_s_cells_in_order(phase):
    number, _, notebook = phase
    called = [c.source.removeprefix("phase.").removesuffix("()") for c in notebook.cells if c.cell_type == "code" and c.source.startswith("phase.")]
    assert called == [*phase_class(number).cells, "finish"]


@pytest.mark.parametrize("number", PHASES)
def test_every_cell_of_a_phase_is_marked(number):
    cls = phase_class(number)
    assert all(getattr(getattr(cls, name), "is_cell", False) for name in cls.cells)


@pytest.mark.parametrize("damage", ["output", "count", "two", "none", "long", "logic", "opening"])
def test_the_check_sees_a_fault(damage):
    notebook = nbformat.read(FOLDER / "01_discover.ipynb", as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    if damage == "output":
        code[1].outputs = [nbformat.v4.new_output("stream", text="x")]
    elif damage == "count":
        code[1].execution_count = 3
    elif damage == "two":
        code[1].metadata["tags"] = ["parameters"]
    elif damage == "none":
        code[0].metadata["tags"] = []
    elif damage == "long":
        code[1].source = "\n".join(["x = 1"] * (LONGEST_CELL + 1))
    elif damage == "logic":
        code[1].source = "for i in range(3):\n    print(i)"
    else:
        notebook.cells.pop(0)
    assert faults(notebook)
