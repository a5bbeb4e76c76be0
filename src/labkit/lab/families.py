"""What is proven: a list made from records that are committed with the package, and from nothing else."""

import json
import os
from pathlib import Path

from labkit.errors import InputError
from labkit.lab.phases import PROVING
from labkit.lab.places import PACKAGE, handovers_dir
from labkit.lab.records import Records, committed, write_atomically
from labkit.lab.show import Table

DATA = PACKAGE / "data" / "families.json"


def proven() -> list[dict]:
    """The committed list: family, model, slice, verdicts, when, commit, packages."""
    return listed()[0]


def listed() -> tuple[list[dict], list[dict]]:
    """(the committed rows, rows that a run on this machine has put into the list since). Outside a checkout all rows are those of the package."""
    try:
        rows = json.loads(DATA.read_text(encoding="utf-8"))
        text = committed(DATA)
        known = rows if text is None else json.loads(text or "[]")
    except (OSError, ValueError) as error:
        raise InputError(
            f"the list of proven families cannot be read: {error}", DATA, "install labkit again, or run `labkit families --update` in a checkout"
        ) from None
    return known, [row for row in rows if row not in known]


def from_records(handovers: Path) -> list[dict]:
    """One entry per model whose four phases all passed on one source, by the records under `handovers`."""
    entries = []
    for folder in sorted(p.parent for p in Path(handovers).glob("*/model.json")):
        records = {r.phase: r for r in Records(folder).all()}
        if set(PROVING) <= set(records) and all(records[n].passed for n in PROVING) and len({records[n].source_fingerprint for n in PROVING}) == 1:
            last = records[max(PROVING)]
            entries.append(
                {
                    "family": last.family,
                    "model": last.model,
                    "slice": last.slice,
                    "slug": folder.name,
                    "source_fingerprint": last.source_fingerprint,
                    "verdicts": [v.model_dump(include={"name", "on", "value", "limit", "passed"}) for v in last.verdicts],
                    "gates": sum(len(records[n].gates) for n in PROVING),
                    "measured": last.end,
                    "commit": last.git_commit,
                    "packages": last.packages,
                }
            )
    return sorted(entries, key=lambda e: (e["family"], e["model"]))


def update(handovers: str | os.PathLike | None = None) -> list[dict]:
    """Write the list anew from the records in `handovers`. InputError when they prove nothing."""
    root = handovers_dir(handovers)
    entries = from_records(root)
    if not entries:
        raise InputError("no record here proves a family", root, "run `labkit run MODEL` first")
    write_atomically(DATA, json.dumps(entries, indent=1) + "\n")
    return entries


def plain(entries: list[dict], title: str = "Proven families", said: str = "Each row is a committed record.") -> str:
    worst = lambda entry, name: max((v["value"] for v in entry["verdicts"] if v["name"] == name), default=None)
    rows = [
        [e["family"], e["slice"], e["model"], worst(e, "exact"), worst(e, "float32"), worst(e, "bfloat16"), e["gates"], e["measured"][:10]] for e in entries
    ]
    note = f"exact: relative error; float32: KL per position, nats; bfloat16: mean KL as a multiple of the reference's own. {said}"
    return Table(title=title, columns=["family", "slice", "model", "exact", "float32", "bfloat16", "gates", "measured"], rows=rows, note=note).plain()
