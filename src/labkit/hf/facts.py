"""Phase 1 in data: config table, decoder pattern, parameters by component, walls. Headers and config only."""

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.hf.components import Component, parameters_by_component
from labkit.hf.decoder_pattern import DecoderPattern, decoder_pattern
from labkit.hf.source import Source
from labkit.hf.walls import Wall, walls

__all__ = ["Component", "ConfigRow", "DecoderPattern", "Wall", "config_table", "decoder_pattern", "parameters_by_component", "walls"]

MOVED_TO_ROPE = {"rope_theta", "rope_scaling", "rope_type", "partial_rotary_factor"}
ABSENT = "-"


@dataclass(frozen=True)
class ConfigRow:
    """One key. value: as the installed class sees it. default: of the class, `-` when it has none.

    use: `read`, `default`, `irrelevant: WHY`, `spelled KEY`, `unread`, or empty when no slice has read the config.
    """

    key: str
    value: object
    default: object
    use: str


def config_table(source: Source, reading: Mapping[str, tuple[str, str]] | None = None) -> list[ConfigRow]:
    """Every key of the effective config, then keys of config.json that the class spells otherwise. reading: what `read_config` returns beside the config."""
    effective, defaults, rows = source.config.effective, source.config.defaults, []
    for key in sorted(effective):
        rows.append(ConfigRow(key, effective[key], defaults.get(key, ABSENT), _use(key, reading)))
    aliases = source.config.aliases
    for key, value in sorted(source.config.raw_text.items()):
        if key in effective:
            continue
        now = aliases.get(key) or ("rope_parameters" if key in MOVED_TO_ROPE and "rope_parameters" in effective else None)
        rows.append(ConfigRow(key, value, ABSENT, f"spelled {now}" if now else _use(key, reading)))
    return rows


def _use(key: str, reading: Mapping[str, tuple[str, str]] | None) -> str:
    if reading is None:
        return ""
    if key not in reading:
        return "unread"
    kind, reason = reading[key]
    return f"{kind}: {reason}" if reason else kind
