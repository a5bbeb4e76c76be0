"""How the delta list shows: in phase 1, in `labkit inspect`, in the handover."""

from labkit.lab.show import Table
from labkit.port import DeltaList

SHOWN = 200  # rows; the rest is counted
WIDTH = 110  # characters of a statement


def delta_table(found: DeltaList, shown: int = SHOWN) -> Table:
    """component, place, what differs, the statement, and the lines: of the reference, of the donor's reference, of our slice."""
    rows = []
    for row in found.rows[:shown]:
        d = row.delta
        code = d.statement or f"without: {d.donor_statement}"
        code = code if len(code) <= WIDTH else code[: WIDTH - 1] + "…"
        place = d.place if d.kind == "changed" else f"{d.place} ({d.kind})"
        what = d.explanation or (f"the donor has {d.donor_statement}"[:WIDTH] if d.kind == "changed" else "")
        rows.append([d.component, place, what, code, _file(d.line), _file(d.donor_line), _ours(row, found.has_slice)])
    rest = len(found.rows) - len(rows)
    more = f"and {rest} more rows: labkit inspect --json has all of them. " if rest else ""
    return Table(
        title=f"What {found.family} does differently from {found.donor}",
        columns=["component", "place", "what", "statement", "HF line", "donor line", "ours"],
        rows=rows,
        note=f"{more}Compared, transformers {found.transformers_version}: {', '.join(found.files)}.",
        code=["place", "statement", "HF line", "donor line"],
        fold=len(rows) > 12,
    )


def summary(found: DeltaList) -> str:
    """The rest of a sentence that has named the donor."""
    parts = ", ".join(f"{component} {count}" for component, count in found.counts.items())
    return f"the two share {found.similarity:.0%} of their statements; {len(found.rows)} differences" + (f": {parts}." if parts else ".")


def _file(place: str) -> str:
    return place.rsplit("/", 1)[-1]


def _ours(row, has_slice: bool) -> str:
    if not has_slice:
        return "no slice"
    return row.ours.removeprefix("labkit/") or row.ours_reason
