"""The suite: which checks there are, and running them on a source."""

import time
from collections.abc import Callable, Iterable

from labkit.errors import InputError, LabError
from labkit.parity.conformance import beside, execution, one_mesh, placement, spread, stillness, trainable, training_loss
from labkit.parity.conformance.report import Check, Conformance, take
from labkit.parity.conformance.subject import Subject, exactly

CHECKS = {
    1: ("pure and trainable", "> 1e-12", trainable.check),
    2: ("a call changes nothing", "", stillness.check),
    3: ("scan equals loop", "1e-12", execution.scan_and_loop),
    4: ("remat is transparent", "1e-12", execution.remat),
    5: ("auxiliary loss folded in", "1e-12", training_loss.check),
    6: ("one mesh, one state", "", one_mesh.check),
    7: ("placed once", "", placement.check),
    8: ("every weight sharded", "1e-9", spread.check),
}
"""number -> name, limit, function of a `Subject`."""

MEANINGS = {
    1: ("every parameter is trained: none has a zero gradient", "the smallest gradient of any parameter, over the largest"),
    2: ("a call changes nothing in the model", "how many modules were watched"),
    3: ("layers by scan and by loop give the same numbers", "largest relative error of logits, loss and gradients"),
    4: ("rematerialisation changes no number", "largest relative error of logits, loss and gradients over all policies"),
    5: ("the loss is cross-entropy and the auxiliary loss, nothing else", "largest relative error of the loss"),
    6: ("however the model is built, its state lies on the one mesh alike", "how many variables were compared"),
    7: ("weights are placed once, at construction, and never moved", "how many weights enter a shard_map as they are stored"),
    8: ("on a mesh every weight is spread and the logits stay the same", "relative error of the logits on a mesh against one device"),
}
"""number -> what holds when the check does, and what its value counts or measures: for readers who do not know the suite."""

BESIDE = {
    "exact": ("1e-9", beside.exact),
    "loss and gradients": ("1e-9", beside.loss_and_gradients),
    "decode": ("1e-9", beside.decode),
    "batch and padding": ("1e-9", beside.batch),
    "packing": ("1e-9", beside.packing),
    "round trip": ("bit for bit", beside.round_trip),
    "float32": ("1e-6", beside.float32),
}
"""Name -> limit, function: the comparisons with the reference, or with the model's own other ways of calling."""

NAMES = (*CHECKS, *BESIDE)


def conformance(source, *, checks: Iterable[int | str] | None = None, seed: int = 0, say: Callable[[Check], None] = lambda check: None) -> Conformance:
    """Take the checks on one source; each catches its own failure.

    source: a model name, a directory, a `Source`, or a `Subject` made of one (which keeps what it has compiled). The family must be known to the registry.
    checks: numbers 1 to 8 and names of `BESIDE`; all when left out. seed: of the tokens. say is told each check as it ends. Raises InputError for an unknown
    check and for a source that cannot be opened.
    """
    wanted = list(NAMES if checks is None else checks)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise InputError(f"there is no check {unknown[0]!r}", next=f"checks are {', '.join(map(str, NAMES))}")
    start = time.perf_counter()
    subject = source if isinstance(source, Subject) else Subject(source, seed=seed)
    result = Conformance(getattr(subject.source, "model", str(subject.source.path)), subject.model_type)
    with exactly():
        try:
            result.kind = subject.family.source
        except LabError as error:
            result.checks.append(Check(0, "family", False, reason=error.what))
            return result
        for name in wanted:
            number, (title, limit, function) = (name, CHECKS[name]) if name in CHECKS else (0, (name, *BESIDE[name]))
            result.checks.append(take(number, title, limit, lambda: function(subject)))
            say(result.checks[-1])
    result.seconds = round(time.perf_counter() - start, 2)
    return result
