"""The component checklist, filled by measurement: each part of a decoder against the reference's own module, isolated and in a free run."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from labkit.errors import InputError
from labkit.parity.citation import Line, cite, construction, in_slice
from labkit.parity.compare import relative_error

EXACT_LIMIT = 1e-9
KINDS = ("embedding", "rope", "attention", "mlp", "router", "experts", "norms", "block", "final norm", "head")
_BY_CLASS = (
    (re.compile(r"Rotary|RoPE", re.I), "rope"),
    (re.compile(r"Norm"), "norms"),
    (re.compile(r"Router|TopKGate|Gate$"), "router"),
    (re.compile(r"Experts"), "experts"),
    (re.compile(r"Attention|Mixer"), "attention"),
    (re.compile(r"DecoderLayer"), "block"),
    (re.compile(r"MLP|Mlp|Moe|MoE|FeedForward"), "mlp"),
    (re.compile(r"Block$|Layer$"), "block"),
    (re.compile(r"Embedding"), "embedding"),
)


@dataclass(frozen=True)
class Fault:
    """One place beyond the limit. place: a captured name; what: "output" or "input" (what its parent hands it); kind: the component it counts for."""

    place: str
    what: str
    kind: str
    error: float


@dataclass(frozen=True)
class Component:
    """One row of the checklist. isolated, free: worst relative errors and where; compared: how many places; reference, ours: file:line, ours
    always in a slice. statement: what stands there, and through: file:line in the layer that it calls, where one runs."""

    kind: str
    isolated: float
    isolated_at: str
    free: float
    free_at: str
    compared: int
    reference: str
    ours: str
    passed: bool
    statement: str = ""
    through: str = ""


@dataclass(frozen=True)
class ComponentTable:
    """The checklist of one forward. missing: modules of the reference with weights that ours has no record of. extra: names that only ours has.

    first_divergence: the first place, in the reference's order of execution, where the free run leaves the limit. passed: every row holds, nothing missing.
    """

    rows: tuple[Component, ...]
    limit: float
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    isolated_faults: tuple[Fault, ...]
    first_divergence: Fault | None
    free_errors: Mapping[str, float]
    isolated_errors: Mapping[str, float]

    @property
    def passed(self) -> bool:
        return not self.missing and bool(self.rows) and all(row.passed for row in self.rows)

    def as_dict(self) -> dict:
        """Plain data for records."""
        return asdict(self) | {"passed": self.passed}


def kind_of(name: str, classes: Mapping[str, type]) -> str:
    """The component that a captured name counts for, by the class of the module or of its nearest known ancestor."""
    base = name.split("#")[0]
    if base in ("lm_head", "logits"):
        return "head"
    if base.endswith((".q_rope", ".k_rope")):
        return "rope"
    if base.endswith((".indices", ".weights")):
        base = base.rpartition(".")[0]
    while base:
        cls = classes.get(base)
        if cls is not None:
            for pattern, kind in _BY_CLASS:
                if pattern.search(cls.__name__):
                    return "final norm" if kind == "norms" and not re.search(r"\.\d+\.", f".{base}.") else kind
        if base.rpartition(".")[2] == "gate" and any(re.search("Moe|MoE", c.__name__) for c in [classes.get(base.rpartition(".")[0])] if c):
            return "router"
        base = base.rpartition(".")[0]
    return "head" if name.startswith(("lm_head", "embed_out", "output")) else "block"


def tail(place: str) -> str:
    """A place without its numbers: what is the same in every layer."""
    return ".".join(part for part in place.split(".") if not part.isdigit())


def input_kind(name: str, classes: Mapping[str, type]) -> str:
    """The component whose code made the input of module `name`: the module around it, or the stage before it in the stack."""
    base, parent = name.split("#")[0], name.split("#")[0].rpartition(".")[0]
    if base == "lm_head":
        return "head"
    if re.fullmatch(r".*\b0", base) and kind_of(base, classes) == "block":
        return "embedding"
    if kind_of(base, classes) in ("block", "final norm") or not parent:
        return "block"
    return kind_of(parent, classes)


def place_errors(ours: Mapping, reference: Mapping, mask=None) -> dict[str, float]:
    """Relative error of every name that both have, padding left out; infinity where the sizes differ. mask: [batch, length], 0 is padding.

    A choice of experts is compared expert by expert: in which order `topk` gives them is nobody's business (`sorted=False`)."""
    ours, reference = _by_expert(ours), _by_expert(reference)
    return {name: _error(ours[name], reference[name], mask) for name in reference if name in ours}


def _by_expert(values: Mapping) -> Mapping:
    """The values with every router's choice, indices and weights together, in ascending order of the experts."""
    out = dict(values)
    for name, chosen in values.items():
        weights = values.get(f"{name.removesuffix('.indices')}.weights") if name.endswith(".indices") else None
        if weights is not None and np.shape(weights) == np.shape(chosen):
            order = np.argsort(np.asarray(chosen), -1, kind="stable")
            out[name] = np.take_along_axis(np.asarray(chosen), order, -1)
            out[f"{name.removesuffix('.indices')}.weights"] = np.take_along_axis(np.asarray(weights), order, -1)
    return out


def _error(ours, reference, mask) -> float:
    ours, reference = np.asarray(ours), np.asarray(reference)
    if reference.shape[:1] == (1,) and reference.shape[1:] == ours.shape[1:]:
        reference = np.broadcast_to(reference, ours.shape)  # what is alike in every row (positions, tables) the reference makes once
    if ours.size != reference.size:
        return float("inf")
    if np.issubdtype(reference.dtype, np.integer):
        reference = reference.astype(np.float64)
    where = None
    if mask is not None:
        mask = np.asarray(mask, bool)
        if reference.shape[:2] == mask.shape:
            where = mask
        elif reference.shape[0] == mask.size:
            where = mask.reshape(-1)
    try:
        return relative_error(ours.reshape(reference.shape), reference, where)
    except InputError:
        return float("inf")


