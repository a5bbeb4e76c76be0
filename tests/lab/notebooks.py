"""Small notebooks that stand for phases: they write records as a phase does, and need no jax."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PARAMETERS = 'model: str = "tiny:qwen3"\nrevision: str = ""\ntrust_remote_code: bool = False\nspeed: int = 1'
BEGIN = """
import os, time
from labkit.lab.places import handovers_dir
from labkit.lab.phases.base import inputs_fingerprint
from labkit.lab.phases import phase_class
from labkit.lab.records import Record, Records, Status, now
from labkit.lab.show import Gate
store = Records(handovers_dir() / "tiny-qwen3")
parameters = dict(model=model, revision=revision, trust_remote_code=trust_remote_code, speed=speed)
record = Record(model=model, slug="tiny-qwen3", family="qwen3", slice="refined", phase={number}, name="{name}", run="",
                source_fingerprint=os.environ["FINGERPRINT"],
                inputs_fingerprint=inputs_fingerprint(phase_class({number}), os.environ["FINGERPRINT"], parameters),
                parameters=parameters)
store.begin(record)
record.cell, record.cell_name = 3, "work"
store.write(record)
"""
END = """
record.gates.append(Gate(name="held", passed={passed}, value=1, limit=1))
record.status, record.end, record.cell = Status.{status}, now(), None
store.write(record)
"""


def write(folder, number, name, work="", passed=True, parameters=PARAMETERS, tags=("parameters",), kernel="python3"):
    """One stand-in notebook for phase `number`; `work` is the code of its middle cell."""
    cells = [
        new_markdown_cell("# stand-in"),
        new_code_cell(parameters, metadata={"tags": list(tags)}),
        new_code_cell(BEGIN.format(number=number, name=name).strip()),
        new_code_cell(work),
        new_code_cell(END.format(passed=passed, status="DONE" if passed else "BLOCKED").strip()),
    ]
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}} if kernel else {}
    folder.mkdir(exist_ok=True)
    path = folder / f"{number:02}_{name}.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path
