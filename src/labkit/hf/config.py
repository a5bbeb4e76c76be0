"""config.json as read, as the installed config class sees it, and the class's own defaults."""

import copy
import functools
import json
import os
from pathlib import Path

from labkit.errors import InputError
from labkit.hf import architectures
from labkit.hf.config_cache import remembered
from labkit.hf.rope_spellings import check_rope, normalise_rope

TEXT_TOWERS = ("text_config", "language_config", "llm_config", "decoder", "generator")
CONFIG_ADVICE = "Download config.json again, or write it with save_pretrained"


class HFConfig:
    """The config of a checkpoint. Everything but `raw` is computed on first use: the config classes import torch.

    raw: config.json as read. effective: `to_dict()` of the installed class, text tower resolved, rope in one spelling.
    defaults: the same of the class with no arguments ({} when it needs arguments). aliases: names that the class maps to others (read -> stored).
    For a model type that this transformers does not know, effective is the raw text tower and defaults is {}.
    """

    def __init__(self, raw: dict, path: Path, *, trust_remote_code: bool = False):
        self.raw, self.path, self.trust_remote_code = raw, Path(path), trust_remote_code

    @classmethod
    def read(cls, directory: str | os.PathLike, *, trust_remote_code: bool = False) -> "HFConfig":
        """Raises InputError for a config.json that is absent, invalid, not an object, without a usable model_type, or at odds with itself."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise InputError("The model directory has no config.json", path, "Give a directory that save_pretrained wrote or that was downloaded whole")
        try:
            raw = json.loads(path.read_bytes().decode("utf-8"))
        except OSError as error:
            raise InputError(f"config.json cannot be read: {error.strerror}", path) from None
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise InputError(f"config.json is not valid JSON ({error})", path, CONFIG_ADVICE) from None
        return cls.from_raw(raw, path, trust_remote_code=trust_remote_code)

    @classmethod
    def from_raw(cls, raw, path: str | os.PathLike, *, trust_remote_code: bool = False) -> "HFConfig":
        """The contents of a config.json that were read at `path`. Raises InputError as `read` does."""
        config = cls(raw, path, trust_remote_code=trust_remote_code)
        config._check()
        return config

    def _check(self) -> None:
        if not isinstance(self.raw, dict):
            raise InputError(f"config.json holds a {type(self.raw).__name__}, not an object", self.path, CONFIG_ADVICE)
        model_type = self.raw.get("model_type")
        if model_type is None:
            raise InputError("config.json has no model_type", f"{self.path}, key model_type", 'Add the model_type of the architecture, e.g. "llama"')
        if not isinstance(model_type, str) or not model_type:
            raise InputError(
                f"model_type is {model_type!r}, not a name", f"{self.path}, key model_type", 'Set it to the name of the architecture, e.g. "llama"'
            )
        architecture = (self.architectures or [None])[0]
        owners = architectures.owners(architecture)
        wrong = owners and model_type not in owners and (not self.known or model_type in architectures.causal_lm_classes())
        if wrong and not self.has_remote_code:
            raise InputError(
                f"The model_type {model_type!r} is wrong: the architecture {architecture} belongs to {', '.join(owners)}",
                f"{self.path}, key model_type",
                f"Set model_type to {' or '.join(map(repr, architectures.definers(architecture)))}, or correct architectures",
            )
        check_rope(self.raw_text, self.path)

    @property
    def architectures(self) -> list[str]:
        listed = self.raw.get("architectures")
        return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []

    @property
    def has_remote_code(self) -> bool:
        """True when the checkpoint names Python files of its own."""
        return bool(self.raw.get("auto_map"))

    @property
    def known(self) -> bool:
        """True when the installed transformers has a config class for the model type."""
        return self.raw.get("model_type") in architectures.config_classes()

    @property
    def raw_text(self) -> dict:
        """The part of `raw` that describes the text tower: the whole of it unless a wrapper nests it."""
        for key in TEXT_TOWERS:
            if isinstance(self.raw.get(key), dict):
                return self.raw[key]
        return self.raw

    @functools.cached_property
    def _configs(self) -> tuple:
        """(top config, text config) as transformers objects, or (None, None) for an unknown type."""
        if not self.known:
            if not (self.has_remote_code and self.trust_remote_code):
                return None, None
            from transformers import AutoConfig

            top = AutoConfig.from_pretrained(self.path.parent, trust_remote_code=True)
        else:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            try:
                top = CONFIG_MAPPING[self.raw["model_type"]].from_dict(_plain(self.raw))
            except Exception as error:
                reason = " ".join(str(error).split())
                raise InputError(f"The installed config class refuses config.json: {reason}", self.path, "Correct the key that it names") from None
        return top, top.get_text_config(decoder=True)

    @property
    def hf(self):
        """The transformers config object of the text tower, or None for an unknown type. Treat it as read-only."""
        return self._configs[1]

    @property
    def model_type(self) -> str:
        """The type of the text tower (what the garden is asked for)."""
        if self.raw_text is not self.raw and isinstance(self.raw_text.get("model_type"), str):
            return self.raw_text["model_type"]
        if self.raw_text is not self.raw and self.known:
            return self.hf.model_type
        return self.raw["model_type"]

    @property
    def class_name(self) -> str | None:
        """The name of the installed config class of the text tower, None for an unknown type."""
        return architectures.config_classes().get(self.model_type) or (type(self.hf).__name__ if self.hf is not None else None)

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Names that the class maps to other names (`num_experts` -> `num_local_experts`): effective holds the latter."""
        return self._remembered("aliases", self._aliases)

    def _aliases(self) -> dict[str, str]:
        return dict(type(self.hf).attribute_map) if self.hf is not None else {}

    def _remembered(self, name: str, compute) -> dict:
        return remembered(self.raw, name, compute) if self.known else compute()

    @functools.cached_property
    def effective(self) -> dict:
        return self._remembered("effective", self._effective)

    def _effective(self) -> dict:
        if self.hf is None:
            return copy.deepcopy(self.raw_text)
        effective = normalise_rope(as_held(self.hf))
        # The tie is the wrapper's business where there is one: its flag decides whether a head is stored.
        if self._configs[0] is not self.hf and "tie_word_embeddings" in self.raw:
            effective["tie_word_embeddings"] = self.raw["tie_word_embeddings"]
        return effective

    @functools.cached_property
    def described(self) -> dict:
        """`effective`, and what some classes compute as properties and leave out of `to_dict()`: the number of layers and their kinds."""
        return self._remembered("described", self._described)

    def _described(self) -> dict:
        properties = {key: getattr(self.hf, key, None) for key in ("num_hidden_layers", "layer_types", "layers_block_type")} if self.hf is not None else {}
        return {**{key: value for key, value in properties.items() if isinstance(value, (int, list))}, **self.effective}

    @functools.cached_property
    def defaults(self) -> dict:
        return self._remembered("defaults", self._defaults)

    def _defaults(self) -> dict:
        if self.hf is None:
            return {}
        try:
            return normalise_rope(as_held(type(self.hf)()))
        except Exception:  # a class that cannot be built without arguments has no defaults to compare with
            return {}


def as_held(config) -> dict:
    """`to_dict()` of a config of transformers, with counts and lists of names as the object holds them: some classes write others to the disk."""
    values, held = config.to_dict(), vars(config)
    names = lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
    counts = lambda value: isinstance(value, int) and not isinstance(value, bool)
    return {key: held[key] if key in held and any(kind(value) and kind(held[key]) for kind in (names, counts)) else value for key, value in values.items()}


def _plain(value):
    """A copy of JSON data with what transformers writes for infinity, {"__float__": "Infinity"}, as the number."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
