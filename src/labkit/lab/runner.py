"""`labkit run`: the phase notebooks by papermill, a record and a handover after each.

The parent process opens the source, holds the model's lock and decides what is reused; each notebook runs in a kernel of this very interpreter. A kernel that
dies, a cell that outlasts its limit and Ctrl-C each leave the executed notebook, a record that says where it happened, and a handover.
"""

import contextlib
import difflib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import BlockedError, InputError, LabError
from labkit.hf.threads import PATIENT
from labkit.lab import handover, records
from labkit.lab.phases import PHASES, PROVING, phase_class
from labkit.lab.phases.base import identity, inputs_fingerprint
from labkit.lab.places import PACKAGE, ModelLock, handovers_dir, notebooks_dir
from labkit.lab.records import Failure, Record, Records, Status
from labkit.lab.reproduction import changed
from labkit.lab.show import visible

SHOWN = 4
EXIT_CODES = {"InputError": 2, "BusyError": 2, "killed": 3, "timeout": 3, "KernelDiedError": 3, "interrupted": 130}


@dataclass
class Outcome:
    """What a run came to. exit_code: as the command line returns it; ran, reused: phase numbers; error: why it stopped early."""

    exit_code: int
    handover: Path
    records: dict[int, Record]
    ran: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    error: LabError | None = None


def run(
    model: str,
    *,
    phases: Iterable[int] = PROVING,
    parameters: dict[str, str] | None = None,
    handovers: Path | None = None,
    force: bool = False,
    kernel: str | None = None,
    cell_timeout: int = 3600,
    timeout: int = 6 * 3600,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run phases of `model` in order; stop at the first that does not pass.

    parameters: name -> value as text; each must be known to at least one of the phases. kernel: the name of a Jupyter kernel instead of this interpreter's.
    cell_timeout, timeout: seconds for one cell, and for the whole run. Raises InputError or BusyError before anything has run.
    """
    from labkit.hf import open_source
    from labkit.port.slices import announce

    phases = sorted(set(phases))
    unknown = [p for p in phases if p not in PHASES]
    if unknown or not phases:
        raise InputError(
            f"there is no phase {', '.join(map(str, unknown)) or 'to run'}",
            "--phases",
            f"phases are {', '.join(f'{n} ({name})' for n, name in PHASES.items())}",
        )
    chosen = notebook_parameters(phases, {"model": model, **(parameters or {})})
    first = chosen[phases[0]]
    source = open_source(model, first.get("revision") or None, trust_remote_code=bool(first.get("trust_remote_code", False)))
    chosen = {number: _absolute(parameters, source) for number, parameters in chosen.items()}
    announce(source.config.model_type)
    folder = records.model_folder(handovers_dir(handovers), source.slug, identity(source))
    store = Records(folder)
    _refuse_early(phases, chosen, store, source, force)
    deadline = time.monotonic() + timeout
    outcome = Outcome(0, handover.path_of(folder), {})
    with ModelLock(folder.parent, folder.name) as lock, _kernel(kernel, folder.parent, lock.path) as kernel_name:
        for number in phases:
            cls = phase_class(number)
            label = f"{number} {PHASES[number]}"
            record = store.read(number)
            if not force and record is not None and _reusable(record, cls, source, chosen[number]):
                outcome.reused.append(number)
                outcome.records[number] = record
                say(f"{label}: DONE before, unchanged, reused")
                continue
            if error := _not_ready(store, number, source):
                outcome.exit_code, outcome.error = error.exit_code, error
                say(f"{label}: {error.paragraph()}")
                break
            before = record.run if record else ""
            failure = _execute(number, chosen[number], folder, kernel_name, cell_timeout, deadline - time.monotonic(), progress)
            record = _settle(store, number, source, before, failure, chosen[number])
            outcome.ran.append(number)
            outcome.records[number] = record
            outcome.handover = handover.render(folder)
            held = sum(g.passed for g in record.gates)
            say(f"{label}: {record.status.value}, {held} of {len(record.gates)} gates hold, {sum(t.seconds for t in record.timings):.1f} s")
            for line in reasons(record):
                say(f"  {line}")
            if not record.passed:
                outcome.exit_code = EXIT_CODES.get(record.failure.kind, 1) if record.failure else 1
                if record.failure:
                    outcome.error = LabError(record.failure.what, record.failure.where, record.failure.next)
                break
        if not outcome.ran and store.all():
            outcome.handover = handover.render(folder)
    return outcome


def notebook_parameters(phases: Iterable[int], given: dict[str, str]) -> dict[int, dict]:
    """The parameters of each phase's notebook: its defaults, with `given` put in where known and turned into the annotated type.

    Raises InputError for a notebook without exactly one `parameters` cell, a name that no phase knows, or a value of another type.
    """
    known = {number: read_parameters(_notebook(number)) for number in phases}
    names = {name for parameters in known.values() for name in parameters}
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2)
            listed = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(names))}"
            raise InputError(f"no phase of this run has a parameter {name!r}", f"phases {', '.join(map(str, known))}", listed)
    chosen = {}
    for number, parameters in known.items():
        chosen[number] = {name: _typed(name, given[name], kind) if name in given else default for name, (kind, default) in parameters.items()}
    return chosen


def read_parameters(path: Path) -> dict[str, tuple[type, object]]:
    """name -> (type, default) of a notebook's one `parameters` cell. InputError when it has none, several, or anything but `name: type = scalar`."""
    import ast
    import json

    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError, json.JSONDecodeError, nbformat.ValidationError) as error:
        raise InputError(f"the notebook cannot be read: {str(error).splitlines()[0][:200]}", path) from None
    cells = [c for c in notebook.cells if c.cell_type == "code" and "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise InputError(f"the notebook has {len(cells) or 'no'} cells tagged `parameters`, not one", path, "tag the one cell that holds the defaults")
    found = {}
    for node in ast.parse(cells[0].source).body:
        scalar = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.annotation, ast.Name) and node.value is not None
        kind = {"str": str, "int": int, "float": float, "bool": bool}.get(node.annotation.id) if scalar else None
        if kind is None:
            raise InputError(
                "the parameters cell holds more than annotated scalar defaults",
                f"{path.name}, line {node.lineno} of the cell",
                "write `name: str|int|float|bool = value`",
            )
        found[node.target.id] = (kind, ast.literal_eval(node.value))
    return found


