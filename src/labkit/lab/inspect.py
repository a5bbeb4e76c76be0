"""`labkit inspect`: facts, delta list and walls from config, headers and the reference's source; no weight is read."""

import textwrap

from labkit.errors import BlockedError, InputError
from labkit.lab.show import Section, Table, Text


def inspect(model: str, *, revision: str = "", trust_remote_code: bool = False) -> dict:
    """The object of `inspect --json`, and the same as text under `plain`. Raises InputError for a source that cannot be opened."""
    from labkit.hf import open_source
    from labkit.hf.facts import config_table, decoder_pattern, parameters_by_component, walls
    from labkit.lab.deltas import delta_table, summary
    from labkit.lab.reproduction import named
    from labkit.lab.slices import describe
    from labkit.models import get_family, read_config
    from labkit.models.outside import named_folders
    from labkit.port import delta_list
    from labkit.port.slices import ensure_slice

    given = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    named_folders()  # a wrong name is bad input, not a wall of the model
    family, config, reading, info, found = None, None, None, None, [{"what": w.what, "where": w.why, "next": w.next} for w in walls(source)]
    try:
        info = ensure_slice(source)
        info.require()
        family = get_family(source.config.model_type)
        config, reading = read_config(family, source.config.effective, source.config.defaults)
    except (BlockedError, InputError) as wall:
        found.append(wall.as_dict())
    try:
        pattern = decoder_pattern(source)
    except InputError as error:
        pattern = None
        found.append(error.as_dict())
    if config is not None:
        from labkit.converters import audit
        from labkit.converters.audit import NEXT

        report = audit(source, family, config)
        if not report.passed:
            what = f"{len(report.problems)} tensors and parameters do not fit: {report.first()}"
            found.append({"what": what, "where": str(source.path), "next": NEXT})
    parts = parameters_by_component(source)
    rows = config_table(source, reading)
    try:
        delta = delta_list(source, slice_folder=info.folder if info else None)
    except InputError:
        delta = None
    result = {
        "model": source.name,
        "family": source.config.model_type,
        "status": "blocked" if found else "pass",
        "slice": info.kind if info else None,
        "slice_folder": str(info.folder) if info else None,
        "translation": None if info is None or not info.provenance else {k: info.provenance[k] for k in ("fingerprint", "refusals", "unproven", "unusual")},
        "origin": source.origin,
        "directory": str(source.path),
        "fingerprint": source.fingerprint,
        "architectures": source.config.architectures,
        "config": {r.key: {"value": _plain(r.value), "default": _plain(r.default), "use": r.use} for r in rows},
        "layers": None
        if pattern is None
        else {"count": len(pattern.kinds), "kinds": list(pattern.kinds), "windows": list(pattern.windows), "pattern": str(pattern)},
        "plan": None if config is None else config.plan.describe(),
        "subset_layers": None if config is None else config.plan.representative(),
        "parameters": {p.component: {"tensors": p.tensors, "parameters": p.parameters, "bytes": p.bytes, "dtypes": list(p.dtypes)} for p in parts},
        "delta": None if delta is None else delta.as_dict(),
        "walls": found,
        "notes": list(source.notes),
        "error": None,
    }
    items = [
        Table(
            title="Parameters",
            columns=["component", "tensors", "parameters", "MiB", "stored as"],
            rows=[[p.component, p.tensors, p.parameters, f"{p.bytes / 2**20:,.1f}", ", ".join(p.dtypes)] for p in parts],
        ),
        Table(
            title="Config",
            columns=["key", "value", "class default", "slice"],
            rows=[[r.key, str(_plain(r.value))[:60], str(_plain(r.default))[:40], r.use or "no slice"] for r in rows],
        ),
        Text(words="Decoder: {pattern}. Layer plan: {plan}.", values={"pattern": str(pattern or "unknown"), "plan": result["plan"] or "none"}),
    ]
    if delta is not None:
        items += [Text(words="Donor: {donor}; " + summary(delta), values={"donor": delta.donor}), *([delta_table(delta)] if delta.rows else [])]
    if info is not None:
        items += describe(info)
    items += [Text(words="Wall: {what}. {where}. Next: {next}.", values={k: v.rstrip(".") for k, v in wall.items()}) for wall in found]
    items += [Text(words="{note}", values={"note": note}) for note in source.notes]
    items += [Text(words="{line}", values={"line": line}) for line in _closing(result, named(given))]
    result["plain"] = Section(
        title=f"{source.name}: {source.config.model_type}, {source.tensors.size:,} parameters, {result['slice'] or 'no'} slice", items=items
    ).plain()
    return result


def _closing(result: dict, name: str) -> list[str]:
    """The last two lines: what it is and what stands in the way; the next command."""
    walls = result["walls"]
    stands = "no walls" if not walls else "1 wall" if len(walls) == 1 else f"{len(walls)} walls"
    first = textwrap.shorten(walls[0]["what"].rstrip("."), 150, placeholder=" …") if walls else ""
    said = f"In short: family {result['family']}, {result['slice'] or 'no'} slice, {stands}{': ' + first if walls else ''}."
    advice = walls[0]["next"].rstrip(".") if walls else f"labkit run {name}"
    return [said, f"Next: {advice}" + ("." if walls else "")]


def _plain(value):
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)
