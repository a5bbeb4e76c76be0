"""The typed JSON that a phase writes; the only thing the handover is rendered from.

`Records(folder)` is the records of one model: `handovers/<slug>/phase<N>.json`. Writes are atomic. A new run of a phase keeps the run before it as a
`PastRun`, so that a gate which failed and later passed, and a run that was interrupted or killed, can be told with both runs and their commits.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.errors import InputError
from labkit.lab.show import Figure, Gate, Scalar, Section, Table, Text

SCHEMA_VERSION = 1
PACKAGES = ("labkit", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "torch", "numpy", "tokenizers", "safetensors")


class Status(StrEnum):
    NOT_STARTED = "NOT STARTED"
    IN_PROGRESS = "IN PROGRESS"
    BLOCKED = "BLOCKED"
    DONE = "DONE"


class Data(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Finding(Data):
    """Something that a person should know: which component, why, what shows it, what would mend it. Not by itself a failure."""

    component: str
    cause: str
    evidence: str = ""
    fix: str = ""


class Verdict(Data):
    """A row of the verdict table. `on` is what was compared: tiny, subset or full."""

    name: str
    on: str
    passed: bool
    value: Scalar
    limit: Scalar
    measure: str
    detail: str = ""


class Timing(Data):
    """How long one cell took."""

    cell: int
    name: str
    seconds: float


class Failure(Data):
    """Why a run ended early. kind: the error class, `interrupted` or `killed`."""

    kind: str
    what: str
    where: str = ""
    next: str = ""
    cell: int | None = None
    cell_name: str = ""


class PastRun(Data):
    """What stays of an earlier run of a phase."""

    run: str
    start: str
    end: str | None
    status: Status
    git_commit: str
    failed: list[Gate] = Field(default_factory=list)
    passed: list[str] = Field(default_factory=list)
    failure: Failure | None = None


class Command(Data):
    """A command that reproduces a step."""

    does: str
    command: str


class Record(Data):
    """One run of one phase on one model."""

    schema_version: int = SCHEMA_VERSION
    model: str
    slug: str
    family: str = ""
    slice: str = ""  # refined | translated | "" when there is none
    phase: int
    name: str
    run: str  # the id of this run: its start time and process
    source_fingerprint: str = ""
    inputs_fingerprint: str = ""  # source, parameters, code and packages: what a finished phase is reused by
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    changed: dict[str, Scalar] = Field(default_factory=dict)  # of these, the ones that are not the notebook's defaults
    packages: dict[str, str] = Field(default_factory=dict)
    devices: list[str] = Field(default_factory=list)
    machine: str = ""
    git_commit: str = ""
    start: str = ""
    end: str | None = None
    status: Status = Status.NOT_STARTED
    cell: int | None = None  # the cell that runs now, while IN PROGRESS
    cell_name: str = ""
    learned: list[Text] = Field(default_factory=list)
    pitfalls: list[Text] = Field(default_factory=list)
    sections: list[Section] = Field(default_factory=list)
    gates: list[Gate] = Field(default_factory=list)
    verdicts: list[Verdict] = Field(default_factory=list)
    outcome: dict = Field(default_factory=dict)  # the `verdicts` object of `labkit check --json`
    findings: list[Finding] = Field(default_factory=list)
    timings: list[Timing] = Field(default_factory=list)
    commands: list[Command] = Field(default_factory=list)
    outputs: dict[str, str] = Field(default_factory=dict)
    failure: Failure | None = None
    history: list[PastRun] = Field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.status is Status.DONE and all(gate.passed for gate in self.gates)

    @property
    def tables(self) -> list[Table]:
        return [item for section in self.sections for item in section.items if isinstance(item, Table)]

    @property
    def figures(self) -> list[Figure]:
        return [item for section in self.sections for item in section.items if isinstance(item, Figure)]

    def past(self) -> PastRun:
        """This run as the history keeps it; a run that never ended was interrupted."""
        failure = self.failure
        if self.end is None and failure is None:
            failure = Failure(
                kind="interrupted", what=f"interrupted in phase {self.phase} at {_cell(self.cell, self.cell_name)}", cell=self.cell, cell_name=self.cell_name
            )
        return PastRun(
            run=self.run,
            start=self.start,
            end=self.end,
            status=self.status,
            git_commit=self.git_commit,
            failure=failure,
            failed=[g for g in self.gates if not g.passed],
            passed=[g.name for g in self.gates if g.passed],
        )


def _cell(cell: int | None, name: str) -> str:
    return "its start" if cell is None else f"cell {cell}" + (f" ({name})" if name else "")


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write beside `path` and rename over it: a reader sees the old text or the new, never a part. InputError when the folder cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text if isinstance(text, bytes) else text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(
            f"cannot write {path.name}: {error.strerror or error}", path.parent, "free some space, or choose a folder that can be written with --handovers"
        ) from None


class Records:
    """The records of one model, in `folder` (`handovers/<slug>`)."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    @property
    def slug(self) -> str:
        return self.folder.name

    def path(self, phase: int) -> Path:
        return self.folder / f"phase{phase}.json"

    def read(self, phase: int) -> Record | None:
        """The record of a phase, or None. InputError when the file is not a record of this schema."""
        path = self.path(phase)
        if not path.is_file():
            return None
        try:
            return Record.model_validate_json(path.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()[-1 if isinstance(error, UnicodeDecodeError) else 0]
            raise InputError(f"the record of phase {phase} cannot be read: {first}", path, "remove the file and run the phase again") from None

    def all(self) -> list[Record]:
        found = (self.read(int(p.stem.removeprefix("phase"))) for p in sorted(self.folder.glob("phase[0-9]*.json")))
        return [record for record in found if record is not None]

    def write(self, record: Record) -> None:
        write_atomically(self.path(record.phase), record.model_dump_json(indent=1) + "\n")

    def begin(self, record: Record) -> Record:
        """Start a run: the run before it, if any, becomes history; the record is written as IN PROGRESS."""
        previous = self.read(record.phase)
        record.start = record.start or now()
        record.run = record.run or f"{record.start}#{os.getpid()}"
        record.status = Status.IN_PROGRESS
        if previous is not None:
            record.history = compact([*previous.history, previous.past()])
        self.write(record)
        return record


def compact(runs: list[PastRun]) -> list[PastRun]:
    """Earlier runs worth telling: those with a failure, and the first good one after each."""
    kept: list[PastRun] = []
    for run in runs:
        if run.failed or run.failure or (kept and (kept[-1].failed or kept[-1].failure)):
            kept.append(run)
    return kept[-40:]


def model_claim(identity: str = "", folder: Path | None = None) -> str | None:
    """The digest by which a source claims a folder: of an identity, or the one that a folder's model.json holds (None when it holds none)."""
    if folder is None:
        return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
    path = Path(folder) / "model.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))["identity"]
    except (ValueError, KeyError, TypeError):
        raise InputError("model.json is not what the lab wrote", path, "remove the file, or the folder, and run again") from None


def model_folder(handovers: Path, slug: str, identity: str) -> Path:
    """The folder of a model's records: `handovers/<slug>`, or `<slug>-<6 hex>` when another source holds that slug already.

    identity: what tells two sources with one slug apart (the absolute path, the hub id). Claimed by `model.json` in the folder.
    """
    claim = model_claim(identity)
    for name in (slug, f"{slug}-{claim[:6]}"):
        folder = Path(handovers) / name
        held = model_claim(folder=folder)
        if held is None:
            write_atomically(folder / "model.json", json.dumps({"identity": claim}) + "\n")
        if held in (None, claim):
            return folder
    raise InputError(f"two other sources hold the name {slug}", handovers, "use another --handovers folder")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "labkit":
                import labkit

                versions[name] = labkit.__version__
    return versions


def machine() -> str:
    import psutil

    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, Python {platform.python_version()}"
    )


def committed(path: Path) -> str | None:
    """The text of a file at HEAD of the checkout that the code runs from, empty where HEAD lacks it; None outside a checkout."""
    command = lambda folder, *arguments: subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20)
    try:
        if command(Path(__file__).parent, "ls-files", "--error-unmatch", Path(__file__).name).returncode:
            return None
        shown = command(path.parent, "show", f"HEAD:./{path.name}")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "" if shown.returncode else shown.stdout


def git_commit(folder: Path | None = None) -> str:
    """The commit of the checkout that the code runs from, with `+changes` when files differ from it; empty outside a checkout."""
    folder = folder or Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=20)
        if head.returncode:
            return ""
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "."], cwd=folder.parent, capture_output=True, text=True, timeout=20
        )
        return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""
