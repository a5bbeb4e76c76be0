"""PerturbSpec: a declarative attack, and what became of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("parameter", "config", "input")
ALIKE, TRACKS, NOTHING = "both outputs move, and move alike", "ours tracks the reference", "nothing moves"


@dataclass(frozen=True)
class PerturbSpec:
    """One attack on both sides at once.

    kind: "parameter", "config" or "input". target: a parameter's path, a config key (several joined by "+"), or the name of an input probe.
    change: parameter: {"index": row of a stacked leaf or None}; config: {key: value}, put over config.json; input: what the probe is told.
    follows: what must follow. reason: why, where it is not what is usual: a leaf that moves nothing is dead, and dead leaves are declared with a reason.
    origin: "generated", or "slice" for one that a slice brings in its `PERTURB_SPECS`.
    """

    kind: str
    target: str
    change: Any = None
    follows: str = ALIKE
    reason: str = ""
    origin: str = "generated"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"a perturbation is of a kind among {', '.join(KINDS)}, not {self.kind!r}")

    @classmethod
    def of_slice(cls, values: Mapping) -> "PerturbSpec":
        """A spec that a slice brings as plain data: the fields of this class."""
        return cls(**values, origin="slice")


@dataclass
class Row:
    """What became of a spec. value: relative error against the reference after the change; moved: how far the reference moved. reason: why it failed."""

    spec: PerturbSpec
    passed: bool
    value: float | None = None
    moved: float | None = None
    reason: str = ""
    note: str = ""

    def plain(self) -> str:
        numbers = f"{'' if self.moved is None else f'{self.moved:.1e}':>8} {'' if self.value is None else f'{self.value:.1e}':>8}"
        change = f" {_short(self.spec.change)}" if self.spec.change is not None else ""
        told = "; ".join(filter(None, (self.reason, self.note)))
        return f"{'pass' if self.passed else 'FAIL'}  {self.spec.kind:9} {numbers}  {self.spec.target}{change}{'  ' + told if told else ''}"


@dataclass
class Control:
    """One planted fault. caught_by: the spec that failed for it, "" when none did. value: the error that it showed."""

    kind: str
    fault: str
    caught_by: str = ""
    value: float | None = None

    @property
    def caught(self) -> bool:
        return bool(self.caught_by)


@dataclass
class Perturbation:
    """Every spec of one model and what became of it, and the planted faults."""

    model_type: str
    source: str
    kind: str = ""
    rows: list[Row] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """How many specs were tried."""
        return len(self.rows)

    @property
    def passed(self) -> int:
        """How many of them held."""
        return sum(row.passed for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if not row.passed]

    @property
    def missed(self) -> list[Control]:
        """Planted faults that nothing caught."""
        return [control for control in self.controls if not control.caught]

    @property
    def holds(self) -> bool:
        """True when every spec held and every planted fault was caught."""
        return bool(self.rows) and not self.failures and not self.missed

    def as_dict(self) -> dict:
        """Plain data."""
        counted = {"passed": self.passed, "total": self.total, "holds": self.holds, "caught": len(self.controls) - len(self.missed)}
        return asdict(self) | counted

    @classmethod
    def from_dict(cls, values: Mapping) -> "Perturbation":
        """What `as_dict` made."""
        rows = [Row(**{**row, "spec": PerturbSpec(**row["spec"])}) for row in values["rows"]]
        controls = [Control(**control) for control in values["controls"]]
        return cls(values["model_type"], values["source"], values["kind"], rows, controls, values["seconds"])

    def plain(self, failures_only: bool = False) -> str:
        caught = f", {len(self.controls) - len(self.missed)} of {len(self.controls)} planted faults caught" if self.controls else ""
        lines = [f"{self.source} ({self.kind}): {self.passed} of {self.total} specs hold{caught}, {self.seconds:.1f} s"]
        lines += ["      kind         moved    error  target and change"] if not failures_only else []
        lines += [f"  {row.plain()}" for row in (self.failures if failures_only else self.rows)]
        return "\n".join(lines + [f"  {line}" for line in control_lines(self.missed if failures_only else self.controls)])


def control_lines(controls: list[Control]) -> list[str]:
    """The table of planted faults: what was planted, what caught it, how large the error was."""
    return [
        f"{'caught' if c.caught else 'MISSED'}  {c.kind:9} {'' if c.value is None else f'{c.value:.1e}':>8}  {c.fault}  <- {c.caught_by or 'nothing'}"
        for c in controls
    ]


def _short(change) -> str:
    text = " ".join(f"{key}={value}" for key, value in change.items()) if isinstance(change, Mapping) else str(change)
    return text if len(text) <= 150 else text[:147] + "..."
