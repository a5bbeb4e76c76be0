"""Small records made by hand."""

from labkit.lab.records import Failure, PastRun, Record, Records, Status, Timing, Verdict
from labkit.lab.show import Gate, Section, Table, Text

HOSTILE = "<script>alert(1)</script> [x](http://e.vil) `a|b` **b** <!-- notes:summary --> $e$\n# h @you"


def record(phase=1, **changes) -> Record:
    base = dict(
        model="tiny:qwen3",
        slug="tiny-qwen3",
        family="qwen3",
        slice="refined",
        phase=phase,
        name={1: "discover", 2: "layers", 3: "convert", 4: "verify", 5: "scale"}[phase],
        run=f"2026-11-29T10:0{phase}:00+00:00#1",
        source_fingerprint="abc",
        packages={"jax": "0.10.2"},
        devices=["cpu cpu 0"],
        machine="Linux",
        git_commit="c0ffee",
        start=f"2026-11-29T10:0{phase}:00+00:00",
        end=f"2026-11-29T10:0{phase}:30+00:00",
        status=Status.DONE,
        gates=[Gate(name="audit", passed=True, value=0, limit=0, explanation="both ways")],
        timings=[Timing(cell=1, name="open", seconds=1.5)],
    )
    return Record(**(base | changes))


def complete(folder) -> Records:
    """Four phases, all passed."""
    store = Records(folder)
    for phase in (1, 2, 3):
        store.write(record(phase))
    verdicts = [Verdict(name="exact", on="full", passed=True, value=2e-15, limit=1e-9, measure="relative error")]
    store.write(record(4, verdicts=verdicts, sections=[Section(title="Exact", items=[Text(words="ok"), Table(title="T", columns=["a"], rows=[[1]])])]))
    return store


def failed_then_passed(folder) -> Records:
    store = Records(folder)
    bad = record(3, run="first", git_commit="bad1", status=Status.BLOCKED, gates=[Gate(name="audit", passed=False, value=2, limit=0)])
    store.write(bad)
    store.begin(record(3, run="second", git_commit="good2", end=None))
    done = store.read(3)
    done.status, done.end = Status.DONE, "2026-11-29T11:00:00+00:00"
    store.write(done)
    return store


def killed() -> PastRun:
    failure = Failure(kind="killed", what="the kernel died in phase 3 (signal 9) at cell 5 (to_orbax)", cell=5, cell_name="to_orbax")
    return PastRun(run="k", start="2026-11-29T09:00:00+00:00", end="2026-11-29T09:01:00+00:00", status=Status.BLOCKED, git_commit="c1", failure=failure)
