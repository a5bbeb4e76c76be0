"""The lengths at which a decoder becomes another function: windows, chunks, sparse attention, rope that switches, positions that scale. From configs."""

from dataclasses import dataclass

from labkit.errors import InputError
from labkit.hf.decoder_pattern import pattern_of
from labkit.hf.source import Source

OTHER_WINDOWS = ("attention_window_size", "window_size")
LEARNED = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True)
class ChangingLength:
    """Up to `length` tokens nothing of what `key` says shows. what: what begins beyond it."""

    key: str
    length: int
    what: str


def changing_lengths(source: Source) -> list[ChangingLength]:
    """Every such length of a source, by size. Chunks of a recurrence are none: they only arrange the same sum."""
    return lengths_of(source.config.described)


def lengths_of(config: dict) -> list[ChangingLength]:
    """Those of an effective config."""
    found = [*_windows(config), *_sparse(config), *_rope(config), *_scaled_positions(config)]
    return sorted(set(found), key=lambda each: (each.length, each.key))


def position_limit(source: Source) -> int | None:
    """How many positions a table of positions holds, None for a decoder that rotates or adds none: it takes any length."""
    config = source.config.effective
    if config.get("rope_parameters") or config.get("rope_theta"):
        return None
    return next((config[key] for key in LEARNED if _count(config.get(key))), None)


def _windows(config: dict) -> list[ChangingLength]:
    """Windows and chunks of the layers that use them."""
    try:
        pattern = pattern_of(config)
    except InputError:
        return []
    found = []
    for kind, window in zip(pattern.kinds, pattern.windows):
        if _count(window):
            chunked = "chunked" in kind
            found.append(ChangingLength("attention_chunk_size" if chunked else "sliding_window", window, "the chunk" if chunked else "the window"))
    if not found:
        found = [ChangingLength(key, config[key], "the window") for key in OTHER_WINDOWS if _count(config.get(key))]
    return found


def _sparse(config: dict) -> list[ChangingLength]:
    """Attention to the best `index_topk` keys, or to that many compressed ones."""
    best, rates = config.get("index_topk"), config.get("compress_rates")
    if not _count(best):
        return []
    rate = rates.get("compressed_sparse_attention", 1) if isinstance(rates, dict) else 1
    key = "index_topk" if rate == 1 else f"index_topk x compress_rates ({best} x {rate})"
    return [ChangingLength(key, best * rate, "the choice of keys")]


def _rope(config: dict) -> list[ChangingLength]:
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        return []
    found, longest = [], config.get("max_position_embeddings")
    for table in [given, *(table for table in given.values() if isinstance(table, dict))]:
        original = table.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        kind = table.get("rope_type", table.get("type"))
        key, length = ("max_position_embeddings", longest) if kind == "dynamic" or not original else ("original_max_position_embeddings", original)
        if kind in ("dynamic", "longrope") and _count(length):
            found.append(ChangingLength(key, length, f"the other frequencies of {kind} rope"))
        if table.get("llama_4_scaling_beta") and _count(original):
            found.append(ChangingLength("original_max_position_embeddings", original, "the scale of queries by position"))
    return found


def _scaled_positions(config: dict) -> list[ChangingLength]:
    """Queries whose scale grows with the position, from a floor on."""
    keys = ["floor_scale"] * bool(config.get("attn_temperature_tuning")) + ["log_scaling_n_floor"]
    return [ChangingLength(key, int(config[key]), "the scale of queries by position") for key in keys if _count(config.get(key))]


def _count(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1
