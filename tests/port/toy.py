"""Modeling files that tests write, as programs of the translator, with a record of what runs of them showed where a test needs one."""

import ast
import textwrap
import types
from pathlib import Path

from labkit.hf.source_record import SourceRecord
from labkit.port.context import Context
from labkit.port.emit import Emitter
from labkit.port.facts import Facts
from labkit.port.fold import Folder
from labkit.port.program import Program, SourceFile, Symbol, node_key
from labkit.port.rewrite import Needs, Rewriter
from labkit.port.spine import Level, Spine
from labkit.port.trim import Trimmer
from labkit.port.values import VARIES

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


def known(folder: Path, text: str, kinds: dict | None = None, tests: dict | None = None, **more) -> SourceRecord:
    """A record by hand: text of an expression -> the kinds, or the truth values, that every one of that text has."""
    write(folder, text)
    record = SourceRecord(nodes={FILE: {}}, tests={FILE: {}}, **more)
    for node in ast.walk(SourceFile(FILE, folder).tree):
        if isinstance(node, (ast.expr, ast.arg)):
            written = node.arg if isinstance(node, ast.arg) else ast.unparse(node)
            for table, values in ((record.nodes, kinds), (record.tests, tests)):
                if values and written in values:
                    table[FILE][node_key(node)] = values[written]
    return record


def context(made: Program, record: SourceRecord, names, passes=lambda folded, facts: None) -> Context:
    """What the rewriting needs to know of the functions `names` of the file, folded and trimmed, their parameters kept. passes run between the two."""
    facts = Facts(record)
    folder = Folder(made, facts)
    for name in names:
        folder.add(f"{FILE}::{name}", {})
    for folded in folder.functions.values():
        passes(folded, facts)
    trimmer = Trimmer(folder.functions, facts, {f"{FILE}::{name}" for name in names})
    trimmer.run()
    return ready(Context(made, facts, folder.functions, Spine((Level("", Symbol("class", FILE, ENTRY)),), None), trimmer))


def ready(context: Context) -> Context:
    """With what `translate` adds."""
    context.reports, context.heads, context.parallel_plan, context.ropes, context.config_class = {}, {}, {}, set(), None
    return context


def translated(context: Context, name: str) -> str:
    """A function as the slice would have it, with the imports that it asked for. Raises CannotTranslate."""
    context.needs = Needs(context.needs.taken)
    folded = context.functions[f"{FILE}::{name}"]
    body = Rewriter(context, folded).block(folded.node.body, "    ")
    emitter = object.__new__(Emitter)
    emitter.t = context
    own = ["self"] if folded.cls else []
    text = "\n".join([f"def {folded.node.name}({', '.join([*own, *filter(None, [emitter.signature(folded)])])}):", *body])
    return "\n".join([*emitter.imports(), "", text, ""])
