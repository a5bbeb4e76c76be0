"""`labkit train`: fine-tunes a source's model on a file of text or tokens, stops and goes on, and leaves a checkpoint that `labkit export` reads."""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.errors import BlockedError, BusyError, InputError
from labkit.train.settings import TrainSettings

RUN, METRICS, STEPS, MODEL = "run.json", "metrics.jsonl", "steps", "model"
DEVICE_CHIPS = {
    "TPU v4": ("v4", 1),
    "TPU v5 lite": ("v5e", 1),
    "TPU v5e": ("v5e", 1),
    "TPU v5": ("v5p", 1),
    "TPU v5p": ("v5p", 1),
    "TPU v6 lite": ("v6e", 1),
    "TPU v6e": ("v6e", 1),
    "TPU7x": ("tpu7x", 2),
}
"""JAX's device kinds -> chip of `scale/chips.py`, devices per chip."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` did. checkpoint: for `labkit export`, None when it stopped early. first_loss, last_loss: of this call, None without an update."""

    out: Path
    checkpoint: Path | None
    started_at: int
    step: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    compile_seconds: float

    def plain(self) -> str:
        done = f"step {self.step} of {self.steps}"
        done += f", from step {self.started_at}" if self.started_at else ""
        if self.first_loss is not None:
            done += f"; loss {self.first_loss:.4f} at its first update, {self.last_loss:.4f} at its last"
        after = f"labkit export {self.checkpoint} OUT" if self.checkpoint else "the same command goes on"
        return f"{done}; in {self.out}\nnext: {after}"

    def as_json(self) -> dict:
        return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()}


def train(
    model: str,
    data: str | os.PathLike,
    out: str | os.PathLike,
    settings: TrainSettings,
    *,
    revision: str = "",
    trust_remote_code: bool = False,
    mesh: dict[str, int] | None = None,
    dtype: str = "float32",
    compute_dtype: str | None = None,
    peak_tflops: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[int], bool] = lambda step: False,
) -> Trained:
    """Train `model` on the file `data` and keep everything in the folder `out`: `steps/` (Orbax, to go on from), `metrics.jsonl`, and at the end `model/`.

    A folder that holds the same run goes on from its last step; another one's is refused. mesh: axis -> size (all devices on fsdp by default). dtype: of
    parameters and optimiser; compute_dtype: of the forward and backward pass (None: the same). peak_tflops: of one device; None takes the published figure of
    a TPU. Raises InputError for what cannot be used, BusyError when another process trains into `out`, BlockedError when the garden lacks the family.
    """
    import jax

    settings.check()
    out = Path(out).absolute()
    if not Path(data).is_file():
        raise InputError("There is no such data file", data, "Give a text, a .jsonl or a .npy")
    _require_folder(out)
    from labkit.converters import load_model
    from labkit.converters.save import save
    from labkit.hf import open_source
    from labkit.hf.walls import walls
    from labkit.port.slices import ensure_slice
    from labkit.scale.mesh import build_mesh
    from labkit.scale.processes import is_writer
    from labkit.train.checkpoints import RunCheckpoints
    from labkit.train.data import PackedData
    from labkit.train.documents import read_documents
    from labkit.train.loop import train_loop
    from labkit.train.metrics import MetricsFile, read_metrics
    from labkit.train.parts import with_compute_dtype

    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    for wall in walls(source)[:1]:
        raise BlockedError(wall.what, wall.why, wall.next)
    ensure_slice(source).require()
    axes = mesh or {"fsdp": jax.device_count()}
    placed = build_mesh(**axes)
    documents = read_documents(data, source, vocab_size=source.config.effective.get("vocab_size"))
    packed = PackedData.pack(documents, length=settings.length, batch=settings.batch, seed=settings.seed)
    identity = {
        "model": source.name,
        "family": source.config.model_type,
        "fingerprint": source.fingerprint,
        "dtype": dtype,
        "compute_dtype": compute_dtype or dtype,
        "settings": settings.as_dict(),
        "data": packed.as_dict(),
    }
    kind = jax.devices()[0].device_kind
    peak = peak_tflops if peak_tflops is not None else _published_peak(kind)
    say(f"{source.name}: {sum(d.size for d in documents):,} tokens in {packed.rows:,} rows of {settings.length}; mesh {dict(placed.shape)} of {kind}")
    say(f"peak of a device: {f'{peak:g} TFLOP/s' if peak is not None else f'not known on {kind.upper()}, so there is no MFU'}")
    with _alone(out) if is_writer() else contextlib.nullcontext():
        checkpoints = RunCheckpoints(out / STEPS, keep=settings.keep, identity=identity)
        try:
            if checkpoints.latest is not None:
                checkpoints.check(checkpoints.latest)
            elif is_writer():
                _write_identity(out / RUN, identity)
            loaded, _, _ = load_model(source, dtype=jax.numpy.dtype(dtype), mesh=placed)
            if compute_dtype is not None:
                loaded = with_compute_dtype(loaded, source.config.model_type, jax.numpy.dtype(compute_dtype))
            started, metrics = [], []

            def resume(step: int) -> None:
                started.append(step)
                if is_writer():
                    metrics.append(MetricsFile(out / METRICS, step))
                if step:
                    say(f"goes on from step {step}")

            def on_step(record: dict) -> None:
                for file in metrics:
                    file.add(record)
                say(step_line(record, settings.steps))

            run = train_loop(
                loaded, source.config.model_type, packed, settings, checkpoints=checkpoints, peak_tflops=peak, on_step=on_step, on_resume=resume, stop=stop
            )
        finally:
            checkpoints.close()
        place = out / MODEL
        if run.finished:
            lines = read_metrics(out / METRICS)
            about = {"steps": run.step, "settings": settings.as_dict(), "data": packed.as_dict(), "last_loss": lines[-1]["loss"] if lines else None}
            save(run.model, source, place, training=about, force=True)
    losses = [record["loss"] for record in run.records]
    return Trained(
        out, place if run.finished else None, started[0], run.step, settings.steps, *(losses[i] if losses else None for i in (0, -1)), run.compile_seconds
    )


