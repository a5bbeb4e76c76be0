"""The board: every decoder of text that the installed transformers has, translated and proven, one process per type, forked where the imports are done."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import InputError
from labkit.hf import architectures
from labkit.lab.one_per_process import row_apart, rows_of
from labkit.lab.one_per_process import workers as _workers
from labkit.lab.places import PACKAGE

TIME_LIMIT = 180.0
COLUMNS = ("translated", "prefill", "decode", "pieces", "padding", "loop", "round trip", "sharded")
_SHORT = {"translated": "transl", "round trip": "trip", "padding": "pad"}
_HELD_OUT = PACKAGE.parents[1] / "tests" / "port" / "held_out.json"


@dataclass
class Board:
    """rows: what `labkit.port.proof` says of each type. excluded: {type: the rule that leaves it out}. held_out: types that were kept unread until the
    others were done; their own counts are told."""

    rows: list[dict]
    excluded: dict[str, str] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if all(row["passed"] for row in self.rows) else 1

    def count(self, column: str) -> int:
        """Types that hold the column on every configuration."""
        return sum(holds(row, column) is True for row in self.rows)

    def plain(self) -> str:
        """The table, the counts, what is left out and why."""
        width = max([len(row["model_type"]) for row in self.rows] + [5])
        head = f"{'type':{width}}  " + " ".join(f"{_SHORT.get(c, c):>8}" for c in COLUMNS) + f" {'s':>6}  first failure"
        lines = [head, "-" * len(head)]
        for row in sorted(self.rows, key=lambda row: row["model_type"]):
            cells = " ".join(f"{_cell(row, column):>8}" for column in COLUMNS)
            lines.append(f"{row['model_type']:{width}}  {cells} {row.get('seconds', 0):6.1f}  {reason(row)}".rstrip())
        total = len(self.rows)
        lines += ["", f"of {total} types: " + ", ".join(f"{self.count(c)} {c}" for c in COLUMNS) + f"; {sum(row['passed'] for row in self.rows)} hold all"]
        seconds = sorted(row.get("seconds", 0.0) for row in self.rows)
        if seconds:
            lines.append(f"seconds per type: median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}")
        unproven = {row["model_type"]: len(row["unproven"]) for row in self.rows if row.get("unproven")}
        if unproven:
            lines.append(f"branches that no configuration ran: {sum(unproven.values())} in {len(unproven)} types; `labkit port tiny:TYPE` lists them")
        apart = [row for row in self.rows if row["model_type"] in self.held_out]
        if apart and len(apart) < total:
            counts = ", ".join(f"{sum(holds(row, c) is True for row in apart)} {c}" for c in COLUMNS)
            lines.append(f"of the {len(apart)} held-out ones among them: {counts}; {sum(row['passed'] for row in apart)} hold all")
        if self.excluded:
            lines += ["", f"left out by rule ({len(self.excluded)}):", *(f"  {name}: {why}" for name, why in self.excluded.items())]
        return "\n".join(lines)


def check_steps(text: str) -> str:
    """Names of steps, separated by commas, as they are. Raises InputError for a name that no step has."""
    from labkit.parity.proof import STEPS

    for name in text.split(","):
        if name not in STEPS:
            raise InputError(f"No step is called {name!r}", "--steps", f"Choose among {', '.join(STEPS)}")
    return text


def holds(row: dict, column: str) -> bool | None:
    """Whether the type passes the column on every configuration it was tried on; None where it was not tried."""
    if column == "translated":
        return row.get("translated")
    taken = [step for step in row["steps"] if step["name"] == column]
    return all(step["passed"] for step in taken) if taken else None


def reason(row: dict) -> str:
    """The first failure of a row in one short line, empty when there is none."""
    if row.get("error"):
        return _cut(row["error"]["what"])
    if row.get("refusals"):
        first = row["refusals"][0]
        return _cut(f"refused: {first['construct']} at {first['where']}" + (f" and {len(row['refusals']) - 1} more" if len(row["refusals"]) > 1 else ""))
    step = next((step for step in row["steps"] if not step["passed"]), None)
    return _cut(f"{step['on']} {step['name']}: {step['reason']}" + (f" [{step['place']}]" if step["place"] else "")) if step else ""


def _cut(text: str, length: int = 150) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def _cell(row: dict, column: str) -> str:
    held = holds(row, column)
    if column == "translated":
        return {True: "yes", False: "NO", None: "refined" if row.get("kind") == "refined" else "-"}[held]
    values = [step["value"] for step in row["steps"] if step["name"] == column and step["value"] is not None]
    shown = f"{max(values):.0e}" if values else "yes" if held else ""
    return "-" if held is None else shown if held else f"NO {shown}".strip()


def held_out() -> tuple[str, ...]:
    """The types that are kept apart, from the list of the checkout's tests; none where the lab is installed without them."""
    return tuple(json.loads(_HELD_OUT.read_text())["types"]) if _HELD_OUT.is_file() else ()


