"""Config keys that change the shapes of tensors: no weights are shared, so each is tried on a tiny checkpoint of its own; both sides must load it and agree."""

import json
from collections.abc import Iterator

from labkit.errors import InputError
from labkit.hf.tiny import parse_tiny
from labkit.parity.components import EXACT_LIMIT
from labkit.parity.perturb_spec import PerturbSpec, Row
from labkit.parity.perturb_subject import Subject, moved
from labkit.parity.perturb_values import others

OWN = "ours equals the reference on weights of that shape"


def shape_specs(subject: Subject, keys) -> list[PerturbSpec]:
    """One spec for each key among `keys` that is a number or a switch of the config; none for a model that is no tiny one."""
    if subject.source.origin != "tiny":
        return []
    values, specs = subject.source.config.effective, []
    for key in sorted(set(keys) & set(values)):
        # Twice as many of something fits whatever divided it before.
        whole = isinstance(values[key], int) and not isinstance(values[key], bool) and values[key] > 1
        other = 2 * values[key] if whole else next((value for value in others(key, values[key]) if not isinstance(value, list)), None)
        if other is not None:
            specs.append(PerturbSpec("config", key, {key: other}, OWN))
    return specs


def check_shapes(subject: Subject, specs: list[PerturbSpec]) -> list[Row]:
    """Rows of the specs whose checkpoint the reference can have; the others are no specs."""
    return [row for row in _check(subject, specs) if row is not None]


def _check(subject: Subject, specs: list[PerturbSpec]) -> Iterator[Row | None]:
    if not specs:
        return
    change = {key: value for spec in specs for key, value in spec.change.items()}
    try:
        source, theirs, tokens = _fresh(subject, change)
        refused = False
    except InputError:
        refused = True
    failure = ""
    if not refused:
        try:
            model, _ = subject.load_ours(source)
            error = moved(subject.ours(tokens, model=model), theirs)
        except Exception as raised:
            error, failure = None, f"the slice refuses it: {str(raised).splitlines()[0][:200] if str(raised) else type(raised).__name__}"
        if error is not None and error <= EXACT_LIMIT:
            yield from (Row(spec, True, error, note="weights of its own") for spec in specs)
            return
    if len(specs) > 1:
        half = len(specs) // 2
        yield from _check(subject, specs[:half])
        yield from _check(subject, specs[half:])
    elif refused:
        yield None
    else:
        yield Row(specs[0], False, error, reason=failure or f"on weights of that shape the slice is off by {error:.1e}")


def _fresh(subject: Subject, change: dict):
    """(source, the reference's logits, tokens) of the tiny checkpoint with more overrides. Raises InputError when the reference cannot have it."""
    from labkit.hf.source import open_source

    model_type, overrides, seed = parse_tiny(subject.source.model)
    query = "&".join(f"{key}={json.dumps(value)}" for key, value in {**overrides, **change}.items())
    source = open_source(f"tiny:{model_type}?{query}&seed={seed}")
    if any(source.config.effective.get(key) != value for key, value in change.items()):
        raise InputError("the class made another value of it", source.path)
    reference = subject.load_reference(source.path)
    tokens = subject.tokens % reference.model.get_input_embeddings().weight.shape[0]
    return source, reference.logits(tokens), tokens