def parse_mesh(text: str) -> dict[str, int] | None:
    """`data=2,fsdp=4` as axis -> size, None for an empty text. Raises InputError naming the part that cannot be."""
    from labkit.layers.sharding import MESH_AXIS_NAMES

    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if name not in MESH_AXIS_NAMES or name in found or not size.isdigit() or int(size) < 1:
            raise InputError(f"{part!r} is no axis of a mesh", "--mesh", f"for example data=2,fsdp=4; axes are {', '.join(MESH_AXIS_NAMES)}")
        found[name] = int(size)
    return found or None


def step_line(record: dict, steps: int) -> str:
    """One update as a line for people."""
    parts = [f"step {record['step']}/{steps}", f"loss {record['loss']:.4f}", f"gradient norm {record['gradient_norm']:.3f}"]
    if "router_entropy" in record:
        parts.append(f"router entropy {record['router_entropy']:.3f}")
    if "max_expert_load" in record:
        parts.append(f"busiest expert {record['max_expert_load']:.2f} x even")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return ", ".join(parts)


class StopOnSignal:
    """SIGTERM or Ctrl-C asks the loop to leave after the update that is running, its state saved; a second one ends the process as usual."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "StopOnSignal":
        import signal

        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, _number, _frame) -> None:
        import signal

        self.asked = True
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def __exit__(self, *_) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, step: int) -> bool:
        return self.asked


def _published_peak(device_kind: str) -> float | None:
    """TFLOP/s of one device in bfloat16, None where no published figure is known."""
    from labkit.scale.chips import CHIPS

    if device_kind not in DEVICE_CHIPS:
        return None
    name, devices = DEVICE_CHIPS[device_kind]
    return CHIPS[name].peak_flops / 1e12 / devices


def _require_folder(out: Path) -> None:
    """A new folder, an empty one, or one that a run was started in."""
    if out.exists() and (not out.is_dir() or (any(p.name != ".lock" for p in out.iterdir()) and not (out / RUN).is_file())):
        raise InputError("The output exists and holds no training run", out, "Choose a new folder")


@contextlib.contextmanager
def _alone(out: Path):
    """The folder, made, and no other process in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise BusyError("Another process trains into this folder", out, "Wait for it to end, or choose another folder") from None
    except OSError as error:
        raise InputError(f"The output folder cannot be written: {error.strerror or error}", out, "Choose a folder that you can write") from None
    try:
        yield
    finally:
        lock.release()


def _write_identity(path: Path, identity: dict) -> None:
    """What the folder is, for people; the checkpoints hold and check it."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
