"""The handover: a pure function of a model's records and of the notes that people wrote.

`render(folder)` writes `handovers/<slug>_handover.md`; `render_html(folder, out)` one self-contained page. Text between `<!-- notes:NAME -->` and
`<!-- /notes:NAME -->` belongs to people: every rendering carries it over byte for byte, and refuses to write when a marker is broken.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import InputError
from labkit.lab import figures
from labkit.lab.phases import PHASES, PROVING
from labkit.lab.records import Failure, Record, Records, Status, Verdict, write_atomically
from labkit.lab.reproduction import run_commands
from labkit.lab.show import Figure, Gate, Gates, Table, code_markdown, escape_html, escape_markdown, number, when

PHASE_TITLES = {
    1: "Discovery and architecture",
    2: "Layers against the reference",
    3: "Checkpoint conversion",
    4: "Verification end to end",
    5: "Meshes, the TPU compiler, training",
}
NOTES = ("summary", "learned", "status", "bugs", "pitfalls", "commands")
# An opening marker starts its line; elsewhere the same letters (in a command that names an odd model) are only text.
_MARKER = re.compile(r"(?m)(?:^<!-- ()notes:([a-z0-9-]+) -->|<!-- (/)notes:([a-z0-9-]+) -->)")


@dataclass
class Bug:
    """One entry of section 3: what went wrong in which run, and the run that shows it mended (or that it is open)."""

    phase: int
    title: str
    happened: str
    resolution: str
    open: bool
    gate: Gate | None = None


@dataclass
class Handover:
    """Everything the templates print, taken from the records alone."""

    model: str
    slug: str
    family: str
    slice: str
    records: dict[int, Record]
    bugs: list[Bug] = field(default_factory=list)

    @property
    def phases(self) -> list[tuple[int, str, str, Status, Record | None]]:
        return [
            (n, name, PHASE_TITLES[n], self.records[n].status if n in self.records else Status.NOT_STARTED, self.records.get(n)) for n, name in PHASES.items()
        ]

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for record in self.records.values() for v in record.verdicts]

    @property
    def verdict_groups(self) -> list[list[Verdict]]:
        """Verdicts of one name together, in order."""
        return [[v for v in self.verdicts if v.name == name] for name in dict.fromkeys(v.name for v in self.verdicts)]

    @property
    def gates(self) -> list[Gate]:
        return [g for record in self.records.values() for g in record.gates]

    @property
    def proving_gates(self) -> list[Gate]:
        """Those of the phases that prove the port; what phase 5 finds is about how it scales and trains."""
        return [g for n, record in self.records.items() if n in PROVING for g in record.gates]

    @property
    def status(self) -> str:
        """proven | failed | blocked | in progress"""
        statuses = [status for n, _, _, status, _ in self.phases if n in PROVING]
        if any(not g.passed for g in self.proving_gates):
            return "failed"
        if Status.BLOCKED in statuses:
            return "blocked"
        return "proven" if all(n in self.records and self.records[n].status is Status.DONE for n in PROVING) else "in progress"

    @property
    def sentence(self) -> str:
        """The outcome in one sentence of the lab's own words."""
        held, count = sum(g.passed for g in self.proving_gates), len(self.proving_gates)
        exact = [v for v in self.verdicts if v.name == "exact"]
        if self.status == "proven":
            full = next((v for v in exact if v.on == "full"), exact[-1] if exact else None)
            error = f" In float64 on both sides the largest relative error is {number(full.value)} (limit {number(full.limit)})." if full else ""
            left = "".join(f" But {words}." for words in self.unreached)
            return f"The port computes the same function as the reference: all {held} gates hold.{error}{left}{self._scaling}"
        if self.status == "failed":
            return f"The port is not proven: {count - held} of {count} gates do not hold."
        if self.status == "blocked":
            reason = next((r.failure.what for r in self.records.values() if r.status is Status.BLOCKED and r.failure), "a wall stands in the way")
            return f"Blocked: {reason.rstrip('.')}."
        return f"In progress: {held} of {count} gates measured so far hold." if count else "In progress."

    @property
    def unreached(self) -> list[str]:
        """Of phase 4: sentences, one per length at which the function changes and that no prompt goes beyond."""
        return [words for record in self.records.values() for words in record.outcome.get("unreached", ())]

    @property
    def _scaling(self) -> str:
        """What phase 5 adds to the sentence: how many of its gates do not hold; nothing when all do or it has not run."""
        failed = [g for n, record in self.records.items() if n not in PROVING for g in record.gates if not g.passed]
        return f" On meshes, for the TPU compiler and in training {len(failed)} of phase 5's gates do not hold." if failed else ""

    @property
    def seconds(self) -> dict[int, float]:
        return {n: sum(t.seconds for t in record.timings) for n, record in self.records.items()}

    @property
    def packages(self) -> dict[str, str]:
        return self.records[max(self.records)].packages if self.records else {}

    @property
    def commits(self) -> list[str]:
        return list(dict.fromkeys(r.git_commit for r in self.records.values() if r.git_commit))

    @property
    def last(self) -> str:
        return max((r.end or r.start for r in self.records.values()), default="")

    @property
    def run_commands(self) -> list[str]:
        """This handover again, as lines of a shell with their comments."""
        return [f"{command}   # phase{'s' if ',' in phases else ''} {phases} of this handover" for command, phases in run_commands(self.model, self.records)]


