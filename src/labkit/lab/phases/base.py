"""What the phases share: an object whose methods are the cells of a notebook.

A method marked `@cell` returns a `Section`. While it runs, the record says so; when it ends, its section, gates and time are in the record; when it fails, the
record says why. So a kernel that dies leaves a trace, in JupyterLab as under papermill.
"""

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from labkit.errors import BlockedError, InputError, LabError
from labkit.lab import handover, records
from labkit.lab.diagnose import lines_of
from labkit.lab.places import PACKAGE, ModelLock, handovers_dir, notebooks_dir
from labkit.lab.records import Command, Failure, Finding, Record, Records, Status, Timing, Verdict
from labkit.lab.reproduction import changed, named
from labkit.lab.show import Figure, Gate, Gates, Item, Scalar, Section, Table, Text

_held: dict[Path, ModelLock] = {}


def cell(method: Callable[..., Section]) -> Callable[..., Section]:
    """Make a method a notebook cell: timed, recorded before and after, its failure kept."""

    @functools.wraps(method)
    def run(self: "Phase", *args, **kwargs) -> Section:
        self._enter(method.__name__)
        start = time.perf_counter()
        try:
            section = method(self, *args, **kwargs)
        except KeyboardInterrupt:
            self._fail("interrupted", f"interrupted in phase {self.number} at cell {self.record.cell} ({method.__name__})", next="run again: it resumes here")
            raise
        except LabError as error:
            self._fail(type(error).__name__, error.what, error.where, error.next)
            raise
        except Exception as error:
            self._fail(
                "error",
                f"{type(error).__name__}: {str(error)[:600]}",
                f"cell {self.record.cell} ({method.__name__})",
                "this is a fault of the lab; the executed notebook has the traceback",
            )
            raise
        section.seconds = round(time.perf_counter() - start, 3)
        self._leave(method.__name__, section)
        return section

    run.is_cell = True
    return run


