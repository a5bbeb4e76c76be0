"""How transformers' state dict names lie on disk: its table of renames and fusions (`conversion_mapping.py`) for one model, as plain data.

`save_pretrained` runs the table backwards, `from_pretrained` forwards; here it is run on names alone. torch and transformers are needed inside the functions
only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.hf.quiet import quiet_transformers

_PROBES = {"layer": 70001, "expert": 70101, "i": 70201, "j": 70301, "k": 70401}
_SHIFT = 8  # a table that shifts layer numbers does so by less


@dataclass(frozen=True)
class Fusion:
    """Tensors on disk and the in-memory tensors that they become together.

    memory, disk: names, or name patterns with the placeholders of the in-memory ones; `{expert}` in a disk name that has none in memory: one tensor per index,
    stacked on axis 0. operations: from disk to memory, each (name, *arguments): ("concat", axis), ("chunk", axis) in equal parts, ("split", axis) in the parts
    that the parameters have, ("swap", axis, axis), ("deinterleave", axis), ("interleave", axis), ("rope", indices of the disk tensors, "to_halves" or
    "to_pairs", config key of the head count), ("unpad", axis): entries beyond the parameter's are dropped, ("each", ((operation), ...)) on every disk tensor
    alone, with ("split_axis", axis, n) among them, ("reorder", axis, order), ("first",): the first disk tensor is the parameter, the others are the scales of a
    quantized one, ("unknown", name).
    """

    memory: tuple[str, ...]
    disk: tuple[str, ...]
    operations: tuple[tuple, ...] = ()


@dataclass(frozen=True)
class DiskNames:
    """fusions: as `save_pretrained` writes. others: further names under which `from_pretrained` finds in-memory tensors. prefixes: what the leading part of a
    name may be in other checkpoints, the saved one first (empty when there is no choice). ignored: regular expressions of names that transformers leaves unread
    in silence."""

    fusions: tuple[Fusion, ...]
    others: tuple[Fusion, ...] = ()
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def meta_model(config):
    """The causal LM of a transformers config object, or of its `to_dict()`, without numbers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        if isinstance(config, dict):
            config = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k not in ("model_type", "transformers_version")})
        return AutoModelForCausalLM.from_config(config)


