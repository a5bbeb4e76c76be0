"""`labkit doctor`: what this machine has, and what of it stands in the way."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import sys
from dataclasses import dataclass, field

from labkit.lab.records import machine
from labkit.lab.show import Table

DAY = 24 * 3600.0


@dataclass
class Report:
    """Rows of (what, value, problem); healthy when no row has a problem."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(problem for _, _, problem in self.rows)

    def as_json(self) -> dict:
        return {"status": "pass" if self.healthy else "fail", "rows": [{"what": w, "value": v, "problem": p or None} for w, v, p in self.rows], "error": None}

    def plain(self) -> str:
        return Table(title="This machine", columns=["what", "value", "problem"], rows=[list(row) for row in self.rows]).plain()


def pins() -> dict[str, str]:
    """name -> version of the packages that labkit pins, from its own metadata; empty when it runs from a checkout that was never installed."""
    try:
        wanted = importlib.metadata.requires("labkit") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.\-\[\]]+)==([\w.+]+)\s*$", line) for line in wanted)
    return {m.group(1): m.group(2) for m in found if m}


def doctor(clear: bool = False) -> Report:
    """Look at the interpreter, the pinned packages, devices, scratch and the notebooks.

    clear: first remove from scratch what nobody wrote to for a day. Raises InputError when scratch is no folder of the lab's own.
    """
    from labkit.errors import LabError
    from labkit.hf import scratch_dir
    from labkit.hf.scratch import clear as clear_scratch
    from labkit.hf.scratch import held
    from labkit.lab.places import handovers_dir, notebooks_dir

    report = Report()
    add = lambda what, value, problem="": report.rows.append((what, str(value), problem))
    if clear:
        add("cleared", f"{clear_scratch(scratch_dir(), untouched=DAY) / 2**30:.2f} GiB of scratch that was not written to for a day")
    add("machine", machine(), "" if sys.version_info >= (3, 11) else "Python 3.11 or later is needed")
    wanted = pins()
    add("labkit", importlib.metadata.version("labkit") if wanted else "a checkout, not installed: its pins are not checked", "")
    for name, version in wanted.items():
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "absent"
        if have.split("+")[0] != version:
            add(name, have, f"{version} is what the records were measured with: pip install '{name}=={version}'")
    try:
        import jax

        add("devices", ", ".join(f"{d.platform} {d.device_kind}" for d in jax.devices()))
    except RuntimeError as error:
        add("devices", "none", f"jax finds no device: {str(error).splitlines()[0]}")
    try:
        add("TPU compiler", f"libtpu {importlib.metadata.version('libtpu')}")
    except importlib.metadata.PackageNotFoundError:
        add("TPU compiler", "absent: labkit compile and its part of phase 5 need libtpu")
    for what, find, need in (("scratch", scratch_dir, 2 << 30), ("handovers", handovers_dir, 50 << 20)):
        try:
            place = find()
            there = next(p for p in (place, *place.parents) if p.exists())
            free = shutil.disk_usage(there).free
            problem = f"less than {need / 2**30:.2g} GiB is free" if free < need else "" if os.access(there, os.W_OK) else "cannot be written"
            add(what, f"{place}, {free / 2**30:.1f} GiB free", problem)
        except LabError as error:
            add(what, error.where, error.paragraph())
    with contextlib.suppress(LabError, OSError):
        place = scratch_dir()
        sizes = [f"{name} {size / 2**30:.2f}" for name, size in held(place).items() if size >= 2**24]
        add("in scratch", f"GiB: {', '.join(sizes) or 'little'}; `labkit doctor --clear` removes what is older than a day")
    try:
        add("notebooks", notebooks_dir())
    except LabError as error:
        add("notebooks", error.where, error.what)
    return report
