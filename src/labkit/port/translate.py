"""From a model type to a slice: the passes in order, and what they made."""

import ast
import dataclasses
import hashlib

from labkit.errors import BlockedError
from labkit.hf.architectures import transformers_folder
from labkit.hf.parallel_plan import tensor_parallel_plan
from labkit.port.carried_state import carry_states
from labkit.port.context import Context
from labkit.port.emit import emit_modeling
from labkit.port.facts import Facts
from labkit.port.first_call import changes_to_layers
from labkit.port.fold import Folder
from labkit.port.grouped import mark_expert_loops, mark_split_loops
from labkit.port.initial_state import start_from_state
from labkit.port.last_rows import rows_by_slot
from labkit.port.layer_index import index_from_handle
from labkit.port.local_experts import find_local_experts
from labkit.port.mutated import mark_mutations
from labkit.port.own_cache import layer_states
from labkit.port.own_casts import casts_to_locals
from labkit.port.own_state import states_to_cache
from labkit.port.program import Program, Symbol
from labkit.port.reported import mark_reports
from labkit.port.slice_files import head_ties, package_text, rules_text, utils_text
from labkit.port.source_tree import source_tree
from labkit.port.spine import find_spine, runs_apart
from labkit.port.starred import expand_starred
from labkit.port.static_lengths import count_by_capacity
from labkit.port.trim import Trimmer
from labkit.port.values import VARIES, Const

TRANSLATOR_VERSION = "1"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A construct that has no translation. where: "file:line" in the reference. component: the class and method."""

    construct: str
    where: str
    component: str
    advice: str = ""


@dataclasses.dataclass
class Translation:
    """What the translator made of one architecture. files: name -> text. unproven: (where, text) of branches that no configuration ran. sources: file ->
    sha256 of what was read. fingerprint: of the classes and functions reached. unusual: what a reader should know first."""

    family: str
    files: dict[str, str]
    refusals: list[Refusal]
    unproven: list[tuple[str, str]]
    sources: dict[str, str]
    fingerprint: str
    transformers_version: str
    unusual: list[str]


def translate(source, *, record=None, progress=None) -> Translation:
    """The slice of a source, or of a model type of the installed transformers.

    record: what runs of the reference have shown (`hf.source_record`), made here when it is not given. Raises BlockedError when the reference has no class for
    it.
    """
    model_type = source if isinstance(source, str) else source.config.model_type
    tree = source_tree(model_type)
    path = tree.file.relative_to(transformers_folder()).as_posix()
    if record is None:
        record = record_of(model_type)
    program, facts = Program(path, tree.entry), Facts(record)
    folder = Folder(program, facts)
    folder.by_index = runs_apart(program, facts)
    entry = program.method(path, tree.entry, "forward")
    if entry is None:
        raise BlockedError(f"{tree.entry} has no forward", path)
    entry_key = f"{entry[0].key}.forward"
    functions = folder.run(entry_key, program.entry)
    init = program.method(path, tree.entry, "__init__")
    folder.add(f"{init[0].key}.__init__", {"config": VARIES})
    ropes = _rope_classes(program, functions)
    for symbol in ropes:
        if program.method(symbol.file, symbol.name, "compute_default_rope_parameters"):
            folder.add(f"{symbol.key}.compute_default_rope_parameters", {"device": Const(None), "seq_len": Const(None)})
    _tables_once(program, functions, ropes)
    spine = find_spine(program, facts, functions)
    entries = {entry_key}
    trimmer = Trimmer(functions, facts, entries)
    trimmer.keep_caches = {f"{program.method(lv.symbol.file, lv.symbol.name, 'forward')[0].key}.forward" for lv in spine.levels}
    for folded in functions.values():
        mark_expert_loops(folded)
        mark_split_loops(folded, facts)
    rows_by_slot(functions)
    states_to_cache(program, functions)
    layer_states(program, functions)
    carry_states(functions, entry_key)
    labels = index_from_handle(program, functions, spine) + changes_to_layers(functions, spine)
    count_by_capacity(functions)
    expand_starred(functions)
    casts_to_locals(functions)
    reports = mark_reports(program, functions)
    start_from_state(functions)
    mark_mutations(functions, facts)
    trimmer.run()
    context = Context(program, facts, functions, spine, trimmer)
    context.reports = reports
    context.labels += labels
    context.heads = head_ties(context)
    context.local_experts = find_local_experts(context)
    context.parallel_plan = tensor_parallel_plan(model_type)
    context.ropes = {s.key for s in ropes}
    context.config_class = tree.config_class.name if tree.config_class is not None else None
    text, refusals = emit_modeling(context, model_type, tree, entry_key)
    files = {
        f"modeling_{_slug(model_type)}.py": text,
        f"checkpoint_mappings_{_slug(model_type)}.py": rules_text(context, model_type, tree),
        f"utils_{_slug(model_type)}.py": utils_text(context, model_type),
        "__init__.py": package_text(context, model_type, tree),
    }
    digest = hashlib.sha256()
    for key in sorted(functions):
        digest.update(ast.dump(functions[key].original).encode())
    return Translation(
        model_type,
        files,
        refusals,
        context.unproven + [(r.where, f"{r.construct}: not translated, this branch raises") for r in context.branch_refusals],
        {p: program.file(p).sha256 for p in sorted(program.files)},
        digest.hexdigest()[:16],
        tree_version(),
        context.unusual,
    )


def _slug(model_type: str) -> str:
    return model_type.replace("-", "_")


def tree_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def record_of(model_type: str):
    """The record of the configurations that together run the optional branches of a type: here when this process has torch already, else in one of its own."""
    import sys

    from labkit.hf.source_record import record_sources, record_sources_here

    return (record_sources_here if "torch" in sys.modules else record_sources)([f"variants:{model_type}"])


def _tables_once(program, functions, ropes) -> None:
    """A rope class that computes its table anew in forward gets the one that `rope_init` makes for the call's positions."""
    for symbol in ropes:
        found = program.method(symbol.file, symbol.name, "forward")
        folded = functions.get(f"{found[0].key}.forward") if found else None
        for node in ast.walk(folded.node) if folded else ():
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func) in ("self.rope_init_fn", "self.compute_default_rope_parameters")
            ):
                node.value = ast.parse("(self.inv_freq, self.attention_scaling)", mode="eval").body


def _rope_classes(program, functions) -> list[Symbol]:
    """Classes whose constructor chooses among transformers' rope types."""
    found = []
    for folded in list(functions.values()):
        if folded.cls and folded.node.name == "__init__" and any(isinstance(n, ast.Name) and n.id == "ROPE_INIT_FUNCTIONS" for n in ast.walk(folded.original)):
            found.append(Symbol("class", folded.file, folded.cls))
    return found
