"""`labkit port`: what the translator writes for a model, the verdict on it, how it differs from the slice there is, and putting it into the garden."""

import contextlib
import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import InputError, LabError
from labkit.hf import architectures, open_source
from labkit.lab.show import Section, Table
from labkit.lab.slices import describe
from labkit.models.outside import NAMED
from labkit.port import slices
from labkit.port.slices import SliceInfo

EXACT_PARAMETERS = 1_000_000_000
LENGTHS = (6, 64)


@dataclass
class Ported:
    """What `labkit port` found. written: where --write put it. there: the slice that a person has. verdicts: one per judged source; diff: unified, or None."""

    model: str
    slice: SliceInfo
    there: SliceInfo | None
    verdicts: list[dict] = field(default_factory=list)
    written: Path | None = None
    diff: str | None = None

    @property
    def status(self) -> str:
        if self.slice.refusals:
            return "blocked"
        return "pass" if all(verdict["passed"] for verdict in self.verdicts) else "fail"

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "pass" else 1

    def files(self) -> dict[str, str]:
        """name -> text of the slice as translated."""
        files = sorted(self.slice.folder.glob("*.py"), key=lambda file: (file.name == "__init__.py", file.name))
        return {file.name: file.read_text(encoding="utf-8") for file in files}

    def as_json(self) -> dict:
        """One object: the keys of the design, and files, refusals, unproven branches, diff."""
        provenance = {key: self.slice.provenance.get(key) for key in ("fingerprint", "transformers", "translator", "date", "sources", "unusual", "unproven")}
        return {
            "model": self.model,
            "family": self.slice.family,
            "status": self.status,
            "verdicts": {v["on"]: {key: v[key] for key in ("passed", "max_rel_error", "error")} for v in self.verdicts},
            "gates": [],
            "findings": [],
            "error": slices.blocked(self.slice.family, self.slice.refusals, self.slice.folder).as_dict() if self.slice.refusals else None,
            "slice": {**provenance, "folder": str(self.slice.folder), "refusals": self.slice.refusals, "files": self.files()},
            "there": None if self.there is None else {"kind": self.there.kind, "folder": str(self.there.folder)},
            "written": None if self.written is None else str(self.written),
            "diff": self.diff,
        }

    def plain(self) -> str:
        """Origin, refusals, unproven branches, verdict, and the diff when it was asked for."""
        items = describe(self.slice)
        if self.verdicts:
            rows = [[v["on"], v["passed"], v["max_rel_error"], v["error"]] for v in self.verdicts]
            items.append(Table(title="Exact verdict", columns=["on", "passed", "largest relative error", "why not"], rows=rows, note="float64, limit 1e-9."))
        text = Section(title=f"{self.slice.family}: {self.status}", items=items).plain()
        if self.diff is not None:
            against = f"{self.there.kind} slice in {self.there.folder}" if self.there else "slice that the translator wrote before"
            text += f"\n\nWhat would change in the {against}:\n\n" + (self.diff or "nothing")
        return text + (f"\n\nwritten to {self.written}" if self.written else "")


