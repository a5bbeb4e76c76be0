"""What a check says: one line of a table."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Found:
    """What a check measured. value: its number, if it has one. problems: each a sentence with the name of what is wrong; none means that it holds.

    notes: what was declared, with the reason.
    """

    value: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def within(self, value: float, limit: float, what: str) -> None:
        """Keep the largest value; one above the limit, or one that is no number, is a problem."""
        self.value = value if self.value is None else max(self.value, value)
        if not value <= limit:
            self.problems.append(f"{what}: relative error {value:.1e}, limit {limit:.0e}")


@dataclass
class Check:
    """One check on one source. number: 1 to 8, 0 for what stands beside them. reason: why it failed; place: file:line where an error came from."""

    number: int
    name: str
    passed: bool
    value: float | None = None
    limit: str = ""
    reason: str = ""
    place: str = ""
    seconds: float = 0.0
    note: str = ""

    def plain(self) -> str:
        value = "" if self.value is None else f"{self.value:.1e}"
        mark, number = "pass" if self.passed else "FAIL", str(self.number) if self.number else "-"
        place = f" [{self.place}]" if self.place else ""
        line = f"  {mark} {number} {self.name:26} {value:8} {self.limit:10} {self.seconds:5.1f} s  {self.reason}{place}".rstrip()
        return line + (f"\n         {self.note}" if self.note else "")


@dataclass
class Conformance:
    """The checks of one source. kind: the slice's, "refined", "translated" or "edited"."""

    model: str
    family: str
    kind: str = ""
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Every check that was taken holds, and one was taken."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def held(self) -> list[int]:
        """The numbers, 1 to 8, of the checks that hold."""
        return [check.number for check in self.checks if check.number and check.passed]

    def check(self, name_or_number: str | int) -> Check:
        """The check of that name or number. KeyError when it was not taken."""
        for check in self.checks:
            if name_or_number in (check.name, check.number or None):
                return check
        raise KeyError(name_or_number)

    def as_dict(self) -> dict:
        """Plain data for records."""
        return asdict(self) | {"passed": self.passed, "held": self.held}

    def plain(self) -> str:
        head = f"{self.model} ({self.kind}): {'conforms' if self.passed else 'does NOT conform'}, {self.seconds:.1f} s"
        return "\n".join([head, *(check.plain() for check in self.checks)])


def take(number: int, name: str, limit: str, measure: Callable[[], Found]) -> Check:
    """Run one check; whatever it raises is its own failure."""
    start = time.perf_counter()
    check = Check(number, name, False, limit=limit)
    try:
        found = measure()
        check.value, check.passed, check.note = found.value, not found.problems, "; ".join(found.notes)
        check.reason = "; ".join(found.problems[:3]) + (f" and {len(found.problems) - 3} more" if len(found.problems) > 3 else "")
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        check.reason, check.place = f"{type(error).__name__}: {lines[0] if lines else ''}"[:400], place_of(error)
    check.seconds = round(time.perf_counter() - start, 2)
    return check


def place_of(error: Exception) -> str:
    """The innermost line of a slice that the error passed through, else of the lab, else of anything."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    slices = [f for f in frames if "/transformers/" not in f.filename and ("/modeling_" in f.filename or "/checkpoint_mappings_" in f.filename)]
    own = [f for f in frames if "/labkit/" in f.filename]
    frame = (slices or own or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
