"""Perturbed config keys: the same tensors under another config, on both sides. What the reference obeys, ours must track; a key that is ignored is named.

Each key is asked of the reference alone first: does another value of it move the logits with these weights? Keys that do are tried on our side in groups, all
changed at once: where ours equals the reference, and taking any one change back moves the reference, ours follows every one of them. A group that fails is
taken apart, until the key is named.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from labkit.errors import LabError
from labkit.models.config import IRRELEVANT_KEYS
from labkit.parity.components import EXACT_LIMIT
from labkit.parity.perturb_spec import TRACKS, PerturbSpec, Row
from labkit.parity.perturb_subject import MOVES, Subject, moved
from labkit.parity.perturb_values import candidates

GROUP = 6


def config_specs(subject: Subject, rng, count: int | None = None) -> tuple[list[PerturbSpec], dict[str, str]]:
    """(specs, target -> why there is none): one for each key whose change moves the reference with the same weights, in random order.

    count: stop when so many are found; keys that mean nothing to any decoder are not tried then. None: every key.
    """
    tries = candidates(subject.source.config.effective, _choices(subject.model_type))
    order = sorted(tries)
    rng.shuffle(order)
    if count is not None:
        order = sorted((key for key in order if key not in IRRELEVANT_KEYS), key=lambda key: not _mentioned(subject, key))
    specs, without = [], {}
    for target in order:
        if count is not None and len(specs) >= count:
            break
        if count is not None and any(top in spec.change for spec in specs for top in tries[target][0]):
            continue
        change, reason = moving_change(subject, tries[target])
        if change is None:
            without[target] = reason
        else:
            specs.append(PerturbSpec("config", target, change, TRACKS))
    return specs, without


def _choices(model_type: str) -> list[dict]:
    from labkit.hf.variant_choices import choices

    try:
        return choices(model_type)
    except LabError:
        return []


def _mentioned(subject: Subject, target: str) -> bool:
    """Whether the reference's modeling file speaks of the key: such keys are tried first."""
    from labkit.hf import architectures

    file = architectures.modeling_file(subject.model_type)
    return file is not None and target.partition(".")[0].partition("=")[0] in file.read_text(encoding="utf-8")


def moving_change(subject: Subject, tries: list[dict]) -> tuple[dict | None, str]:
    """The first change that the reference loads the same weights under and that moves it; else why none does."""
    reason = "no other value to try"
    for change in tries:
        try:
            after = theirs_under(subject, change)[1]
        except Exception as error:  # whatever the reference makes of a value that it cannot have
            reason = f"the reference refuses {change}: {str(error).splitlines()[0][:120]}" if str(error) else f"the reference refuses {change}"
            continue
        if not moved(after, subject.plain_theirs) > MOVES:
            reason = "it moves nothing"
        elif not _causal_under(subject, change, after):
            reason = f"under {change} the reference sees later tokens: no decoder"
        else:
            return change, ""
    return None, reason


def _causal_under(subject: Subject, change: dict, logits: np.ndarray) -> bool:
    """Another last token leaves the reference's logits before it."""
    other = np.array(subject.tokens)
    other[:, -1] = (other[:, -1] + 1) % logits.shape[-1]
    return not moved(subject.theirs(other, at=subject.variant(config=change))[:, :-1], logits[:, :-1]) > MOVES


def theirs_under(subject: Subject, change: dict) -> tuple[Path, np.ndarray]:
    """(directory, the reference's logits) of the same tensors under a changed config."""
    directory = subject.variant(config=change)
    return directory, subject.theirs(at=directory)


def check_configs(subject: Subject, specs: list[PerturbSpec]) -> list[Row]:
    """A row for each spec, in their order."""
    rows: dict[int, Row] = {}
    for group in _groups(specs):
        for row in _check_group(subject, group):
            rows[id(row.spec)] = row
    return [rows[id(spec)] for spec in specs]


def _groups(specs: list[PerturbSpec]) -> Iterator[list[PerturbSpec]]:
    """At most six at a time, no key twice in one."""
    waiting = list(specs)
    while waiting:
        group, keys = [], set()
        for spec in list(waiting):
            if len(group) < GROUP and not keys & set(spec.change):
                group.append(spec)
                keys |= set(spec.change)
                waiting.remove(spec)
        yield group


def _check_group(subject: Subject, group: list[PerturbSpec]) -> Iterator[Row]:
    """Rows of a group, tried at once; apart where that does not settle it."""
    if len(group) == 1:
        yield check_config(subject, group[0])
        return
    joint = {key: value for spec in group for key, value in spec.change.items()}
    halves = [group[: len(group) // 2], group[len(group) // 2 :]]
    try:
        directory, theirs = theirs_under(subject, joint)
        steps = {id(spec): moved(theirs, theirs_under(subject, _without(joint, spec))[1]) for spec in group}
        error = _error(subject, directory, theirs)
    except Exception:  # values that do not go together, on either side: apart they may
        error, steps = None, {}
    if error is not None and error <= EXACT_LIMIT:
        hidden = []
        for spec in group:
            if steps[id(spec)] > MOVES:
                yield Row(spec, True, error, steps[id(spec)], note=f"with {len(group) - 1} other keys changed" if len(group) > 1 else "")
            else:
                hidden.append(spec)  # another change of the group hides this one
        for spec in hidden:
            yield check_config(subject, spec)
        return
    rows = [row for half in halves for row in _check_group(subject, half)]
    if error is not None and all(row.passed for row in rows):
        spec = PerturbSpec("config", "+".join(spec.target for spec in group), joint, TRACKS)
        rows[0] = Row(rows[0].spec, False, error, rows[0].moved, f"passes alone, and fails together with {spec.target}: {error:.1e}")
    yield from rows


def _without(joint: dict, spec: PerturbSpec) -> dict:
    return {key: value for key, value in joint.items() if key not in spec.change}


def _error(subject: Subject, directory: Path, theirs: np.ndarray) -> float:
    model, _ = subject.load_ours(directory)
    return moved(subject.ours(model=model), theirs)


def check_config(subject: Subject, spec: PerturbSpec, *, ignored: bool = False) -> Row:
    """Both sides under the changed config. ignored: plant a fault, our config view keeps the old value."""
    directory, theirs = theirs_under(subject, spec.change)
    step = moved(theirs, subject.plain_theirs)
    try:
        ours = subject.plain_ours if ignored else subject.ours(model=subject.load_ours(directory)[0])
    except Exception as refused:
        text = str(refused).splitlines()[0][:200] if str(refused) else type(refused).__name__
        return Row(spec, False, None, step, f"the reference obeys {spec.target}, and the slice refuses it: {text}")
    error, still = moved(ours, theirs), moved(ours, subject.plain_ours) <= MOVES
    # A slice that has only the changed value built in agrees after the change, and did not before.
    if error <= EXACT_LIMIT and not still:
        return Row(spec, True, error, step)
    told = "ignores it" if still else "does not follow"
    return Row(spec, False, error, step, f"the reference obeys {spec.target}, and the slice {told}: relative error {error:.1e}")