def port(
    model: str,
    *,
    revision: str = "",
    trust_remote_code: bool = False,
    write: bool = False,
    diff: bool = False,
    force: bool = False,
    judge: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Ported:
    """Translate MODEL's family, judge it, and with `write` put it into the garden.

    model: anything that `open_source` takes, or a bare model type, which means its tiny model. diff: compare with the slice there is. judge: run the exact
    verdict. Raises InputError when `write` would replace a refined slice, or an edited one without `force`; BlockedError when there is no source to translate.
    """
    known = architectures.causal_lm_classes()
    model = f"tiny:{model}" if model in known and not Path(model).exists() else model
    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    family = source.config.model_type
    there, before = slices.slice_there(family), _newest(family)
    if write:
        _may_write(family, there, force)
    say(f"translating {family}")
    made = slices.cached_slice(source, lambda fraction, text: say(text))
    found = Ported(source.name, made, there)
    if diff:
        found.diff = difference(there.folder if there else before, made.folder)
    if judge and not made.refusals:
        found.verdicts = [_judge(on, name, made, say) for on, name in _judged(source, made, say)]
    if write:
        found.written = put(made, there)
    return found


def difference(old: Path | None, new: Path) -> str:
    """Unified diff from the slice in `old` (none: everything is new) to the one in `new`, python files only."""
    names = sorted({file.name for folder in (old, new) if folder is not None for file in folder.glob("*.py")})
    parts = []
    for name in names:
        a, b = (_lines(folder, name) for folder in (old, new))
        parts += [line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(a, b, f"there/{name}", f"translated/{name}")]
    return "".join(parts)


def _lines(folder: Path | None, name: str) -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines(keepends=True) if folder is not None and (folder / name).is_file() else []


def _newest(family: str) -> Path | None:
    """The slice of the type that was put into the cache last, by whichever translator."""
    entries = [entry for entry in slices.slices_dir().glob(f"{family}-*") if (entry / family / "__init__.py").is_file()]
    return max(entries, key=lambda entry: entry.stat().st_mtime) / family if entries else None


def _may_write(family: str, there: SliceInfo | None, force: bool) -> None:
    if there is None or there.kind == "translated":
        return
    if there.kind == "refined":
        raise InputError(f"there is a refined slice of {family}, which a translation does not replace", there.folder, "see --diff for how the two differ")
    if not force:
        advice = "see --diff for what would change; --force replaces it and the edits are lost"
        raise InputError(f"the slice of {family} has been edited since it was translated", there.folder, advice)


def put(made: SliceInfo, there: SliceInfo | None) -> Path:
    """The translated folder, provenance included, at the place of the slice there is, else in the garden of a checkout, else in ./labkit_slices."""
    out = there.folder if there else (slices.GARDEN if _checkout() else Path.cwd() / slices.OUTSIDE) / made.family
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"the slice cannot be written: {error.strerror}", out, "choose a working folder that you can write") from None
    try:
        new, old = temporary / out.name, temporary / "old"
        shutil.copytree(made.folder, new, ignore=shutil.ignore_patterns("__pycache__"))
        if out.exists():
            os.replace(out, old)
        os.replace(new, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _checkout() -> bool:
    """True when the package is a checkout's and its garden can be written."""
    return (slices.GARDEN.parents[2] / "pyproject.toml").is_file() and os.access(slices.GARDEN, os.W_OK)


def _judged(source, made: SliceInfo, say):
    """(on, source name) of what the exact verdict is run on: a tiny model of the type, and the model itself or, where it is large, its subset."""
    family = source.config.model_type
    if family in architectures.causal_lm_classes():
        yield "tiny", source.model if source.origin == "tiny" else f"tiny:{family}"
    if source.origin == "tiny":
        return
    if source.tensors.size <= EXACT_PARAMETERS:
        yield "model", str(source.path)
        return
    from labkit.hf.subset import write_subset

    with tempfile.TemporaryDirectory(prefix="labkit-port-") as folder, _only(made):
        from labkit.models import get_family, read_config

        config, _ = read_config(get_family(family), source.config.effective, source.config.defaults)
        yield "subset", str(write_subset(source, config.plan.representative(), Path(folder) / "subset"))


@contextlib.contextmanager
def _only(made: SliceInfo):
    """While it lasts, this slice is the named one of its type, here and in the processes that are started."""
    from labkit.models import register_folder

    before = os.environ.get(NAMED)
    try:
        register_folder(made.folder, made.kind)
        yield
    finally:
        os.environ.pop(NAMED, None) if before is None else os.environ.__setitem__(NAMED, before)


def _judge(on: str, name: str, made: SliceInfo, say) -> dict:
    """The exact verdict on one source, from a process of its own; a slice that fails to run fails here and says where."""
    from labkit.parity.verdicts import exact_verdict
    from labkit.parity.worker import run_job

    say(f"exact verdict on {on}")
    with _only(made):
        try:
            verdict = exact_verdict(run_job({"kind": "exact", "source": name, "lengths": list(LENGTHS)}))
        except LabError as error:
            return {"on": on, "passed": False, "max_rel_error": None, "error": error.paragraph()}
    why = "" if verdict.passed else "; ".join(f"{key}: {value:.1e}" for key, value in verdict.details["checks"].items() if value > verdict.limit)
    missing = verdict.details["missing"]
    return {"on": on, "passed": verdict.passed, "max_rel_error": verdict.value, "error": why + (f" missing {', '.join(missing[:3])}" if missing else "")}