class Phase:
    """A phase on one model. Subclasses set number, name, title and `cells` (the methods in notebook order)."""

    number: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]
    cells: ClassVar[tuple[str, ...]]
    floors: ClassVar[tuple[str, ...]]  # folders of src/labkit whose code the results depend on
    helpers: ClassVar[tuple[str, ...]] = ()  # further files beside the phase's own

    def __init__(self, model: str, revision: str = "", trust_remote_code: bool = False, **parameters: Scalar):
        """Open the source, take the model's lock, and begin a record. Raises BlockedError when the phase before has not passed."""
        from labkit.hf import open_source
        from labkit.port.slices import slice_identity

        start = time.perf_counter()
        self.source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
        self.parameters = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code, **parameters}
        handovers = handovers_dir()
        self.records = Records(records.model_folder(handovers, self.source.slug, identity(self.source)))
        _hold(handovers, self.records.slug)
        self.gates: list[Gate] = []
        self.slice = None
        self.family, self.config, self.reading, self.wall = self._slice()
        self.record = Record(
            model=self.source.name,
            slug=self.records.slug,
            phase=self.number,
            name=self.name,
            run="",
            family=self.source.config.model_type,
            slice=self.family.source if self.family else self.slice.kind if self.slice else "",
            source_fingerprint=self.source.fingerprint,
            inputs_fingerprint=inputs_fingerprint(type(self), self.source.fingerprint, self.parameters, slice_identity(self.source)),
            parameters=self.parameters,
            changed=changed(type(self), self.parameters),
            packages=records.package_versions(),
            machine=records.machine(),
            git_commit=records.git_commit(),
            devices=_devices(),
        )
        self._require_previous()
        self.records.begin(self.record)
        self._enter("open")
        self.record.timings.append(Timing(cell=self.record.cell or 0, name="open", seconds=round(time.perf_counter() - start, 3)))
        self.records.write(self.record)

    @classmethod
    def refuse(cls, parameters: dict, source) -> None:
        """Raises InputError for parameters that cannot work, before any phase of a run begins."""

    def _slice(self):
        """(family, config, reading, wall): the slice, translated where there is none, and its reading of the config, or the wall that stands in the way."""
        from labkit.converters import effective_config
        from labkit.models import get_family, read_config
        from labkit.port.slices import ensure_slice

        config = self.source.config
        try:
            with self.progress("translate") as progress:
                self.slice = ensure_slice(self.source, progress)
            self.slice.require()
            family = get_family(config.model_type)
        except (BlockedError, InputError) as wall:
            return None, None, {}, wall
        try:
            return family, *read_config(family, effective_config(self.source, family), config.defaults), None
        except InputError as refusal:
            return family, None, {}, refusal

    def _require_previous(self) -> None:
        if self.number == 1:
            return
        previous = self.records.read(self.number - 1)
        if previous is None or not previous.passed or previous.source_fingerprint != self.source.fingerprint:
            state = "has not run" if previous is None else "ran on other weights" if previous.passed else f"is {previous.status.value}"
            raise BlockedError(
                f"phase {self.number} starts only when phase {self.number - 1} has passed, and it {state}",
                self.records.path(self.number - 1),
                f"run phase {self.number - 1} first: labkit run {self.source.model} --phases {self.number - 1}",
            )

    # -- what cells use ------------------------------------------------------------------------------------------------------------------------------

    def gate(self, name: str, passed: bool, value: Any = None, limit: Any = None, explanation: str = "") -> Gate:
        """Record a gate of this phase and return it, to be shown by the cell that measured it."""
        gate = Gate(name=name, passed=bool(passed), value=value, limit=limit, explanation=explanation)
        self.record.gates.append(gate)
        return gate

    def verdict(self, name: str, on: str, passed: bool, value: Any, limit: Any, measure: str, detail: str = "") -> Verdict:
        """Record a row of the verdict table, and the gate that holds it."""
        verdict = Verdict(name=name, on=on, passed=bool(passed), value=value, limit=limit, measure=measure, detail=detail)
        self.record.verdicts.append(verdict)
        self.gate(f"{name} verdict, {on}", passed, value, limit, measure)
        return verdict

    def diagnosed(self, result: dict, measured: str) -> None:
        """The faults that an exact job named: component, cause, the reference's line beside ours, and what would mend it."""
        for fault in result["diagnosis"]:
            sure = "" if fault["certain"] else " (a hint: no trial confirmed it)"
            self.finding(fault["component"], fault["cause"] + sure, f"{measured}: {fault['evidence']}.{lines_of(fault)}", fault["fix"])

    def finding(self, component: str, cause: str, evidence: str = "", fix: str = "") -> None:
        found = Finding(component=component, cause=cause, evidence=evidence, fix=fix)
        if found not in self.record.findings:
            self.record.findings.append(found)

    def learned(self, words: str, **values: Scalar) -> Text:
        text = Text(words=words, values=values)
        self.record.learned.append(text)
        return text

    def pitfall(self, words: str, **values: Scalar) -> None:
        self.record.pitfalls.append(Text(words=words, values=values))

    @property
    def named(self) -> str:
        """The model as a command takes it, with the revision and consent that it was opened with."""
        return named(self.parameters)

    def command(self, does: str, command: str) -> None:
        self.record.commands.append(Command(does=does, command=command))

    def figure(self, drawing, name: str) -> Figure:
        """Write a drawing into the model's figures folder."""
        return drawing.write(self.records.folder, name)

    @contextlib.contextmanager
    def progress(self, label: str):
        """A progress bar for long work in JupyterLab: yields progress(fraction, text). Silent under the runner, which shows its own, and outside a terminal."""
        import sys

        from tqdm import tqdm

        quiet = "LABKIT_LOCK_HELD" in os.environ or not (sys.stderr.isatty() or _in_notebook())
        with tqdm(total=100, desc=label, disable=quiet, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar:28}| {elapsed} {postfix}") as bar:

            def report(fraction: float, text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update(max(0, 100 * fraction - bar.n))

            yield report

    @property
    def scratch(self) -> Path:
        """The folder in the scratch for this source and these records: subset and checkpoints. Runs with other handovers share nothing with it."""
        from labkit.hf import scratch_dir

        place = hashlib.sha256(str(self.records.folder.resolve()).encode()).hexdigest()
        folder = scratch_dir() / "runs" / f"{self.records.slug}-{self.source.fingerprint[:12]}-{place[:6]}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # -- the record's life ---------------------------------------------------------------------------------------------------------------------------

    def _enter(self, name: str) -> None:
        self.record.cell, self.record.cell_name = _cell_number(len(self.record.timings) + 1), name
        self.records.write(self.record)

    def _leave(self, name: str, section: Section) -> None:
        self.record.sections.append(section)
        self.record.timings.append(Timing(cell=self.record.cell or 0, name=name, seconds=section.seconds))
        self.records.write(self.record)

    def _fail(self, kind: str, what: str, where: str = "", next: str = "") -> None:
        self.record.failure = Failure(kind=kind, what=what, where=where, next=next, cell=self.record.cell, cell_name=self.record.cell_name)
        self.record.status = Status.IN_PROGRESS if kind == "interrupted" else Status.BLOCKED
        self.record.end = records.now()
        self.records.write(self.record)
        handover.render(self.records.folder)

    def finish(self) -> Section:
        """The last cell: closes the record, renders the handover, and shows the gates and where the handover is."""
        record = self.record
        failed = [gate for gate in record.gates if not gate.passed]
        record.cell, record.cell_name = None, ""
        record.end = records.now()
        record.status = Status.BLOCKED if failed or self.wall else Status.DONE
        if self.wall and record.failure is None:
            record.failure = Failure(kind="BlockedError", what=self.wall.what, where=self.wall.where, next=self.wall.next)
        self.records.write(record)
        path = handover.render(self.records.folder)
        words = f"Phase {self.number} is {record.status.value}: {len(record.gates) - len(failed)} of {len(record.gates)} gates hold. The handover is {{path}}."
        items: list[Item] = [Text(words=words, values={"path": str(path)})]
        if self.wall:
            items.insert(0, Text(words="**Blocked**: {what} {next}", values={"what": self.wall.what, "next": self.wall.next}))
        if record.gates:
            items.append(Gates(gates=record.gates))
        _release(self.records.folder.parent, self.records.slug)
        return Section(title=f"Phase {self.number}: {record.status.value}", items=items)

    # -- how the phase object itself shows -------------------------------------------------------------------------------------------------------------

    def overview(self) -> Section:
        """What is being looked at, and where things go."""
        import shutil

        source, free = self.source, shutil.disk_usage(self.scratch).free
        rows = [
            ["model", source.name],
            ["comes from", source.origin],
            ["directory", str(source.path)],
            ["family", source.config.model_type],
            ["slice", f"{self.record.slice}, {self.slice.folder}" if self.slice else "none"],
            ["tensors", len(source.tensors)],
            ["fingerprint", source.fingerprint[:16]],
            ["scratch", f"{self.scratch} ({free / 2**30:.1f} GiB free)"],
            ["records", str(self.records.folder)],
        ]
        notes = [Text(words="{note}", values={"note": note}) for note in source.notes]
        return Section(
            title=f"Phase {self.number}, {self.name}: {self.title}", items=[Table(title="Source", columns=["", "value"], rows=rows, code=["value"]), *notes]
        )

    def _repr_html_(self) -> str:
        return self.overview()._repr_html_()

    def __repr__(self) -> str:
        return self.overview().plain()


def _in_notebook() -> bool:
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def _cell_number(ordinal: int) -> int:
    """In[n] of the running notebook, or the ordinal of the call outside one."""
    from IPython import get_ipython

    return get_ipython().execution_count if _in_notebook() else ordinal


def _devices() -> list[str]:
    import jax

    return [f"{d.platform} {d.device_kind} {d.id}" for d in jax.devices()]


def _hold(handovers: Path, slug: str) -> None:
    """Take the model's lock for this process, unless the runner that started this kernel holds it."""
    lock = ModelLock(handovers, slug)
    if os.environ.get("LABKIT_LOCK_HELD") != str(lock.path) and lock.path not in _held:
        _held[lock.path] = lock.acquire()


def _release(handovers: Path, slug: str) -> None:
    lock = _held.pop(ModelLock(handovers, slug).path, None)
    if lock is not None:
        lock.release()


def identity(source) -> str:
    """What tells two sources with one slug apart: a path for what lies in files, else the name as typed."""
    return f"{source.origin}:{Path(source.model).expanduser().resolve() if source.origin in ('directory', 'gguf') else source.name}"


def code_fingerprint(phase: type[Phase]) -> str:
    """Over the source files that a phase depends on: its floors, its notebook, and the lab's own files that make its record."""
    lab = [PACKAGE / "lab" / name for name in ("show.py", "records.py", "figures.py", "diagnose.py")]
    own = [PACKAGE / "lab" / "phases" / name for name in ("base.py", f"{phase.name}.py", *phase.helpers)]
    files = [PACKAGE / "errors.py", *lab, *own, *(f for floor in phase.floors for f in sorted((PACKAGE / floor).rglob("*.py")))]
    digest = hashlib.sha256()
    for file in [*files, notebooks_dir() / f"{phase.number:02}_{phase.name}.ipynb"]:
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def inputs_fingerprint(phase: type[Phase], source_fingerprint: str, parameters: dict[str, Scalar], slice_identity: str = "") -> str:
    """What a finished phase is reused by: source, parameters, code, package versions, and the slice where it lies outside the garden."""
    packages = {k: v for k, v in records.package_versions().items() if k != "labkit"}
    text = json.dumps([source_fingerprint, slice_identity, parameters, code_fingerprint(phase), packages], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
