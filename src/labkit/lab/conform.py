"""The garden under attack: conformance suite and perturbations of every named family, one process per type, and the records that `labkit families` shows."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError
from labkit.lab.garden import Garden, summary
from labkit.lab.one_per_process import row_apart, rows_of

TIME_LIMIT = 900.0


@dataclass
class Options:
    """sources: how many of a family's configurations. checks: of the suite, None for all. specs: the perturbations too. full: every one of them."""

    sources: int = 2
    checks: tuple | None = None
    specs: bool = True
    full: bool = False

    def arguments(self) -> list[str]:
        """For the process of one type."""
        chosen = [] if self.checks is None else ["--checks", ",".join(map(str, self.checks))]
        return ["--sources", str(self.sources), *chosen, *([] if self.specs else ["--no-specs"]), *(["--full"] if self.full else [])]


def conform_family(model_type: str, options: Options, say: Callable[[str], None] = lambda line: None) -> dict:
    """One type in this process: plain data with the suite on each configuration and the perturbations, and their `summary`. Raises what translating raises."""
    from labkit.parity.conformance import conformance
    from labkit.parity.conformance.sources import sources
    from labkit.port.slices import ensure_slice

    info = ensure_slice(model_type).require()
    row = {"family": model_type, "source": info.kind, "provenance": _provenance(info), "suites": [], "perturbations": [], "error": None}
    for seed, name in enumerate(sources(model_type)[: options.sources]):
        say(name)
        suite = conformance(name, checks=options.checks, seed=seed, say=lambda check: say(check.plain()))
        row["suites"].append(suite.as_dict())
        if options.specs:
            row["perturbations"].append(_perturbed(name, seed, options.full, say))
    return row | summary(row)


def _provenance(info) -> dict:
    return {key: info.provenance.get(key) for key in ("transformers", "translator", "fingerprint") if info.provenance.get(key)}


def _perturbed(name: str, seed: int, full: bool, say) -> dict:
    """The perturbations of one configuration; what keeps them from being tried is a failure of them all."""
    from labkit.parity.perturb import perturb

    try:
        return perturb(name, seed=seed, full=full, say=lambda row: say(row.plain())).as_dict()
    except Exception as error:
        return {"source": name, "rows": [], "controls": [], "passed": 0, "total": 1, "holds": False, "error": f"{type(error).__name__}: {error}"[:300]}


def conform(
    types: Iterable[str] = (),
    *,
    jobs: int = 1,
    options: Options | None = None,
    out: Path | None = None,
    time_limit: float = TIME_LIMIT,
    say: Callable[[str], None] = lambda line: None,
) -> Garden:
    """Every type in a process of its own, `jobs` at a time.

    types: the named families when empty. out: a file that gets one JSON line per type as it ends. say: told a line per type. A type whose process dies or
    overruns `time_limit` seconds is a row with an error.
    """
    from labkit.parity.conformance.sources import NAMED

    chosen, options = list(dict.fromkeys(types)) or list(NAMED), options or Options()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("", encoding="utf-8")
    told = lambda index, count, name, row: say(f"[{index}/{count}] {Garden([row]).lines()[0]}")
    rows = rows_of(chosen, lambda name, running: _apart(name, options, time_limit, running), jobs=jobs, out=out, say=told)
    return Garden([rows[name] for name in chosen])


def _apart(model_type: str, options: Options, time_limit: float, running: set) -> dict:
    """The row of one type, whatever becomes of its process."""
    lost = lambda what, last, seconds: _lost(model_type, f"{what}; last: {last}", seconds)
    return row_apart(main, [model_type, *options.arguments()], time_limit=time_limit, running=running, lost=lost)


def _lost(model_type: str, what: str, seconds: float) -> dict:
    row = {"family": model_type, "source": "", "provenance": {}, "suites": [], "perturbations": [], "error": what}
    return row | summary(row) | {"seconds": seconds}


def main(arguments: list[str] | None = None) -> int:
    """One type in this process: 0 when everything holds, 1 otherwise. --json FILE gets one JSON object, also when the type could not be tried."""
    from labkit.port.proof import prepare

    parser = argparse.ArgumentParser(prog="python -m labkit.lab.conform", description=main.__doc__)
    parser.add_argument("model_type")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--checks", default=None, help="comma-separated numbers and names")
    parser.add_argument("--no-specs", action="store_true")
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args(arguments)
    prepare()
    options = Options(given.sources, chosen_checks(given.checks), not given.no_specs, given.full)
    try:
        row = conform_family(given.model_type, options, lambda line: print(line, flush=True))
    except LabError as error:
        row = _lost(given.model_type, error.what, 0.0)
        print(error.paragraph(), flush=True)
    if given.json:
        temporary = given.json.with_name(f".{given.json.name}.part")
        temporary.write_text(json.dumps(row) + "\n", encoding="utf-8")
        os.replace(temporary, given.json)
    print(Garden([row]).plain())
    return 0 if row["passed"] else 1


def chosen_checks(text: str | None) -> tuple | None:
    """`1,3,exact` as the suite takes it."""
    return None if not text else tuple(int(part) if part.strip().isdigit() else part.strip() for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