def collect(folder: Path) -> Handover:
    """The handover of the records in `folder`. InputError when there are none."""
    records = {r.phase: r for r in Records(folder).all() if r.phase in PHASES}
    if not records:
        raise InputError("there is no record of this model", folder, "run `labkit run MODEL` first")
    latest = records[max(records)]
    family = next((r.family for r in reversed(records.values()) if r.family), "")
    slice_ = next((r.slice for r in reversed(records.values()) if r.slice), "")
    return Handover(
        model=latest.model, slug=Path(folder).name, family=family, slice=slice_, records=records, bugs=[b for r in records.values() for b in bugs(r)]
    )


def bugs(record: Record) -> list[Bug]:
    """Section 3 of one phase: gates that failed, runs that ended early, and what became of each."""
    runs = [*record.history, record.past() if record.end or record.failure else None]
    runs = [run for run in runs if run is not None]
    entries: list[Bug] = []
    for i, run in enumerate(runs):
        for gate in run.failed:
            if any(gate.name in (g.name for g in later.failed) for later in runs[i + 1 :]):
                continue  # told by the last run in which it failed
            first = next(r for r in runs if gate.name in (g.name for g in r.failed))
            mended = next((later for later in runs[i + 1 :] if gate.name in later.passed), None)
            happened = (
                f"In the run of {when(run.start)} at {_commit(run.git_commit)} the gate gave {number(gate.value)} against the limit {number(gate.limit)}."
            )
            if first is not run:
                happened += f" It failed first in the run of {when(first.start)} at {_commit(first.git_commit)}."
            resolution = f"It holds since the run of {when(mended.start)} at {_commit(mended.git_commit)}." if mended else "Open."
            entries.append(Bug(record.phase, f"Gate: {gate.name}", happened, resolution, mended is None, gate))
        if run.failure and run.failure.kind != "gate":
            later = next((r for r in runs[i + 1 :] if r.status is Status.DONE), None)
            resolution = (
                f"The phase finished in the run of {when(later.start)} at {_commit(later.git_commit)}."
                if later
                else "Open: run the phase again; it resumes here."
            )
            entries.append(
                Bug(
                    record.phase,
                    _ended(run.failure, record.phase),
                    f"The run of {when(run.start)} at {_commit(run.git_commit)}: {_told(run.failure)}",
                    resolution,
                    later is None,
                )
            )
    return entries


def _commit(commit: str) -> str:
    return f"commit {commit}" if commit else "no commit"


def _ended(failure: Failure, phase: int) -> str:
    where = f" at cell {failure.cell}" if failure.cell is not None else ""
    words = {"interrupted": "Interrupted", "killed": "Kernel died", "timeout": "Time limit reached"}
    return f"{words.get(failure.kind, failure.kind)} in phase {phase}{where}"


def _told(failure: Failure) -> str:
    return " ".join(
        part.rstrip(".") + "." for part in (failure.what, failure.where and f"Where: {failure.where}", failure.next and f"Next: {failure.next}") if part
    )