def disk_names(model, memory: Iterable[str]) -> DiskNames:
    """Where in-memory tensors lie on disk.

    model: a transformers model (on the meta device will do). memory: names of its state dict, or patterns with `{layer}`, `{expert}`, `{i}`, `{j}`, `{k}` in
    place of numbers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters, apply_renamings

    memory = list(memory)
    table = get_model_conversion_mapping(model, add_legacy=False)
    saved = [entry for entry in table if not isinstance(entry, PrefixChange)]
    backward = [entry.reverse_transform() for entry in reversed(saved)]
    renamings = [entry for entry in backward if not isinstance(entry, WeightConverter)]
    converters = [entry for entry in backward if isinstance(entry, WeightConverter)]
    forward = {id(b): f for b, f in zip(backward, reversed(saved))}
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    fusions, groups = [], {}
    for name in memory:
        probe = _probed(name)
        key, pattern = apply_converters(probe, converters)
        if pattern is None:
            fusions.append(Fusion((name,), (_patterned(apply_renamings(probe, renamings)),)))
            continue
        if key not in groups:
            groups[key] = (by_pattern[pattern], {})
            fusions.append(key)
        groups[key][1][pattern] = name
    for position, key in enumerate(fusions):
        if not isinstance(key, str):
            continue
        entry, members = groups[key]
        names = [re.sub(re.escape(entry.target_patterns[0]), lambda _, t=target: t, key, count=1) for target in entry.target_patterns]
        disk = [_patterned(apply_renamings(name, renamings).replace("*", str(_PROBES["expert"]))) for name in names]
        ordered = [members[pattern] for pattern in entry.source_patterns if pattern in members]
        fusions[position] = Fusion(tuple(ordered), tuple(disk), tuple(_operations(forward[id(entry)])))
    others, prefixes, converted = [], _prefixes(model, table, memory), {name for _, members in groups.values() for name in members.values()}
    for fusion in fusions:
        if fusion.disk != fusion.memory and all(_read_as_it_is(name, table, memory) for name in fusion.memory):
            others.append(Fusion(fusion.memory, fusion.memory))
        if prefixes and fusion.memory[0] not in converted and fusion.memory[0].startswith(prefixes[0]):
            bare = _patterned(apply_renamings(_probed(fusion.memory[0]).removeprefix(prefixes[0]), renamings))
            if bare != fusion.disk[0].removeprefix(prefixes[0]):
                others.append(Fusion(fusion.memory, (bare,)))
    return DiskNames(tuple(fusions), tuple(others), prefixes, _ignored(model))


def _operations(entry) -> Iterable[tuple]:
    """A converter's operations, from disk to memory."""
    for operation in entry.operations:
        name, values = type(operation).__name__, vars(operation)
        if name == "MergeModulelist" and values["dim"] == 0:
            continue  # what `{expert}` says
        if name == "Concatenate" and values["num_shards_attribute"] is None:
            yield "concat", values["dim"]
        elif name == "Chunk" and values["num_shards_attribute"] is None:
            yield "chunk", values["dim"]
        elif name == "Split":
            yield "split", values["dim"]
        elif name == "Transpose":
            if not values["check_dims"]:  # with it, only an odd checkpoint is transposed, and never on saving
                yield "swap", values["dim0"], values["dim1"]
        elif name == "Interleave":
            yield "interleave" if values["inverse"] else "deinterleave", values["dim"]
        elif name == "PermuteForRope":
            wanted = values["permute_layer_names"]
            chosen = tuple(i for i, p in enumerate(entry.source_patterns) if wanted is None or any(w in p for w in wanted))
            yield "rope", chosen, "to_pairs" if values["inverse"] else "to_halves", "num_attention_heads"
        elif name == "Inkling2UnpadVocab" and not values["inverse"]:
            yield "unpad", 0
        elif name == "Inkling2LoopDequantizeExperts":
            yield ("first",)
        elif name == "Inkling2LoopMergeMessageQueries" and not values["inverse"]:
            # [2 n, h] of (query, mlp) and of (key, value) by turns -> [n, (query, key, value, mlp), h]
            yield "each", (("deinterleave", 0), ("split_axis", 0, 2))
            yield "concat", 0
            yield "reorder", 0, (0, 2, 3, 1)
            yield "swap", 0, 1
        else:
            yield "unknown", name


def _probed(name: str) -> str:
    return re.sub(r"\{([a-z]+)\}", lambda match: str(_PROBES[match[1]]), name)


def _patterned(name: str) -> str:
    def number(match):
        for field, probe in _PROBES.items():
            shift = int(match[0]) - probe
            if abs(shift) <= _SHIFT:
                return "{" + field + (f"{shift:+d}" if shift else "") + "}"
        return match[0]

    return re.sub(r"\d{5,}", number, name)


def _read_as_it_is(name: str, table: Sequence, memory: Sequence[str]) -> bool:
    """Whether loading finds an in-memory name under itself: the forward table leaves it alone, or makes of it what the model does not have."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    renamed, _ = rename_source_key(_probed(name), renamings, [entry for entry in table if isinstance(entry, WeightConverter)])
    return renamed == _probed(name) or renamed not in {_probed(other) for other in memory}


def _prefixes(model, table: Sequence, memory: Sequence[str]) -> tuple[str, ...]:
    """The base model's prefix, what a `PrefixChange` accepts in its place, and nothing (a checkpoint of the base model alone)."""
    from transformers.core_model_loading import PrefixChange

    base = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    if not base or not any(name.startswith(base) for name in memory):
        return ()
    others = [
        base + entry.prefix_to_remove.replace("\\", "") + "."
        for entry in table
        if isinstance(entry, PrefixChange) and entry.prefix_to_remove and f"{entry.model_prefix}." == base
    ]
    return (base, *others, "")


def _ignored(model) -> tuple[str, ...]:
    """`_keys_to_ignore_on_load_unexpected` of the model and its parts, and the tables of rotary positions that old checkpoints hold."""
    found = set(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        found.add(r"rotary_emb\.inv_freq")
    return tuple(sorted(found))
