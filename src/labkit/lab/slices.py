"""How a slice's origin shows: in phase 1, in `labkit port` and `labkit inspect`."""

from labkit.lab.places import PACKAGE
from labkit.lab.show import Item, Table, Text
from labkit.port.slices import SliceInfo

SHOWN = 40


def describe(info: SliceInfo) -> list[Item]:
    """Where the slice comes from, what is unusual about it, refusals, and branches that no configuration ran. A folder outside the package is told in full."""
    if info.kind == "refined":
        folder = info.folder.relative_to(PACKAGE.parent) if info.folder.is_relative_to(PACKAGE.parent) else info.folder
        return [Text(words="Written by hand, in {folder}.", values={"folder": str(folder)})]
    made = info.provenance
    words = "Translated from the source of transformers {version} on {date}, translator {translator}; the files are in {folder}."
    values = {"version": made["transformers"], "date": made["date"][:10], "translator": made["translator"], "folder": str(info.folder)}
    rows = [[name, digest[:12]] for name, digest in made["sources"].items()]
    items = [
        Text(words=words + (" A person has edited it since." if info.kind == "edited" else ""), values=values),
        Table(title="Read from", columns=["file", "sha256"], rows=rows, code=["file", "sha256"], fold=len(rows) > 3),
    ]
    items += [Text(words="Unusual: {what}", values={"what": line}) for line in info.unusual]
    if info.refusals:
        rows = [[r["construct"], r["where"], r["component"], r["advice"]] for r in info.refusals]
        columns = ["construct", "HF line", "component", "what to do"]
        note = "The methods that hold them raise; the rest of the slice is written."
        items.append(Table(title="What could not be translated", columns=columns, rows=rows, code=["HF line"], note=note))
    if info.unproven:
        rows = [[where, text] for where, text in info.unproven[:SHOWN]]
        note = "Translated line by line, and never compared: no configuration of the reference ran them." + (
            f" And {len(info.unproven) - SHOWN} more: they are marked in the slice." if len(info.unproven) > SHOWN else ""
        )
        items.append(Table(title="Unproven branches", columns=["HF line", "branch"], rows=rows, code=["HF line", "branch"], note=note, fold=len(rows) > 8))
    return items
