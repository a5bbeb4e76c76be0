"""What each layer of a decoder is, from the effective config alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import InputError
from labkit.hf.layer_names import COUNT_KEYS, layer_count
from labkit.hf.source import Source

SPARSE, DENSE, NO_ROPE = "sparse", "dense", "nope"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class DecoderPattern:
    """kinds: one name per layer, e.g. `sliding_attention+sparse`. windows: the attention window in effect per layer, None for all of the past.

    Layers from `start` on repeat a cycle of `cycle` layers `repeats` times, and `remainder` layers of the next round follow.
    homogeneous: one kind and one window throughout.
    """

    kinds: tuple[str, ...]
    windows: tuple[int | None, ...]
    homogeneous: bool
    start: int
    cycle: int
    repeats: int
    remainder: int

    def rows(self) -> list[dict]:
        """One row per run of equal layers: layers, kind, window."""
        rows, start = [], 0
        for layer in range(1, len(self.kinds) + 1):
            if layer == len(self.kinds) or (self.kinds[layer], self.windows[layer]) != (self.kinds[start], self.windows[start]):
                rows.append({"layers": str(start) if layer - start == 1 else f"{start}-{layer - 1}", "kind": self.kinds[start], "window": self.windows[start]})
                start = layer
        return rows

    def __str__(self) -> str:
        if self.homogeneous:
            return f"{len(self.kinds)} equal layers ({self.kinds[0]})"
        parts = [f"{self.start} leading"] if self.start else []
        parts.append(f"a cycle of {self.cycle} repeated {self.repeats} times")
        if self.remainder:
            parts.append(f"{self.remainder} left over")
        return f"{len(self.kinds)} layers: " + ", ".join(parts)


def decoder_pattern(source: Source) -> DecoderPattern:
    """The pattern of a source. Raises InputError when the config does not say how many layers there are, or a per-layer list has another length."""
    return pattern_of(source.config.described, str(source.config.path))


def pattern_of(config: dict, where: str = "") -> DecoderPattern:
    """The pattern of an effective config."""
    count = layer_count(config)
    if not count:
        raise InputError("The config does not say how many layers the model has", where, f"Expected one of the keys {', '.join(COUNT_KEYS)}")
    types = _per_layer(config, "layer_types", count, where) or _per_layer(config, "layers_block_type", count, where)
    feed_forwards = _feed_forwards(config, count, where)
    nope = _no_rope(config, count, where)
    windows = tuple(_window(config, types[layer] if types else None) for layer in range(count))
    kinds = []
    for layer in range(count):
        parts = [str(types[layer])] if types else ["sliding_attention" if windows[layer] is not None else "full_attention"]
        if feed_forwards:
            parts.append(feed_forwards[layer])
        if nope[layer]:
            parts.append(NO_ROPE)
        kinds.append("+".join(parts))
    signature = list(zip(kinds, windows))
    start, cycle = _shortest_cycle(signature)
    rest = count - start
    return DecoderPattern(tuple(kinds), windows, len(set(signature)) == 1, start, cycle, rest // cycle, rest % cycle)


def _per_layer(config: dict, key: str, count: int, where: str) -> Sequence | None:
    value = config.get(key)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if len(value) != count:
        raise InputError(f"{key} has {len(value)} entries and the model {count} layers", f"{where}, key {key}", "Give one entry per layer")
    return value


def _window(config: dict, kind: str | None) -> int | None:
    """The window of a layer. Without layer types the classes apply the window to every layer, and set it to None themselves where it is switched off."""
    if kind is not None and "chunked" in kind:
        return config.get("attention_chunk_size")
    if kind is None or "sliding" in kind or kind == "local":
        return config.get("sliding_window") or None if kind is not None or config.get("use_sliding_window", True) else None
    return None


def _no_rope(config: dict, count: int, where: str) -> list[bool]:
    """`no_rope_layers` holds 1 for a layer that rotates; its name is reversed."""
    flags = _per_layer(config, "no_rope_layers", count, where)
    return [not flag for flag in flags] if flags else [False] * count


def _feed_forwards(config: dict, count: int, where: str) -> list[str] | None:
    """`sparse` or `dense` per layer; None for a model without experts."""
    listed = _per_layer(config, "mlp_layer_types", count, where)
    if listed:
        return [str(kind) for kind in listed]
    if not any(config.get(key) for key in EXPERT_KEYS):
        return None
    sparse = [True] * count
    step = config.get("decoder_sparse_step")
    if step:
        sparse = [(layer + 1) % step == 0 for layer in range(count)]
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        sparse = [bool(flag) for flag in _per_layer(config, "moe_layer_freq", count, where) or sparse]
    elif frequency:
        sparse = [layer % frequency == 0 for layer in range(count)]
    if config.get("expert_layer_period"):
        sparse = [(layer - config.get("expert_layer_offset", 0)) % config["expert_layer_period"] == 0 for layer in range(count)]
    if isinstance(config.get("moe_layers"), (list, tuple)):
        sparse = [layer in config["moe_layers"] for layer in range(count)]
    first_dense = config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0
    dense = set(config.get("mlp_only_layers") or ()) | set(range(first_dense))
    return [SPARSE if sparse[layer] and layer not in dense else DENSE for layer in range(count)]


def _shortest_cycle(items: list) -> tuple[int, int]:
    """(start, cycle) such that items[start:] repeats with period `cycle`: the smallest sum; on a tie a cycle that does repeat, then the earlier start."""
    count, found = len(items), []
    for start in range(count):
        tail = items[start:]
        cycle = next(cycle for cycle in range(1, len(tail) + 1) if all(tail[i] == tail[i % cycle] for i in range(len(tail))))
        found.append((start + cycle, len(tail) // cycle < 2, start, cycle))
    return min(found)[2:]
