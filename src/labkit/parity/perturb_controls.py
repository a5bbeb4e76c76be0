"""Planted faults: ports that are wrong in one known way, each of which a spec must catch. A spec that lets its fault pass proves nothing."""

import contextlib
import sys
from collections.abc import Iterator

import numpy as np

from labkit.errors import LabError
from labkit.parity.perturb_config import check_config
from labkit.parity.perturb_inputs import check_input, windows
from labkit.parity.perturb_parameters import check_parameter
from labkit.parity.perturb_spec import ALIKE, Control, PerturbSpec, Row
from labkit.parity.perturb_subject import MOVES, Subject, fresh_call, moved
from labkit.parity.perturb_values import ORIGINAL


def controls(subject: Subject, specs: list[PerturbSpec], seed: int, *, full: bool = False) -> Iterator[Control]:
    """One fault of each kind, planted and tried on the specs of that kind; with `full` also those whose wrong model must be compiled."""
    parameter = next((spec for spec in specs if spec.kind == "parameter" and spec.follows == ALIKE), None)
    if parameter is not None:
        yield _told("parameter", f"our {parameter.target} keeps its value", check_parameter(subject, parameter, seed, frozen=True))
    key = next((spec for spec in specs if spec.kind == "config" and spec.change), None)
    if key is not None:
        yield _told("config", f"our config view ignores {key.target}", check_config(subject, key, ignored=True))
    probes = {spec.target: spec for spec in specs if spec.kind == "input"}
    if "segments" in probes:
        yield _told("input", "segments are not told apart", check_input(subject, probes["segments"], ours=lambda tokens, segments=None: subject.ours(tokens)))
    if not full:
        return
    if "padding" in probes:
        yield _told("input", "padding is read like any token", check_input(subject, probes["padding"], ours=lambda tokens, segments=None: subject.ours(tokens)))
    if "causality" in probes:
        yield _told("input", *_ahead(subject, probes["causality"]))
    for name, size in windows(subject.source.config.effective).items():
        spec = next((spec for spec in specs if spec.target == "window" and name in spec.change), None)
        if spec is not None:
            yield from _shifted_windows(subject, spec, name, size)
    past = [spec for spec in specs if spec.target == "rope" and "config" in (spec.change or {}) and spec.change["length"] > ORIGINAL]
    for spec in past[:1]:
        yield _told("input", "the rope table of another type is not used", check_input(subject, spec, ours=lambda tokens, model=None: subject.ours(tokens)))


def _told(kind: str, fault: str, row: Row) -> Control:
    """A row that failed by comparison caught the fault; one that could not be tried did not."""
    name = row.spec.target if row.spec.kind == "input" else f"{row.spec.kind} {row.spec.target}"
    return Control(kind, fault, name if not row.passed and row.value is not None else "", row.value)


def _ahead(subject: Subject, spec: PerturbSpec) -> tuple[str, Row]:
    """A mask that is off by one where there is a mask; where nothing is masked, logits handed out one position too early."""
    call = fresh_call()
    with mask_off_by_one(subject):
        wrong = subject.ours(call=call)
    if moved(wrong, subject.plain_ours) > MOVES:
        return "the causal mask is off by one", check_input(subject, spec, ours=lambda tokens, segments=None: subject.ours(tokens, segments, call=call))
    early = lambda tokens, segments=None: np.roll(subject.ours(tokens, segments), -1, axis=1)
    return "logits come one position early", check_input(subject, spec, ours=early)


@contextlib.contextmanager
def mask_off_by_one(subject: Subject):
    """While models are traced, every query sees one key too many."""
    import dataclasses

    places = [m for m in (sys.modules.get("labkit.layers.decoding"), sys.modules.get(subject.family.model.__module__)) if hasattr(m, "locate_tokens")]
    before = {module: module.locate_tokens for module in places}

    def shifted(locate):
        def located(*arguments, **named):
            tokens, cache = locate(*arguments, **named)
            return dataclasses.replace(tokens, key_slots=tokens.key_slots - np.int32(1)), cache

        return located

    for module, locate in before.items():
        module.locate_tokens = shifted(locate)
    try:
        yield
    finally:
        for module, locate in before.items():
            module.locate_tokens = locate


def _shifted_windows(subject: Subject, spec: PerturbSpec, key: str, size: int) -> Iterator[Control]:
    """The window one too long and one too short, where the reference reads it at all."""
    for other in (size + 1, size - 1):
        directory = subject.variant(config={key: other})
        if moved(subject.theirs(at=directory), subject.plain_theirs) <= MOVES:
            continue
        try:
            model, _ = subject.load_ours(directory)
        except LabError:
            continue
        row = check_input(subject, spec, ours=lambda tokens, segments=None: subject.ours(tokens, segments, model=model))
        yield _told("input", f"{key} is {other} instead of {size}", row)