def read_notes(text: str, where: Path) -> dict[str, str]:
    """What people wrote, by marker name. InputError when a marker is unpaired or doubled: nothing may be lost."""
    notes, opened = {}, None
    for match in _MARKER.finditer(text):
        closing, name = bool(match.group(3)), match.group(2) or match.group(4)
        if closing and opened is None and text[: match.start()].rpartition("\n")[2]:
            continue
        if closing and opened is not None and opened[0] == name:
            notes[name], opened = text[opened[1] : match.start()], None
        elif not closing and opened is None and name not in notes:
            opened = (name, match.end())
        else:
            raise InputError(
                f"the note markers are not in pairs: {match.group()}",
                f"{where}, line {text.count(chr(10), 0, match.start()) + 1}",
                "mend the marker; nothing was written",
            )
    if opened:
        raise InputError(f"the note marker notes:{opened[0]} is never closed", where, f"add <!-- /notes:{opened[0]} --> after your note; nothing was written")
    return notes


def path_of(folder: Path) -> Path:
    """`handovers/<slug>_handover.md` for the records in `handovers/<slug>`."""
    return Path(folder).parent / f"{Path(folder).name}_handover.md"


def _existing_notes(folder: Path) -> dict[str, str]:
    path = path_of(folder)
    return read_notes(path.read_bytes().decode("utf-8", "surrogateescape"), path) if path.is_file() else {}


def _time_figure(handover: Handover, folder: Path) -> Figure | None:
    cells = [(n, t.name, t.seconds) for n, record in handover.records.items() for t in record.timings]
    return figures.time_by_phase(cells, PHASES).write(folder, "time_by_phase").at(folder, f"{folder.name}/") if cells else None


def _environment(**filters):
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.PackageLoader("labkit.lab"), trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    env.filters.update(number=number, when=when, **filters)
    return env


def _time_table(handover: Handover) -> Table:
    total = sum(handover.seconds.values()) or 1.0
    rows = [
        [f"{n} {PHASES[n]}", t.name, round(t.seconds, 2), "█" * round(40 * t.seconds / total)] for n, record in handover.records.items() for t in record.timings
    ]
    return Table(title="Seconds per phase and cell", columns=["phase", "cell", "seconds", ""], rows=rows, fold=True)


def _place_figures(handover: Handover, folder: Path) -> None:
    for record in handover.records.values():
        for figure in record.figures:
            figure.at(folder, f"{folder.name}/")


def _fence(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}bash\n{text}\n{fence}"


def markdown(folder: Path, notes: dict[str, str] | None = None) -> str:
    """The handover as Markdown."""
    folder = Path(folder)
    handover = collect(folder)
    _place_figures(handover, folder)
    notes = dict(notes or {})
    note = lambda name: f"<!-- notes:{name} -->{notes.get(name, chr(10))}<!-- /notes:{name} -->"
    env = _environment(md=escape_markdown, code=code_markdown, fence=_fence)
    return env.get_template("handover.md.j2").render(
        h=handover, note=note, orphans=sorted(set(notes) - set(NOTES)), time_figure=_time_figure(handover, folder), time_table=_time_table(handover)
    )


def render(folder: Path) -> Path:
    """Write the Markdown handover beside the records' folder and return its path; people's notes are kept."""
    path = path_of(folder)
    text = markdown(folder, _existing_notes(folder))
    write_atomically(path, text.encode("utf-8", "surrogateescape"))
    return path


def render_html(folder: Path, out: Path | None = None) -> Path:
    """Write the handover as one self-contained page: figures inside, no script, no outside resource."""
    import markupsafe
    from markdown_it import MarkdownIt

    folder = Path(folder)
    handover = collect(folder)
    _place_figures(handover, folder)
    notes = _existing_notes(folder)
    written = MarkdownIt("js-default", {"html": False})
    note = lambda name: written.render(notes[name].encode("utf-8", "surrogateescape").decode("utf-8", "replace")) if notes.get(name, "").strip() else ""
    env = _environment(e=lambda text: markupsafe.Markup(escape_html(number(text))))
    env.autoescape = True
    raw = lambda text: markupsafe.Markup(text)
    page = env.get_template("handover.html.j2").render(
        h=handover,
        note=lambda name: raw(note(name)),
        orphans=sorted(set(notes) - set(NOTES)),
        raw=raw,
        time_figure=_time_figure(handover, folder),
        time_table=_time_table(handover),
        gates=lambda gates: Gates(gates=gates),
    )
    out = Path(out) if out else path_of(folder).with_suffix(".html")
    write_atomically(out, page)
    return out