def _absolute(parameters: dict, source) -> dict:
    """Paths as the kernel can take them: it runs in the notebooks' folder."""
    paths = {"model": source.origin in ("directory", "gguf"), "golden": True}
    return {name: str(Path(value).expanduser().absolute()) if value and paths.get(name) else value for name, value in parameters.items()}


def _typed(name: str, value, kind: type):
    import pydantic

    try:
        return pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError:
        raise InputError(
            f"{value!r} is not a value for the parameter {name}", f"-p {name}", f"it takes {'yes or no' if kind is bool else kind.__name__}"
        ) from None


def _notebook(number: int) -> Path:
    return notebooks_dir() / f"{number:02}_{PHASES[number]}.ipynb"


def _reusable(record: Record, cls, source, parameters: dict) -> bool:
    from labkit.port.slices import slice_identity

    inputs = inputs_fingerprint(cls, source.fingerprint, parameters, slice_identity(source))
    return record.passed and record.inputs_fingerprint == inputs and all(Path(path).exists() for path in record.outputs.values())


def _refuse_early(phases: list[int], chosen: dict[int, dict], store: Records, source, force: bool) -> None:
    """What a later phase of this run could not work with, told before the first one begins: InputError."""
    for number in phases:
        cls, record = phase_class(number), store.read(number)
        cls.refuse(chosen[number], source)
        if number - 1 in phases or (not force and record is not None and _reusable(record, cls, source, chosen[number])):
            continue
        if error := _not_ready(store, number, source):
            raise InputError(error.what, error.where, error.next)


def reasons(record: Record) -> list[str]:
    """Why a phase did not pass, in a line per gate that does not hold and one for what ended it; none for a phase that passed."""
    if record.passed:
        return []
    failed = [gate for gate in record.gates if not gate.passed]
    lines = [f"{gate.plain()}{f'. {gate.explanation}' if gate.explanation else ''}" for gate in failed[:SHOWN]]
    lines += [f"and {len(failed) - SHOWN} more gates"] if len(failed) > SHOWN else []
    if record.failure:
        lines.append(f"{record.failure.kind}: {record.failure.what}")
    return [visible(" ".join(line.split())) for line in lines] or ["no gate failed; the executed notebook shows where it ended"]


def _not_ready(store: Records, number: int, source) -> BlockedError | None:
    previous = store.read(number - 1) if number > 1 else None
    sound = previous is not None and previous.passed and previous.source_fingerprint == source.fingerprint
    # What phase 1 wrote is written again where it is gone; the checkpoint of phase 3 is not.
    kept = previous is not None and (previous.name != "convert" or all(Path(path).exists() for path in previous.outputs.values()))
    if number == 1 or (sound and kept):
        return None
    state = "has not run" if previous is None else f"is {previous.status.value}" if not previous.passed else "ran on other weights"
    state = "what it wrote to the scratch is gone" if sound else f"it {state}"
    return BlockedError(f"phase {number} starts only when phase {number - 1} has passed, and {state}", store.path(number - 1), f"run phase {number - 1} too")


