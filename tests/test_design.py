"""DESIGN.md lists every file of the package with the first line of its docstring. `python tests/test_design.py` writes the list anew."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "labkit"
DESIGN, HEADING = PACKAGE / "DESIGN.md", "## Every file, one line each\n"


def listing() -> str:
    """One list item per Python file, in floor order."""
    floors = ["errors.py", "hf", "layers", "models", "converters", "train", "scale", "parity", "port", "lab", "cli"]
    files = sorted(PACKAGE.rglob("*.py"), key=lambda path: (floors.index(place) if (place := path.relative_to(PACKAGE).parts[0]) in floors else -1, path))
    lines = []
    for path in files:
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        lines.append(f"- `{path.relative_to(PACKAGE).as_posix()}`: {said}")
    return "\n".join(lines) + "\n"


def test_every_file_has_its_line():
    text = DESIGN.read_text()
    assert HEADING in text and text.partition(HEADING)[2].strip() == listing().strip(), "run python tests/test_design.py"
    assert all(not line.endswith(": ") for line in listing().splitlines()), "a file has no docstring"


if __name__ == "__main__":
    kept = DESIGN.read_text().partition(HEADING)[0].rstrip()
    DESIGN.write_text(f"{kept}\n\n{HEADING}\n{listing()}")
