"""`labkit check`: the cells of the phases called one after another in this process, with records that are thrown away."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import LabError
from labkit.lab.phases import PHASES, PROVING, phase_class
from labkit.lab.records import Record, Verdict
from labkit.lab.show import number


@dataclass
class Check:
    """What the phases found. status: pass, fail, blocked or error."""

    model: str
    family: str | None
    status: str
    records: list[Record] = field(default_factory=list)
    error: LabError | None = None
    scratch: Path | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "pass" else self.error.exit_code if self.error and self.status == "error" else 1

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for r in self.records for v in r.verdicts]

    @property
    def unreached(self) -> list[str]:
        """Sentences, one per length at which the function changes and that no prompt goes beyond."""
        return [words for r in self.records for words in r.outcome.get("unreached", ())]

    def as_json(self) -> dict:
        """The object of the design: one entry per verdict, the full model's where both were measured."""
        return {
            "model": self.model,
            "family": self.family,
            "status": self.status,
            "verdicts": {name: value for name, value in self.records[-1].outcome.items() if name != "unreached"} if self.records else {},
            "unreached": self.unreached,
            "gates": [{"phase": r.phase, **g.model_dump(exclude={"type"})} for r in self.records for g in r.gates],
            "findings": [json.loads(text) for text in dict.fromkeys(f.model_dump_json() for r in self.records for f in r.findings)],
            "error": self.error.as_dict() if self.error else None,
        }

    def plain(self) -> str:
        lines = [f"{'pass' if v.passed else 'FAIL'}  {v.name}, {v.on}: {number(v.value)} (limit {number(v.limit)}) {v.measure}" for v in self.verdicts]
        lines += [f"phase {r.phase}: {g.plain()}" for r in self.records for g in r.gates if not g.passed]
        held, count = sum(g.passed for r in self.records for g in r.gates), sum(len(r.gates) for r in self.records)
        lines.append(f"{self.model}: {self.status}, {held} of {count} gates hold")
        lines += [f"pitfall  {words}." for words in self.unreached]
        for finding in self.as_json()["findings"]:
            parts = [f"{finding['component']}: {finding['cause']}.", finding["evidence"], f"Fix: {finding['fix']}" if finding["fix"] else ""]
            lines.append("finding  " + " ".join(part if part.endswith(".") else f"{part}." for part in parts if part))
        if self.error:
            lines.append(self.error.paragraph())
        return "\n".join(lines)


def check(model: str, *, revision: str = "", trust_remote_code: bool = False, golden: str = "", say: Callable[[str], None] = lambda line: None) -> Check:
    """Run all phases on `model` until one does not pass. Raises InputError when the source cannot be opened."""
    before = {name: os.environ.get(name) for name in ("LABKIT_HANDOVERS", "LABKIT_LOCK_HELD")}
    with tempfile.TemporaryDirectory(prefix="labkit-check-") as folder:
        os.environ["LABKIT_HANDOVERS"] = folder
        try:
            return _run(model, {"revision": revision, "trust_remote_code": trust_remote_code}, golden, say)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _run(model: str, common: dict, golden: str, say) -> Check:
    result = Check(model, None, "pass")
    try:
        _refuse(model, common, golden)
        return _phases(result, model, common, golden, say)
    finally:
        if result.scratch is not None:
            shutil.rmtree(result.scratch, ignore_errors=True)


def _refuse(model: str, common: dict, golden: str) -> None:
    """What a later phase could not work with, told before the first begins."""
    if golden:
        from labkit.hf import open_source

        source = open_source(model, common["revision"] or None, trust_remote_code=common["trust_remote_code"])
        for phase in PROVING:
            phase_class(phase).refuse({"golden": golden}, source)


def _phases(result: Check, model: str, common: dict, golden: str, say) -> Check:
    for number_ in PROVING:
        phase = phase_class(number_)(model, **common, **({"golden": golden} if golden and PHASES[number_] == "verify" else {}))
        result.scratch = phase.scratch
        result.model, result.family = phase.record.model, phase.record.family
        result.records.append(phase.record)
        try:
            for name in phase.cells:
                say(f"{number_} {PHASES[number_]}: {name}")
                getattr(phase, name)()
            phase.finish()
        except LabError as error:
            result.status, result.error = error.status, error
            return result
        if not phase.record.passed:
            blocked = phase.wall is not None
            result.status = "blocked" if blocked else "fail"
            result.error = phase.wall if blocked else None
            return result
    return result
