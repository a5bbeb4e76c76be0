"""Other values of a config's keys: which numbers, switches and names are worth trying, by the value that a key has. The reference says whether one matters."""

import re
from collections.abc import Iterator, Mapping

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu", "gelu", "relu2", "sigmoid", "tanh", "gelu_new", "quick_gelu", "swish")
ORIGINAL = 16
"""Rope thresholds of altered tables: the prompts of an attack are longer by far."""
ROPE_TYPES = ("linear", "dynamic", "yarn", "yarn with mscale", "longrope", "llama3", "proportional")
_NO_MATHS = re.compile(r"^_|^(model_type|architectures|transformers_version|torch_dtype|dtype|auto_map|id2label|label2id|is_encoder_decoder|num_labels)$")


def candidates(effective: Mapping, choices=()) -> dict[str, list[dict]]:
    """target -> changes of config.json to try in order, until one moves the reference.

    effective: the config as the installed class sees it. choices: further overrides, from what the reference's source compares its keys with. A target is a
    key, a key and an entry of its mapping (`rope_parameters.rope_theta`), or a key and what it is set to (`rope_parameters=yarn`).
    """
    found: dict[str, list[dict]] = {}
    for key, value in effective.items():
        if _NO_MATHS.match(key):
            continue
        if key == "rope_parameters" and isinstance(value, Mapping):
            for label, table, more in _ropes(value, effective):
                found.setdefault(f"{key}{label}", []).append({key: table, **more})
        elif isinstance(value, Mapping):
            for inner, other in _inner(value):
                found.setdefault(f"{key}.{inner}", []).append({key: other})
        else:
            changes = [{key: other} for other in others(key, value)]
            if changes:
                found[key] = changes
    for choice in choices:
        target = "+".join(choice)
        if "rope_parameters" not in choice and any(effective.get(key) != value for key, value in choice.items()):
            found.setdefault(target, []).append(dict(choice))
    return found


def others(key: str, value) -> list:
    """Other values for one key, nearest first."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return _floats(key, value)
    if isinstance(value, int):
        return [other for other in (value + 1, value - 1, 2 * value, 1) if other > 0 and other != value] + ([0] if value else [])
    if isinstance(value, str):
        return [other for other in ACTIVATIONS if other != value] if value in ACTIVATIONS else []
    if isinstance(value, list) and value:
        return _lists(value)
    if value is None and re.search(r"softcap|clip|_cap$", key):
        return [1.0, 0.3]
    return []


def _floats(key: str, value: float) -> list[float]:
    if 0 < abs(value) <= 1e-3:
        return [100 * value]
    return [1.5 * value, 0.5 * value, value + 1.0] if value else [0.5, 1.5]


def _lists(value: list) -> list[list]:
    """In another order, all alike (each of the values), and every number or switch changed."""
    kinds = list(dict.fromkeys(map(_hashable, value)))
    found = [value[1:] + value[:1], value[::-1]] + (
        [[kind] * len(value) for kind in kinds] if len(kinds) > 1 and isinstance(value[0], (str, int, float)) else []
    )
    if all(isinstance(item, (bool, int)) and item in (0, 1) for item in value):
        found.append([type(item)(1 - item) for item in value])
    elif all(isinstance(item, float) for item in value):
        found.append([1.5 * item for item in value])
    return [other for index, other in enumerate(found) if other != value and other not in found[:index]]


def _hashable(item):
    return tuple(map(_hashable, item)) if isinstance(item, list) else item


def _inner(table: Mapping) -> Iterator[tuple[str, dict]]:
    """(entry, the mapping with another value of it) of nested configs, two levels deep."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            for inner, other in value.items():
                if not isinstance(other, (Mapping, list)):
                    yield from ((f"{key}.{inner}", {**table, key: {**value, inner: new}}) for new in others(inner, other))
        elif not _NO_MATHS.match(key):
            yield from ((key, {**table, key: new}) for new in others(key, value))


def _ropes(table: Mapping, effective: Mapping) -> Iterator[tuple[str, dict, dict]]:
    """(label, other table, other keys that go with it): each number of it, and each rope type of transformers with values that are not neutral."""
    if any(isinstance(inner, Mapping) for inner in table.values()):
        for kind, inner in table.items():
            if isinstance(inner, Mapping):
                yield from ((f".{kind}{label}", {**table, kind: other}, more) for label, other, more in _flat_ropes(inner, effective))
    else:
        yield from _flat_ropes(table, effective)


def _flat_ropes(table: Mapping, effective: Mapping) -> Iterator[tuple[str, dict, dict]]:
    for key, value in table.items():
        if isinstance(value, (int, float)):
            news = others(key, value) if key != "rope_theta" else [3.0 * value]
            yield from ((f".{key}", {**table, key: new}, {}) for new in news)
        elif isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            yield f".{key}", {**table, key: [1.5 * item for item in value]}, {}
    base = {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}
    for name in ROPE_TYPES:
        if name != table.get("rope_type", "default"):
            yield from ((f"={name}", {**base, **other}, more) for other, more in rope_tables(name, effective, base))
    if table.get("rope_type", "default") != "default":
        yield "=default", {**base, "rope_type": "default"}, {}


def rope_tables(name: str, effective: Mapping, base: Mapping, original: int = ORIGINAL) -> list[tuple[dict, dict]]:
    """(table without theta, other keys) of a rope type, one per way in which the number of frequencies may be counted. original: the threshold."""
    threshold = {"original_max_position_embeddings": original}
    # Some classes keep the threshold beside the table; it goes first there.
    beside = dict(threshold) if effective.get("original_max_position_embeddings") is not None else {}
    if name == "linear":
        return [({"rope_type": "linear", "factor": 3.0}, {})]
    if name == "dynamic":
        return [({"rope_type": "dynamic", "factor": 3.0}, {"max_position_embeddings": original})]
    if name == "llama3":
        return [({"rope_type": "llama3", "factor": 6.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, **threshold}, beside)]
    if name == "proportional":
        return [({"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 2.0}, {})]
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "beta_slow": 1.5, **threshold}
    if name == "yarn":
        return [({**yarn, "attention_factor": 1.3, "truncate": False}, beside), ({**yarn, "attention_factor": 1.3}, beside)]
    if name == "yarn with mscale":
        return [({**yarn, "mscale": 1.2, "mscale_all_dim": 0.8}, beside)]
    found = []
    for count in _frequencies(effective, base):
        short, long = [1.0 + 0.1 * i for i in range(count)], [2.0 + 0.7 * i for i in range(count)]
        found.append(({"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 4.0, **threshold}, beside))
    return found


def _frequencies(effective: Mapping, base: Mapping) -> list[int]:
    heads = effective.get("num_attention_heads") or 1
    sizes = [effective.get(key) for key in ("qk_rope_head_dim", "head_dim", "rotary_dim")] + [(effective.get("hidden_size") or 0) // heads]
    partial = base.get("partial_rotary_factor") or effective.get("partial_rotary_factor") or 1.0
    return list(dict.fromkeys(n for size in sizes if isinstance(size, int) and size for n in (int(size * partial) // 2, size // 2) if n))
