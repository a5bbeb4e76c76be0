"""The ways in which checkpoints spell rotary parameters, checked for contradictions and brought to one form.

Old: top-level `rope_theta` and `rope_scaling` with `type` or `rope_type`. New: one `rope_parameters`, flat or nested by layer type.
The installed config classes read both; they leave a stray `type` behind and do not notice two spellings that disagree.
"""

from pathlib import Path

from labkit.errors import InputError

SCALINGS = ("rope_scaling", "rope_parameters")


def _tables(name: str, value: dict) -> dict[str, dict]:
    """The flat tables inside a rope dict: itself, or one per layer type."""
    nested = {f"{name}.{key}": table for key, table in value.items() if isinstance(table, dict)}
    return nested or {name: value}


def check_rope(raw: dict, path: Path) -> None:
    """Raises InputError where two spellings of one thing differ, naming the keys."""
    for name in SCALINGS:
        value = raw.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise InputError(f"{name} is {value!r}, not an object or null", f"{path}, key {name}", "Write it as an object with a rope_type, or remove it")
        for where, table in _tables(name, value).items():
            if "type" in table and "rope_type" in table and table["type"] != table["rope_type"]:
                raise InputError(f"{where} says type {table['type']!r} and rope_type {table['rope_type']!r}", f"{path}, key {where}", "Keep one of the two")
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    theta = raw.get("rope_theta")
    if isinstance(new, dict) and isinstance(theta, (int, float)) and new.get("rope_theta", theta) != theta:
        raise InputError(
            f"rope_theta is {theta} and rope_parameters.rope_theta is {new['rope_theta']}",
            f"{path}, keys rope_theta and rope_parameters",
            "Keep one of the two",
        )
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        left, right = _canonical(old), _canonical(new)
        for key in sorted(set(left) & set(right) - {"rope_theta"}):
            if left[key] != right[key]:
                raise InputError(
                    f"rope_scaling says {key} {left[key]!r} and rope_parameters says {right[key]!r}",
                    f"{path}, keys rope_scaling and rope_parameters",
                    "Keep one of the two",
                )


def _canonical(table: dict) -> dict:
    table = dict(table)
    kind = table.pop("type", None)
    if kind is not None:
        table.setdefault("rope_type", kind)
    return table


def normalise_rope(config: dict) -> dict:
    """`config` with `type` folded into `rope_type` in every rope table. The config is changed in place and returned."""
    value = config.get("rope_parameters")
    if isinstance(value, dict):
        if any(isinstance(table, dict) for table in value.values()):
            config["rope_parameters"] = {key: _canonical(table) if isinstance(table, dict) else table for key, table in value.items()}
        else:
            config["rope_parameters"] = _canonical(value)
    return config
