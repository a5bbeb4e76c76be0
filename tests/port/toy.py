"""Modeling files that tests write, as programs of the translator, with a record of what runs of them showed where a test needs one."""

import ast
import textwrap
import types
from pathlib import Path

from labkit.hf.source_record import SourceRecord
from labkit.port.context import Context
from labkit.port.facts import Facts
from labkit.port.fold import VARIES, Const, Folder
from labkit.port.program import Program, Symbol
from labkit.port.spine import Level, Spine
from labkit.port.trim import Trimmer

FILE = "models/toy/modeling_toy.py"
ENTRY = "ToyForCausalLM"


def write(folder: Path, text: str) -> Path:
    """The text as the toy's modeling file below `folder`, which stands for the transformers package."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def program(folder: Path, text: str) -> Program:
    """A program of the one file."""
    write(folder, text)
    return Program(FILE, ENTRY, folder=folder)


def fold(folder: Path, text: str, record: SourceRecord | None = None) -> tuple[dict, Folder]:
    """(functions that the entry's forward reaches, by qualified name; the folder), the constructor of the entry among them."""
    made = program(folder, text)
    folder_ = Folder(made, Facts(record or SourceRecord()))
    functions = folder_.run(f"{FILE}::{ENTRY}.forward", made.entry)
    if made.method(FILE, ENTRY, "__init__"):
        folder_.add(f"{FILE}::{ENTRY}.__init__", {"config": VARIES})
    return {key.partition("::")[2]: folded for key, folded in functions.items()}, folder_


def trim(folder: Path, text: str, record: SourceRecord | None = None) -> dict:
    """Folded and trimmed functions by qualified name."""
    functions, folder_ = fold(folder, text, record)
    Trimmer(folder_.functions, folder_.facts, {f"{FILE}::{ENTRY}.forward"}).run()
    return functions


def text_of(folded) -> str:
    """A folded function as text."""
    return ast.unparse(ast.fix_missing_locations(folded.node))


def observe(folder: Path, text: str, run) -> SourceRecord:
    """The record of `run(module)` on an instrumented copy of the file."""
    from labkit.hf.instrument import instrument
    from labkit.hf.observer import Observer

    path, observer = write(folder, text), Observer()
    observer.files[str(path)] = FILE
    tree = instrument(ast.parse(path.read_text()), lambda what, key: observer.allocate(FILE, what, key))
    module = types.ModuleType("transformers." + FILE.removesuffix(".py").replace("/", "."))
    vars(module).update(observer.names())
    exec(compile(tree, str(path), "exec"), vars(module))
    run(module)
    record = SourceRecord()
    for name, table in observer.tables().items():
        setattr(record, name, table)
    return record


def context(made: Program, record: SourceRecord, names, arguments: dict | None = None) -> Context:
    """What the rewriting needs to know of the functions `names` of the file, folded and trimmed, their parameters kept."""
    facts = Facts(record)
    folder = Folder(made, facts)
    for name in names:
        folder.add(f"{FILE}::{name}", {k: Const(v) for k, v in (arguments or {}).items()})
    trimmer = Trimmer(folder.functions, facts, {f"{FILE}::{name}" for name in names})
    trimmer.run()
    found = Context(made, facts, folder.functions, Spine((Level("", Symbol("class", FILE, ENTRY)),), None), trimmer)
    found.reports, found.heads, found.parallel_plan, found.ropes, found.config_class = {}, {}, {}, set(), None
    return found