def comparable(name: str, classes) -> bool:
    """Parts that are no module of ours by design: activations and the table-making rotary module (its effect is measured on q and k)."""
    cls = classes.get(name.split("#")[0])
    return cls is None or not re.search(r"Rotary|Activation|SiLU|GELU|Dropout|Identity", cls.__name__)


def compare_components(free, isolated, reference, *, mask=None, limit: float = EXACT_LIMIT) -> ComponentTable:
    """The checklist from our free and isolated recordings and the reference's capture, all of the same tokens.

    isolated: a recording with `inject=reference`. Each place is judged twice there: what a module makes of the reference's input, and what the code around
    it hands to it. mask: int or bool [batch, length], 0 is padding.
    """
    classes = reference.classes
    free_errors = place_errors(free, reference.outputs, mask)
    outputs = place_errors(isolated, reference.outputs, mask)
    whole = {name for name, value in reference.inputs.items() if np.issubdtype(np.asarray(value).dtype, np.integer)}
    inputs = place_errors(isolated.inputs, {n: v for n, v in reference.inputs.items() if n not in whole and comparable(n, classes)}, mask)
    judged = [Fault(n, "output", kind_of(n, classes), e) for n, e in outputs.items()] + [
        Fault(n, "input", input_kind(n, classes), e) for n, e in inputs.items()
    ]
    rows = []
    for kind in KINDS:
        own = [fault for fault in judged if fault.kind == kind]
        if not own:
            continue
        worst = max(own, key=lambda fault: fault.error)
        free_own = {n: e for n, e in free_errors.items() if kind_of(n, classes) == kind}
        free_at = max(free_own, key=free_own.get, default="")
        rows.append(
            Component(
                kind,
                worst.error,
                worst.place + (" (input)" if worst.what == "input" else ""),
                free_own.get(free_at, worst.error),
                free_at,
                len(own),
                cite_reference(worst, reference),
                *_split(cite_ours(worst, isolated), worst.error <= limit),
            )
        )
    missing = sorted(n for n in reference.weighted if n in reference.outputs and n not in isolated and comparable(n, classes))
    order = [n for n in reference.outputs if free_errors.get(n, 0.0) > limit]
    first = Fault(order[0], "output", kind_of(order[0], classes), free_errors[order[0]]) if order else None
    faults = tuple(
        sorted(
            (fault for fault in judged if fault.error > limit),
            key=lambda fault: list(reference.outputs).index(fault.place) if fault.place in reference.outputs else -1,
        )
    )
    return ComponentTable(
        tuple(rows),
        limit,
        tuple(missing),
        tuple(sorted(set(free) - set(reference.outputs))),
        faults,
        first,
        free_errors,
        {n: max(outputs.get(n, 0.0), inputs.get(n, 0.0)) for n in outputs | inputs},
    )


def _owner(fault: Fault, classes: Mapping[str, type]):
    """The class whose code made the value of a place: the module itself, or the one around it."""
    name = fault.place.split("#")[0]
    if fault.what == "input":
        name = name.rpartition(".")[0]
        name = name.rpartition(".")[0] if name.rpartition(".")[2] == "layers" else name
    while name and name not in classes:
        name = name.rpartition(".")[0]
    return classes.get(name)


def _split(line: str | Line, passed: bool) -> tuple[str, bool, str, str]:
    """(ours, passed, statement, through) of a row."""
    return (str(line), passed, line.statement, line.through) if isinstance(line, Line) else (line, passed, "", "")


def cite_reference(fault: Fault, reference) -> str:
    """file:line of the reference's function or method that makes the value of a place."""
    function = reference.functions.get(fault.place) if fault.what == "output" else None
    if function is not None:
        return cite(function)
    cls = _owner(fault, reference.classes) or reference.model_class
    # torch's own Linear says nothing about the model: cite the class that holds it.
    if cls.__module__.startswith("torch."):
        holder = _owner(dataclasses.replace(fault, what="input"), reference.classes) or reference.model_class
        cls = holder if not holder.__module__.startswith("torch.") else cls
    return cite(cls, "forward")


def cite_ours(fault: Fault, recording) -> Line | str:
    """The slice's line where the value of a place is made or handed over: never a line of `labkit.layers`, which every slice shares.

    A tagged point: the statement that runs. What a module is given: the statement that calls it. A module of another file than a slice's: where the slice makes
    it, with the numbers that it gets. A module of a slice's own class: its `__call__`.
    """
    if fault.what == "output" and fault.place in recording.places:
        return recording.places[fault.place]
    if fault.what == "input" and fault.place in recording.calls:
        return recording.calls[fault.place]
    cls = _owner(fault, recording.classes) or recording.model_class
    if fault.what == "output" and not _of_slice(cls):
        base, holder = fault.place.split("#")[0], fault.place.split("#")[0].rpartition(".")[0]
        while holder and holder not in recording.classes:
            holder = holder.rpartition(".")[0]
        cls = recording.classes.get(holder, recording.model_class)
        made = construction(cls, base.removeprefix(f"{holder}.").partition(".")[0])
        if made is not None or base in recording.calls:
            return made or recording.calls[base]
    return cite(cls, "__call__")


def _of_slice(cls: type) -> bool:
    """True when the class that defines the call stands in a slice: a slice's class may inherit it from a layer."""
    try:
        return in_slice(inspect.getsourcefile(next((c for c in cls.__mro__ if "__call__" in vars(c)), cls)))
    except TypeError:
        return False
