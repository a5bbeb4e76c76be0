"""What it takes to call a family proven on tiny checkpoints, in one process: float64 on both sides, every step on its own, the next one after a failure too.

prefill, decode, pieces, padding: against the reference. loop: scan against loop. round trip: bit for bit, both layouts. sharded: over a mesh of (1, 2, 2, 1).
"""

import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from labkit.errors import GateError, InputError
from labkit.parity.compare import relative_error
from labkit.parity.components import EXACT_LIMIT

LOOP_LIMIT = 1e-12
STEPS = ("build", "load", "prefill", "decode", "pieces", "padding", "loop", "round trip", "sharded")
ON_BOTH = ("prefill", "decode", "pieces", "padding", "round trip")
PREFILL, LONG, FIRST, SINGLE, PAD = 40, 100, 7, 5, 3
MESH = (1, 2, 2, 1)


@dataclass
class Step:
    """One step on one configuration. value: the largest relative error, None where nothing was measured. reason: why it failed, one line; place: file:line."""

    name: str
    on: str
    passed: bool
    value: float | None = None
    seconds: float = 0.0
    reason: str = ""
    place: str = ""
    note: str = ""


@dataclass
class Proof:
    """What the steps found on each configuration. kind: the slice's, "refined", "translated" or "edited"."""

    model_type: str
    kind: str = ""
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.steps) and all(step.passed for step in self.steps)

    @property
    def first_failure(self) -> Step | None:
        return next((step for step in self.steps if not step.passed), None)

    def holds(self, name: str) -> bool:
        """True when the step was taken and passed on every configuration that it was taken on."""
        taken = [step for step in self.steps if step.name == name]
        return bool(taken) and all(step.passed for step in taken)

    def worst(self, name: str) -> float | None:
        """The step's largest error over the configurations."""
        return max((step.value for step in self.steps if step.name == name and step.value is not None), default=None)

    def as_dict(self) -> dict:
        """Plain data."""
        return asdict(self) | {"passed": self.passed}

    def plain(self) -> str:
        lines = [f"{self.model_type} ({self.kind}): {'proven' if self.passed else 'NOT proven'}, {self.seconds:.1f} s"]
        for s in self.steps:
            value = "" if s.value is None else f"{s.value:.1e}"
            mark, place = "pass" if s.passed else "FAIL", f" [{s.place}]" if s.place else ""
            lines.append(f"  {mark}  {s.on:8} {s.name:10} {value:8} {s.seconds:5.1f} s  {s.reason}{place}")
            lines += [f"        {s.note}"] if s.note else []
        return "\n".join(lines)


