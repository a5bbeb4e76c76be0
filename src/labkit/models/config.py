"""Strict reading of Hugging Face configs: every key is read, irrelevant for a stated reason, or at its default."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import jax.numpy as jnp

from labkit.errors import InputError
from labkit.layers.plan import LayerPlan
from labkit.models.stated_keys import STATED_KEYS

IRRELEVANT_KEYS = {
    "_name_or_path": "where the config was loaded from",
    "architectures": "names the reference's class; the registry goes by model_type",
    "attention_dropout": "dropout acts in training only, and the lab trains without it",
    "auto_map": "names remote code, which the source opens only on request",
    "bos_token_id": "tokenizer and generation",
    "cache_implementation": "generation",
    "chunk_size_feed_forward": "splits a product without changing it",
    "decoder_start_token_id": "generation",
    "dtype": "the storage type; tensors carry their own",
    "eos_token_id": "tokenizer and generation",
    "id2label": "classification heads",
    "initializer_range": "initial values before training",
    "is_decoder": "a causal LM is one",
    "is_encoder_decoder": "refused before the slice is chosen when true",
    "is_llama_config": "a marker of the publisher",
    "label2id": "classification heads",
    "model_max_length": "tokenizer",
    "output_attentions": "asks the reference for extra outputs",
    "output_hidden_states": "asks the reference for extra outputs",
    "output_router_logits": "asks the reference for extra outputs",
    "pad_token_id": "tokenizer; the reference's embedding pads gradients only",
    "pretraining_tp": "splits a product without changing it",
    "problem_type": "classification heads",
    "quantization_config": "walls are found before the slice is chosen",
    "return_dict": "shape of the reference's return value",
    "task_specific_params": "generation",
    "torch_dtype": "the storage type; tensors carry their own",
    "transformers.js_config": "another runtime",
    "transformers_version": "the version that wrote the file",
    "use_cache": "the cache is an argument of the call",
}
"""Keys that no slice needs, each with the reason."""


class ConfigView(Mapping):
    """A config mapping that remembers what was read of it."""

    def __init__(self, config: Mapping):
        self._config = dict(config)
        self.read: set[str] = set()

    def __getitem__(self, key):
        value = self._config[key]
        self.read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every slice's config has besides Hugging Face's keys. dtype: what is computed in; param_dtype: what parameters are kept in."""

    dtype: object = jnp.float32
    param_dtype: object = jnp.float32

    IRRELEVANT = {}

    @property
    def plan(self) -> LayerPlan:
        raise NotImplementedError

    @classmethod
    def fields_from_hf(cls, hf: Mapping) -> dict:
        """The fields that bear their Hugging Face key's name and are present in `hf`, lists as tuples."""
        own = [field.name for field in dataclasses.fields(cls) if field.name not in ("dtype", "param_dtype")]
        return {name: tuple(hf[name]) if isinstance(hf[name], list) else hf[name] for name in own if name in hf}


class FrozenDict(Mapping):
    """A mapping of a config: hashable, its own mappings and lists frozen too; keys can be read as attributes."""

    def __init__(self, items: Mapping = ()):
        self._items = {str(key): freeze(value) for key, value in dict(items).items()}
        self._hash = None

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._items:
            raise AttributeError(name)
        return self._items[name]

    def __hash__(self):
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Mapping) and dict(self._items) == {key: freeze(value) for key, value in other.items()}

    def __repr__(self):
        return f"FrozenDict({self._items!r})"


def freeze(value):
    """A config value that can be hashed: mappings as `FrozenDict`, lists as tuples, whatever they hold too."""
    if isinstance(value, FrozenDict):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value)
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedConfig(DecoderConfig):
    """A config whose fields are the attributes that a translated decoder reads; each field bears the attribute's name.

    ALIASES: attribute -> the key that holds it, as in `attribute_map` of the reference's class.
    """

    ALIASES: ClassVar[Mapping] = {}

    @classmethod
    def from_hf(cls, hf: Mapping) -> "TranslatedConfig":
        """Every field from its key, or the key that it stands for; a missing key leaves the field's default. Raises KeyError for a field without one."""
        found = {}
        for field in dataclasses.fields(cls):
            if field.name in ("dtype", "param_dtype"):
                continue
            key = next((key for key in (cls.ALIASES.get(field.name, field.name), field.name) if key in hf), None)
            if key is not None:
                found[field.name] = freeze(hf[key])
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise KeyError(field.name)
        return cls(**found)

    @property
    def layer_configs(self) -> "LayerConfigs":
        """`per_layer_config` of the reference's config: this config as single layers see it."""
        return LayerConfigs(self)


@dataclasses.dataclass(frozen=True)
class LayerConfigs:
    """A config by layer, or by a layer type whose layers agree: its own `per_layer_config` put over it."""

    config: TranslatedConfig

    def __getitem__(self, layer):
        config, overrides = self.config, {int(key): value for key, value in (self.config.per_layer_config or {}).items()}
        if isinstance(layer, str):
            found = {overrides.get(index) for index, kind in enumerate(config.layer_types) if kind == layer}
            if len(found) != 1:
                raise ValueError(f"per_layer_config: the layers of type {layer!r} differ, or there are none")
            own = found.pop() or {}
        else:
            own = overrides.get(layer % config.num_hidden_layers) or {}
        if own.get("skip"):
            raise ValueError(f"per_layer_config of layer {layer} skips {', '.join(own['skip'])}: no layer of a slice leaves parts out")
        fields = {field.name for field in dataclasses.fields(config)}
        return dataclasses.replace(config, per_layer_config=None, **{key: value for key, value in own.items() if key in fields})


def read_config(family, effective: Mapping, defaults: Mapping, dtype=jnp.float32, param_dtype=None):
    """(config, reading) of a family from the config as the installed class sees it.
    reading: key -> (use, reason) with use "read", "irrelevant" or "default". Raises InputError that names a key which nothing reads and which is not at its
    default, a key that the slice misses, or a value that it cannot obey.
    """
    view = ConfigView(effective)
    where = f"config of model type {family.name!r}"
    try:
        config = family.config.from_hf(view)
    except KeyError as error:
        raise InputError(f"the config lacks the key {error.args[0]!r}", where, "compare config.json with a published checkpoint of this model type") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"the config asks for something that this slice cannot do: {error}", where, "see the slice's file for what it supports") from error
    reasons = IRRELEVANT_KEYS | family.config.IRRELEVANT
    stated = STATED_KEYS.get(family.name, {})
    reading, refused = {}, []
    for key, value in effective.items():
        if key in view.read:
            reading[key] = ("read", "")
        elif key in reasons:
            reading[key] = ("irrelevant", reasons[key])
        elif key in stated and stated[key].agrees(value, effective):
            reading[key] = ("irrelevant", stated[key].reason)
        elif value is None or (key in defaults and defaults[key] == value) or key == "model_type":
            reading[key] = ("default", "")
        else:
            told = f" ({stated[key]})" if key in stated else ""
            refused.append(f"{key} = {value!r}{told}" + (f" (default {defaults[key]!r})" if key in defaults else " (unknown to the installed config class)"))
    if refused:
        raise InputError(
            f"config keys that the slice does not read and that are not at their default: {'; '.join(refused)}",
            where,
            "extend the slice, or list the key in its IRRELEVANT table with a reason",
        )
    return dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype or dtype), reading
