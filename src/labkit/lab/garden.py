"""The garden's table: what the recorded runs of the conformance suite say of each family. One record per family is committed with the package."""

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import InputError
from labkit.lab.places import PACKAGE
from labkit.lab.records import committed, git_commit, package_versions, write_atomically

FOLDER = PACKAGE / "data" / "garden"
COLUMNS = ("family", "source", "exact", "KL 32", "decode", "trip", "checks", "beside", "specs", "faults", "s", "first failure")
LEGEND = (
    "exact, decode: relative error in float64; KL 32: nats per position, float32; trip: to Orbax and back, bit for bit; checks: the eight of the conformance "
    "suite; beside: comparisons with the reference beside them; specs: perturbations that change both sides alike; faults: planted ones caught; s: seconds"
)
RECORDED = (
    "family",
    "source",
    "provenance",
    "exact",
    "float32_kl",
    "decode",
    "round_trip",
    "checks",
    "beside",
    "specs",
    "faults",
    "failures",
    "seconds",
    "passed",
)


def summary(row: dict) -> dict:
    """What the table shows of one type's suites and perturbations.

    exact, float32_kl, decode: the worst value over the configurations, None where it was not measured. round_trip: whether it is bit for bit. checks, beside,
    specs, faults: {"passed", "total"}; one of the eight checks, or of what stands beside them, passes when it does on every configuration. failures: texts.
    """
    checks = [check | {"model": suite["model"]} for suite in row["suites"] for check in suite["checks"]]
    names = dict.fromkeys((check["number"], check["name"]) for check in checks)
    holds = {name: all(check["passed"] for check in checks if (check["number"], check["name"]) == name) for name in names}
    worst = lambda name: max((c["value"] for c in checks if c["name"] == name and c["value"] is not None), default=None)
    failures = [f"{check['model']}: {check['name']}: {check['reason']}" for check in checks if not check["passed"]]
    if row["error"]:
        failures.insert(0, row["error"])
    specs, faults = {"passed": 0, "total": 0}, {"passed": 0, "total": 0}
    for attack in row["perturbations"]:
        specs = {"passed": specs["passed"] + attack["passed"], "total": specs["total"] + attack["total"]}
        caught = sum(bool(control["caught_by"]) for control in attack["controls"])
        faults = {"passed": faults["passed"] + caught, "total": faults["total"] + len(attack["controls"])}
        failures += [f"{attack['source']}: specs: {attack['error']}"] if attack.get("error") else []
        failures += [f"{attack['source']}: {_told(entry)}" for entry in attack["rows"] if not entry["passed"]]
    count = lambda wanted: {"passed": sum(held for name, held in holds.items() if wanted(name)), "total": sum(map(wanted, holds))}
    return {
        "exact": worst("exact"),
        "float32_kl": worst("float32"),
        "decode": worst("decode"),
        "round_trip": holds.get((0, "round trip")),
        "checks": count(lambda name: name[0] > 0),
        "beside": count(lambda name: name[0] == 0),
        "specs": specs,
        "faults": faults,
        "failures": failures,
        "seconds": round(sum(suite["seconds"] for suite in row["suites"]) + sum(a.get("seconds", 0.0) for a in row["perturbations"]), 1),
        "passed": not failures and bool(checks),
    }


def _told(entry: dict) -> str:
    spec = entry.get("spec", {})
    return " ".join(str(part) for part in (spec.get("kind", ""), spec.get("target", ""), entry.get("reason") or entry.get("note") or "") if part)


@dataclass
class Garden:
    """rows: `conform_family`'s, or committed records, in the order of the table."""

    rows: list[dict]

    @property
    def exit_code(self) -> int:
        return 0 if self.rows and all(row["passed"] for row in self.rows) else 1

    def lines(self) -> list[str]:
        """One line per family."""
        return ["  ".join(_padded(cell, column) for cell, column in zip(_cells(row), COLUMNS)).rstrip() for row in self.rows]

    def plain(self) -> str:
        """The whole table and the counts."""
        head = "  ".join(_padded(column, column) for column in COLUMNS)
        held = sum(row["passed"] for row in self.rows)
        refined = sum(row["source"] == "refined" for row in self.rows)
        tail = f"{held} of {len(self.rows)} families hold everything; {refined} refined, {len(self.rows) - refined} translated"
        return "\n".join([head, "-" * len(head), *self.lines(), "", tail, LEGEND])


def _cells(row: dict) -> list[str]:
    number = lambda value: "-" if value is None else f"{value:.0e}"
    share = lambda counted: f"{counted['passed']}/{counted['total']}" if counted["total"] else "-"
    trip = {True: "exact", False: "NO", None: "-"}[row["round_trip"]]
    first = row["failures"][0][:140] if row["failures"] else ""
    counted = [share(row[name]) for name in ("checks", "beside", "specs", "faults")]
    return [
        row["family"],
        row["source"],
        number(row["exact"]),
        number(row["float32_kl"]),
        number(row["decode"]),
        trip,
        *counted,
        f"{row['seconds']:.0f}",
        first,
    ]


def _padded(cell: str, column: str) -> str:
    width = {"family": 12, "source": 10, "exact": 6, "KL 32": 6, "decode": 6}.get(column, 6)
    return cell.ljust(width) if column in ("family", "source", "first failure") else cell.rjust(width)


def record(row: dict, folder: Path | None = None) -> Path:
    """Write one family's record, with the commit and the packages that it was measured with."""
    folder = FOLDER if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    models = [{"model": suite["model"], "checks": {check["name"]: _short(check) for check in suite["checks"]}} for suite in row["suites"]]
    kept = {key: row[key] for key in RECORDED} | {"models": models, "measured": now, "commit": git_commit(), "packages": package_versions()}
    path = folder / f"{row['family']}.json"
    write_atomically(path, json.dumps(kept, indent=1) + "\n")
    return path


def _short(check: dict) -> dict:
    return {key: check[key] for key in ("number", "passed", "value", "limit", "note") if check[key] not in ("", None)}


def recorded(folder: Path | None = None) -> list[dict]:
    """The committed records, by family. Raises InputError for one that cannot be read."""
    return listed(folder)[0]


def listed(folder: Path | None = None) -> tuple[list[dict], list[dict]]:
    """(the committed records, those that a run on this machine has written or changed since). Of another folder than the package's all count as committed."""
    known, since = [], []
    for path in sorted((FOLDER if folder is None else Path(folder)).glob("*.json")):
        try:
            now = path.read_text(encoding="utf-8")
            text = committed(path) if folder is None else None
            known += [json.loads(now if text is None else text)] if text != "" else []
            since += [json.loads(now)] if text is not None and text != now else []
        except ValueError as error:
            raise InputError(f"a record of the garden cannot be read: {error}", path, "run `labkit conform --record` for this family again") from None
    return known, since
