"""What stands beside the eight checks: our model against the reference, and against itself called in other ways."""

import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from labkit.parity.compare import kl_per_position, relative_error
from labkit.parity.conformance.report import Found

LIMIT, KL_LIMIT = 1e-9, 1e-6
PADDING, STEPS = 5, 14


def exact(subject) -> Found:
    """Every captured name, free and isolated, and the logits of the whole batch, by scan. value: the worst relative error."""
    from labkit.parity.capture import capture
    from labkit.parity.components import compare_components

    found, tokens = Found(), subject.tokens[:2, :24]
    captured = subject.reference.capture(tokens)
    table = compare_components(capture(subject.model, tokens), capture(subject.model, tokens, inject=captured), captured, limit=LIMIT)
    # What is at fault comes before what follows from it.
    found.problems += [f"{name} of the reference has no counterpart" for name in table.missing]
    for how, errors in ((" in isolation", table.isolated_errors), ("", table.free_errors)):
        for name, error in errors.items():
            found.within(error, LIMIT, f"{name}{how}")
    found.problems += [f"{fault.place}: {fault.what} {fault.error:.1e}" for fault in table.isolated_faults if not found.problems]
    found.within(relative_error(np.asarray(subject.forward(subject.tokens)), subject.reference.logits(subject.tokens)), LIMIT, "logits")
    return found


def loss_and_gradients(subject) -> Found:
    """The training loss, its router's part and every gradient, without padding and with the first row left-padded. value: the worst relative error."""
    from labkit.parity.gradients import compare_gradients

    found = Found()
    padded = np.ones_like(subject.tokens)
    padded[0, :PADDING] = 0
    for how, mask in (("", None), (", row 0 left-padded", padded)):
        step = subject.step(mask=mask)
        wanted, mapped = subject.wanted if mask is None else subject.reference_gradients(subject.tokens, mask)
        aux = step.aux.get("moe_lb_loss")
        table = compare_gradients(step.gradients, step.loss, None if aux is None else float(aux), mapped, wanted)
        found.within(table.loss, LIMIT, f"loss{how}")
        if table.aux_loss is not None:
            found.within(table.aux_loss, LIMIT, f"auxiliary loss{how}")
        for path, error in table.errors.items():
            found.within(error, LIMIT, f"gradient of {path}{how}")
    return found


def decode(subject) -> Found:
    """Single tokens through the cache after a first piece, each against the full forward of all tokens; also from the first token on. value: the worst."""
    found, tokens = Found(), subject.tokens[:2, : STEPS + 7]
    full = np.asarray(subject.forward(tokens))
    for first in (7, 1):
        cached = fed(subject, tokens, [first] + [1] * (tokens.shape[1] - first), tokens.shape[1] + 3)
        for position in range(tokens.shape[1]):
            error = float(np.abs(cached[:, position] - full[:, position]).max() / np.abs(full).max())
            found.within(error, LIMIT, f"position {position}, {first} tokens first")
    return found


def fed(subject, tokens, pieces: list[int], capacity: int, segment_ids=None) -> np.ndarray:
    """Logits of tokens [batch, length] fed through one cache in pieces."""
    cache, start, parts = subject.model.init_cache(len(tokens), capacity), 0, []
    for piece in pieces:
        window = slice(start, start + piece)
        logits, cache = subject.forward(tokens[:, window], None if segment_ids is None else segment_ids[:, window], cache)
        parts.append(np.asarray(logits))
        start += piece
    return np.concatenate(parts, 1)


def batch(subject) -> Found:
    """Each row of a batch against the same row alone; the first row left-padded against the reference under the same mask, and, where padding does not move the
    reference itself, against the row without padding."""
    found, tokens = Found(), subject.tokens
    together = np.asarray(subject.forward(tokens))
    for row in range(len(tokens)):
        found.within(relative_error(np.asarray(subject.forward(tokens[row : row + 1]))[0], together[row]), LIMIT, f"row {row} alone")
    mask = np.ones_like(tokens)
    mask[0, :PADDING] = 0
    padded, wanted = np.asarray(subject.forward(tokens, mask)), subject.reference.logits(tokens, mask)
    found.within(relative_error(padded, wanted, mask), LIMIT, "a left-padded row against the reference")
    alone = subject.reference.logits(tokens[:1, PADDING:])[0]
    own = relative_error(wanted[0, PADDING:], alone)
    if own > LIMIT:
        found.notes.append(f"padding moves the reference itself, by {own:.0e}")
    else:
        found.within(relative_error(padded[0, PADDING:], alone), LIMIT, "a left-padded row against the row alone")
    found.within(relative_error(padded[1:], together[1:]), LIMIT, "rows beside a padded one")
    return found


def packing(subject) -> Found:
    """Two segments of one length in a row, each against the segment in a row of its own (of its own length: some rope tables depend on the longest row).

    value: the worst relative error."""
    found, tokens = Found(), subject.tokens
    half = tokens.shape[1] // 2
    segments = np.ones_like(tokens)
    segments[:, half:] = 2
    packed = np.asarray(subject.forward(tokens, segments))
    for which, part in (("first", slice(0, half)), ("second", slice(half, None))):
        found.within(relative_error(packed[:, part], np.asarray(subject.forward(tokens[:, part]))), LIMIT, f"the {which} segment")
    return found


def round_trip(subject) -> Found:
    """To the checkpoint format and back, both layouts, bit for bit."""
    from labkit.converters import compare_safetensors, convert, export

    found, folder = Found(), Path(tempfile.mkdtemp(prefix="labkit-conformance-"))
    try:
        for scan in (True, False):
            ckpt, out = folder / f"ckpt-{scan}", folder / f"out-{scan}"
            convert(subject.source, ckpt, scan=scan)
            written = export(ckpt, out)
            problems = compare_safetensors(subject.source.path, out, ignore=written.dropped)
            found.problems += [f"{'scanned' if scan else 'unscanned'}: {what}" for what in problems]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def float32(subject) -> Found:
    """Both sides in float32. value: the largest KL of a position, nats."""
    from labkit.converters import load_model
    from labkit.hf.reference import Reference

    found = Found()
    wanted = Reference.load(subject.source.path, "float32").logits(subject.tokens)
    with jax.enable_x64(False):
        model = load_model(subject.source, dtype=jnp.float32)[0]
        ours = np.asarray(subject.forward(subject.tokens, model=model))
    found.value = float(kl_per_position(ours, wanted).max())
    if not found.value <= KL_LIMIT:
        found.problems.append(f"KL {found.value:.1e} nats at one position, limit {KL_LIMIT:.0e}")
    return found