@contextlib.contextmanager
def _kernel(asked: str | None, handovers: Path, lock: Path):
    """The name of a kernel spec made on the spot for this interpreter, or of the one that was asked for (InputError when there is none of that name)."""
    import json

    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    environment = {name: value for name, value in PATIENT.items() if name not in os.environ}
    environment |= {"LABKIT_HANDOVERS": str(handovers), "LABKIT_LOCK_HELD": str(lock)}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = {name: os.environ.get(name) for name in (*environment, "JUPYTER_PATH", "JPY_SESSION_NAME")}
    with tempfile.TemporaryDirectory(prefix="labkit-kernel-") as folder:
        spec = Path(folder) / "kernels" / "labkit" / "kernel.json"
        spec.parent.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": command, "display_name": "labkit", "language": "python"}))
        os.environ |= environment | {"JUPYTER_PATH": os.pathsep.join([folder, *filter(None, [os.environ.get("JUPYTER_PATH")])])}
        try:
            if asked is not None:
                try:
                    KernelSpecManager().get_kernel_spec(asked)
                except NoSuchKernel:
                    raise InputError(
                        f"there is no Jupyter kernel named {asked!r}", "--kernel", f"found: {', '.join(sorted(KernelSpecManager().find_kernel_specs()))}"
                    ) from None
            yield asked or "labkit"
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _execute(number: int, parameters: dict, folder: Path, kernel_name: str, cell_timeout: int, left: float, progress: bool) -> Failure | None:
    """Run one notebook; its executed copy is kept whatever happens. Returns how it ended early, None when it ran through (a failed gate included)."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import papermill_engines

    from labkit.lab.engine import LabEngine

    papermill_engines.register("labkit", LabEngine)
    # What these two would log of a dead or interrupted kernel is told by the record, in words.
    for noisy in ("papermill", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    executed = folder / "executed" / f"{number:02}_{PHASES[number]}.ipynb"
    executed.parent.mkdir(parents=True, exist_ok=True)
    late = threading.Event()
    watchdog = threading.Timer(max(left, 0.1), lambda: (late.set(), LabEngine.kill()))
    watchdog.daemon = True
    watchdog.start()
    try:
        papermill.execute_notebook(
            _notebook(number),
            executed,
            parameters,
            engine_name="labkit",
            kernel_name=kernel_name,
            language="python",
            cwd=_notebook(number).parent,
            execution_timeout=cell_timeout,
            start_timeout=120,
            log_output=False,
            kernel_log=executed.with_suffix(".log"),
            progress_bar={
                "desc": f"{number} {PHASES[number]:<9}",
                "disable": not progress,
                "leave": False,
                "bar_format": "{desc} {percentage:3.0f}%|{bar:28}| cell {n_fmt} of {total_fmt}, {elapsed}",
            },
        )
        return None
    except papermill.PapermillExecutionError as error:
        return Failure(
            kind="error",
            what=f"{error.ename}: {error.evalue}"[:600],
            where=f"phase {number}, In [{error.exec_count}], {executed}",
            next="the executed notebook has the traceback",
        )
    except CellTimeoutError:
        return Failure(
            kind="timeout",
            what=f"a cell of phase {number} ran longer than its limit of {cell_timeout} s",
            where=str(executed),
            next="raise the limit with --cell-timeout, or use a smaller model",
        )
    except (DeadKernelError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, DeadKernelError) and "ernel" not in str(error):
            raise
        if late.is_set():
            return Failure(
                kind="timeout",
                what=f"the run reached its time limit in phase {number}",
                where=str(executed),
                next="raise the limit with --timeout; a rerun resumes at this phase",
            )
        return Failure(
            kind="killed",
            what=f"the kernel died in phase {number}{LabEngine.death()}",
            where=str(executed),
            next="often out of memory: close other programs, then run again; it resumes at this phase",
        )
    except KeyboardInterrupt:
        return Failure(kind="interrupted", what=f"interrupted in phase {number}", where=str(executed), next="run again: it resumes at this phase")
    finally:
        watchdog.cancel()
        LabEngine.kill()
        if sys.exc_info()[0] is None and executed.with_suffix(".log").is_file() and not LabEngine.death():
            executed.with_suffix(".log").unlink()


def _settle(store: Records, number: int, source, before: str, failure: Failure | None, parameters: dict) -> Record:
    """The record of the run that just ended, completed with what its kernel could not write."""
    record = store.read(number)
    if record is None or record.run == before:
        record = store.begin(
            Record(
                model=source.name,
                slug=store.slug,
                family=source.config.model_type,
                phase=number,
                name=PHASES[number],
                run="",
                parameters=parameters,
                changed=changed(phase_class(number), parameters),
                source_fingerprint=source.fingerprint,
                packages=records.package_versions(),
                machine=records.machine(),
                git_commit=records.git_commit(),
            )
        )
        failure = failure or Failure(kind="error", what="the notebook ended without a record", where=str(_notebook(number)))
    if record.failure is None and failure is None and record.status is Status.IN_PROGRESS:
        failure = Failure(kind="error", what="the notebook ended before its last cell closed the phase", where=str(_notebook(number)))
    if failure is not None and record.failure is None:
        failure.cell, failure.cell_name = record.cell, record.cell_name
        if record.cell is not None and failure.kind in ("killed", "timeout", "interrupted"):
            failure.what += f" at cell {record.cell} ({record.cell_name})"
        record.failure = failure
        record.status = Status.IN_PROGRESS if failure.kind == "interrupted" else Status.BLOCKED
        record.end = records.now()
        store.write(record)
    return record


def exit_on_signal() -> None:
    """SIGTERM ends a run as Ctrl-C does: with a record."""
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