def board(
    types: Iterable[str] = (),
    *,
    jobs: int = 1,
    out: Path | None = None,
    apart: bool | None = None,
    resume: bool = False,
    time_limit: float = TIME_LIMIT,
    options: Iterable[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Board:
    """Prove each type in a process of its own, `jobs` at a time.

    types: all decoder-only types when empty. out: a file that gets one JSON line per type as it ends. apart: True for the held-out types and no other, False
    for the others, None for all. resume: keep the lines that `out` holds and prove the rest. options: further arguments of `labkit.port.proof`. Raises
    InputError for a type that is no decoder of text.
    """
    from labkit.hf.decoder_types import decoder_only_types

    known, excluded = decoder_only_types()
    kept_apart = held_out()
    if apart and not kept_apart:
        raise InputError("there is no list of held-out types", _HELD_OUT, "run the board without it; only a checkout has the list")
    chosen = _chosen(tuple(types), known, excluded, kept_apart, apart)
    rows = _read(out) if out is not None and resume else {}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, rows.values())
    waiting = [name for name in chosen if name not in rows]

    def told(index: int, count: int, name: str, row: dict) -> None:
        say(f"[{index}/{count}] {name}: {'proven' if row['passed'] else 'NOT proven'}, {row['seconds']:.1f} s  {reason(row)}".rstrip())

    rows |= rows_of(waiting, lambda name, running: _prove(name, time_limit, tuple(options), running), jobs=jobs, out=out, say=told)
    return Board([rows[name] for name in chosen], excluded if not types else {}, kept_apart)


def _chosen(types: tuple[str, ...], known, excluded, kept_apart, apart: bool | None) -> list[str]:
    if not types:
        return [name for name in known if apart is None or (name in kept_apart) is apart]
    for name in types:
        if name not in known:
            why = f"{name} is left out: {excluded[name]}" if name in excluded else f"{name} is no causal LM of the installed transformers"
            raise InputError(why, "labkit board", architectures.suggestion(name, known) or "leave the types out for all of them")
        if apart is not None and (name in kept_apart) is not apart:
            raise InputError(f"{name} is {'not ' if apart else ''}one of the held-out types", _HELD_OUT, "leave --held-out or --others out")
    return list(dict.fromkeys(types))


def _read(out: Path) -> dict[str, dict]:
    if not out.is_file():
        return {}
    rows = {}
    for number, line in enumerate(out.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["model_type"]] = row
        except (ValueError, KeyError, TypeError):
            raise InputError("a line of the board's file is damaged", f"{out}:{number}", "remove the line, or run without --resume") from None
    return rows


def _write(out: Path, rows: Iterable[dict]) -> None:
    temporary = out.with_name(f".{out.name}.part")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, out)


def _prove(model_type: str, time_limit: float, options: tuple[str, ...], running: set) -> dict:
    """The row of one type, whatever becomes of its process."""
    lost = lambda what, last, seconds: _lost(model_type, what, last, seconds)
    return {"seconds": 0.0} | row_apart(_proof, [model_type, *options], time_limit=time_limit, running=running, lost=lost, context=_workers())


def _proof(arguments: list[str]) -> int:
    from labkit.port.proof import main

    return main(arguments)


def _lost(model_type: str, what: str, last: str, seconds: float) -> dict:
    error = {"what": f"{what}{f'; last: {last}' if last else ''}", "where": "", "next": f"run python -m labkit.port.proof {model_type}"}
    return {"model_type": model_type, "kind": "", "passed": False, "translated": None, "steps": [], "error": error, "seconds": seconds}