def prove(model_type: str, sources: dict[str, Iterable[str]], *, steps: Iterable[str] = STEPS, say: Callable[[Step], None] = lambda step: None) -> Proof:
    """Take every step on every configuration. The family must be known to the registry.

    sources: {name of the configuration: model names, the first that the reference can run is used}. The loop and the mesh are tried on the last one alone. say
    is told each step as it ends. Raises nothing that a slice can cause: a failure is a step that did not pass.
    """
    import jax

    start = time.perf_counter()
    proof, steps = Proof(model_type), set(steps)
    last = list(sources)[-1]
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        folder = Path(tempfile.mkdtemp(prefix="labkit-proof-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for on, names in sources.items():
            for step in _configuration(on, names, steps if on == last else steps & {"build", "load", *ON_BOTH}, folder / on):
                proof.steps.append(step)
                say(step)
    from labkit.models import get_family

    with contextlib.suppress(Exception):
        proof.kind = get_family(model_type).source
    proof.seconds = round(time.perf_counter() - start, 2)
    return proof


def _configuration(on: str, names: Iterable[str], steps: set[str], folder: Path) -> Iterator[Step]:
    subject = _Subject()
    built = take("build", on, lambda: subject.build(names))
    yield built
    if not built.passed:
        return
    loaded = take("load", on, subject.load)
    yield loaded
    measures = {
        "prefill": subject.prefill,
        "decode": subject.decode,
        "pieces": subject.pieces,
        "padding": subject.padding,
        "loop": subject.loop,
        "round trip": lambda: subject.round_trip(folder),
        "sharded": subject.sharded,
    }
    for name, measure in measures.items():
        if name not in steps:
            continue
        # A round trip asks for rules and shapes, not for a model that runs.
        if loaded.passed or name == "round trip":
            yield take(name, on, measure, LOOP_LIMIT if name == "loop" else EXACT_LIMIT)
        else:
            yield Step(name, on, False, reason="not tried: the model was not loaded")


def take(name: str, on: str, measure: Callable, limit: float = EXACT_LIMIT) -> Step:
    """Run one step; its failure is its own. measure() -> None, an error, or (error, note)."""
    start = time.perf_counter()
    step = Step(name, on, False)
    try:
        result = measure()
        step.value, step.note = result if isinstance(result, tuple) else (result, "")
        step.passed = step.value is None or step.value <= limit
        step.reason = "" if step.passed else f"relative error {step.value:.1e}, limit {limit:.0e}"
    except Exception as error:
        step.reason, step.place = _reason(error), _place(error)
    step.seconds = round(time.perf_counter() - start, 2)
    return step


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:300]


def _place(error: Exception) -> str:
    """The innermost line of a slice that the error passed through, else of the lab, else of anything."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    slices = [f for f in frames if "/modeling_" in f.filename and "/transformers/" not in f.filename or "/checkpoint_mappings_" in f.filename]
    own = [f for f in frames if "/labkit/" in f.filename]
    frame = (slices or own or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


class _Subject:
    """One tiny checkpoint: the reference, our model, and the tokens of all comparisons."""

    def build(self, names: Iterable[str], rows: int = 2) -> None:
        """The first of the names that the reference can build and run in float64. rows: of tokens in every comparison."""
        from labkit.hf.reference import Reference
        from labkit.hf.source import open_source

        failure = None
        for name in names:
            try:
                self.source = open_source(name)
                self.reference = Reference.load(self.source.path, "exact")
                break
            except InputError as error:
                failure = failure or error
        else:
            raise failure
        vocab = self.reference.model.get_input_embeddings().weight.shape[0]
        self.tokens = np.random.default_rng(0).integers(3, vocab, (rows, LONG)).astype(np.int32)
        self._wanted, self.rows = {}, rows

    def load(self):
        """Our model, in float64."""
        import jax.numpy as jnp

        from labkit.converters import load_model

        self.model, self.config, findings = load_model(self.source, dtype=jnp.float64)
        return None, "; ".join(f"{f['component']}: {f['cause']}" for f in findings if f["cause"] == "the tied head on disk differs")

    def wanted(self, batch: int, length: int, padded: int = 0) -> np.ndarray:
        """The reference's logits [batch, length, vocab] of the first tokens; with row 0 masked at its first `padded`."""
        key = batch, length, padded
        if key not in self._wanted:
            self._wanted[key] = self.reference.logits(self.tokens[:batch, :length], _mask(batch, length, padded) if padded else None)
        return self._wanted[key]

    def call(self, tokens, segment_ids=None, cache=None, *, scan: bool = True, model=None):
        from flax import nnx

        graphdef, state = nnx.split(self.model if model is None else model)
        return _call()(graphdef, state, tokens, segment_ids, cache, scan=scan)

    def prefill(self) -> float:
        """2 x 100 tokens."""
        return relative_error(self.call(self.tokens, np.ones((self.rows, LONG), np.int32)), self.wanted(self.rows, LONG))

    def decode(self):
        """2 x 7 tokens into the cache, then five single ones: each against the reference's full forward of all tokens up to there."""

        def against_full(parts):
            errors = [relative_error(parts[0], self.wanted(self.rows, FIRST))]
            errors += [relative_error(part[:, -1], self.wanted(self.rows, FIRST + i)[:, -1]) for i, part in enumerate(parts[1:], 1)]
            return max(errors)

        return self.through_cache([FIRST] + [1] * SINGLE, against_full)

    def pieces(self):
        """40 tokens in five pieces and five single ones."""
        count = (PREFILL - SINGLE) // FIRST
        pieces = [FIRST] * count + [1] * (PREFILL - count * FIRST)
        return self.through_cache(pieces, lambda parts: relative_error(np.concatenate(parts, 1), self.wanted(self.rows, PREFILL)))

    def through_cache(self, pieces: list[int], against_full: Callable, padded: int = 0):
        """(error, note) of tokens given in pieces, row 0 masked at its first `padded`: against the reference's full forward.

        Where that fails, the reference decodes the same pieces through its own cache. If it leaves its own full forward by more than the limit, one of its two
        answers must be the measure, and a cache is measured by the answer that is given through a cache; the note says so and by how much they differ.
        """
        ours = self.feed(pieces, _mask(self.rows, pieces[0], padded) if padded else None)
        error = against_full(ours)
        if error <= EXACT_LIMIT:
            return error, ""
        length = sum(pieces)
        mask = _mask(self.rows, length, padded) if padded else None
        try:
            own = self.reference.cached_logits(self.tokens[:, :length], pieces, mask)
        except Exception:  # a reference that has no cache, or none that takes pieces, is measured by its full forward
            return error, ""
        apart = against_full(own)
        if not apart > EXACT_LIMIT:
            return error, ""
        cached = relative_error(np.concatenate(ours, 1), np.concatenate(own, 1), mask)
        told = f"the reference's cached decoding differs from its own full forward by {apart:.1e}; measured by its cached decoding (by the other: {error:.1e})"
        return cached, told

    def padding(self):
        """Row 0 left-padded: the full forward, then through the cache; real tokens only. The note says when the reference itself is moved by padding."""
        mask = _mask(self.rows, LONG, LONG - 24)
        errors = [relative_error(self.call(self.tokens, mask), self.wanted(self.rows, LONG, LONG - 24), mask)]
        length = FIRST + SINGLE
        against_full = lambda parts: relative_error(np.concatenate(parts, 1), self.wanted(self.rows, length, PAD), _mask(self.rows, length, PAD))
        error, note = self.through_cache([FIRST] + [1] * SINGLE, against_full, PAD)
        errors.append(error)
        own = relative_error(self.wanted(self.rows, length, PAD)[0, PAD:], self.reference.logits(self.tokens[:1, PAD:length])[0])
        told = f"forward {errors[0]:.1e}, cached {errors[1]:.1e}" if max(errors) > EXACT_LIMIT else ""
        moved = f"the reference itself changes by {own:.1e} under left padding" if own > EXACT_LIMIT or told else ""
        return max(errors), "; ".join(filter(None, (told, note, moved)))

    def feed(self, pieces: list[int], first_segments=None) -> list[np.ndarray]:
        """Logits [2, piece, vocab] of each piece through one cache with slots to spare."""
        first_segments = np.ones((self.rows, pieces[0]), np.int32) if first_segments is None else first_segments
        cache, start, parts = self.model.init_cache(self.rows, PREFILL + 3), 0, []
        for index, piece in enumerate(pieces):
            logits, cache = self.call(self.tokens[:, start : start + piece], first_segments if index == 0 else None, cache)
            parts.append(np.asarray(logits))
            start += piece
        return parts

    def loop(self) -> float:
        """The layers by a loop against the same by a scan."""
        segments = np.ones((self.rows, LONG), np.int32)
        return relative_error(self.call(self.tokens, segments, scan=False), self.call(self.tokens, segments))

    def round_trip(self, folder: Path) -> None:
        """To Orbax and back, scanned and unscanned, bit for bit."""
        from labkit.converters import compare_safetensors, convert, export

        for scan in (True, False):
            ckpt, out = folder / f"ckpt-{scan}", folder / f"out-{scan}"
            convert(self.source, ckpt, scan=scan)
            written = export(ckpt, out)
            differences = compare_safetensors(self.source.path, out, ignore=written.dropped)
            if differences:
                raise GateError(f"{len(differences)} tensors differ after the round trip ({'scanned' if scan else 'unscanned'}): {differences[0]}")

    def sharded(self) -> float:
        """The forward over four devices; every weight of two dimensions and 256 elements or more that the mesh divides must be spread over it."""
        import jax
        import jax.numpy as jnp

        from labkit.converters import load_model
        from labkit.scale.mesh import build_mesh

        devices = jax.devices()[: int(np.prod(MESH))]
        mesh = build_mesh(**dict(zip(("data", "fsdp", "tensor", "expert"), MESH)), devices=devices)
        model, _, _ = load_model(self.source, dtype=jnp.float64, mesh=mesh)
        whole = unsharded(model)
        if whole:
            raise GateError(f"{len(whole)} large weights are on every device whole, such as {', '.join(whole[:3])}")
        with jax.set_mesh(mesh):
            ours = self.call(self.tokens, np.ones((self.rows, LONG), np.int32), model=model)
        return relative_error(ours, self.wanted(self.rows, LONG))


def unsharded(model) -> list[str]:
    """Weights of at least two dimensions and 256 elements (the layer axis of a stack not counted) that are replicated although 2 divides a dimension."""
    from labkit.converters.filling import state_arrays

    out = []
    for path, array in state_arrays(model).items():
        shape = array.shape[1:] if path.startswith("layers.") else array.shape
        if len(shape) >= 2 and np.prod(shape) >= 256 and any(size % 2 == 0 for size in shape) and array.sharding.is_fully_replicated:
            out.append(f"{path} {array.shape}")
    return out


def _mask(batch: int, length: int, padded: int) -> np.ndarray:
    """int32 [batch, length]: 0 at the first `padded` tokens of row 0."""
    mask = np.ones((batch, length), np.int32)
    mask[0, :padded] = 0
    return mask


def _call():
    """The compiled call of any model, made on first use: importing this module imports no jax."""
    global _compiled
    if _compiled is None:
        import jax
        from flax import nnx

        @partial(jax.jit, static_argnums=0, static_argnames="scan")
        def _compiled(graphdef, state, tokens, segment_ids, cache, *, scan):
            return nnx.merge(graphdef, state)(tokens, segment_ids=segment_ids, cache=cache, scan=scan)

    return _compiled


_compiled = None
