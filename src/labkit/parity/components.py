"""The component checklist, filled by measurement: each part of a decoder against the reference's own module, isolated and in a free run."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from labkit.errors import InputError
from labkit.parity.citation import cite
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
    """One row of the checklist. isolated, free: worst relative errors and where; compared: how many places; reference, ours: file:line."""

    kind: str
    isolated: float
    isolated_at: str
    free: float
    free_at: str
    compared: int
    reference: str
    ours: str
    passed: bool


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
                _cite_reference(kind, worst, reference),
                _cite_ours(kind, worst, isolated),
                worst.error <= limit,
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


def cite_sides(fault: Fault, reference, recording) -> tuple[str, str]:
    """file:line of the code that made the value of a place: the reference's and ours."""
    return _cite_reference(fault.kind, fault, reference), _cite_ours(fault.kind, fault, recording)


def _owner(fault: Fault, classes: Mapping[str, type]):
    """The class whose code made the value of a place: the module itself, or the one around it."""
    name = fault.place.split("#")[0]
    if fault.what == "input":
        name = name.rpartition(".")[0]
        name = name.rpartition(".")[0] if name.rpartition(".")[2] == "layers" else name
    while name and name not in classes:
        name = name.rpartition(".")[0]
    return classes.get(name)


def _cite_reference(kind: str, fault: Fault, reference) -> str:
    function = reference.functions.get(fault.place) if fault.what == "output" else None
    if function is not None:
        return cite(function)
    cls = _owner(fault, reference.classes) or reference.model_class
    # torch's own Linear says nothing about the model: cite the class that holds it.
    if cls.__module__.startswith("torch."):
        holder = _owner(Fault(fault.place, "input", kind, fault.error), reference.classes) or reference.model_class
        cls = holder if not holder.__module__.startswith("torch.") else cls
    return cite(cls, "forward")


def _cite_ours(kind: str, fault: Fault, recording) -> str:
    if fault.what == "output" and fault.place in recording.places:
        return recording.places[fault.place]
    cls = _owner(fault, recording.classes) or recording.model_class
    if cls.__module__.startswith("flax."):
        cls = _owner(Fault(fault.place, "input", kind, fault.error), recording.classes) or recording.model_class
    return cite(cls, "__call__")
