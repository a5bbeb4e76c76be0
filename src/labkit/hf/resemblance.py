"""Which known architectures an unknown checkpoint looks like: by the class that it names, else by its tensor names and config keys."""

import re

from labkit.hf import architectures
from labkit.hf.source import Source

SHOWN = 5
_MODULE = re.compile(r"self\.(\w+) = (?:nn\.(?:Linear|Embedding|Conv1d)|\w*Norm|\w*Linear)\(")
_ATTRIBUTE = re.compile(r"self\.(\w+)\s*[:=]")
# Modules of other heads than a language model's, and keys of every config: they tell nothing apart.
_HEADS = {"score", "qa_outputs", "classifier", "summary", "lm_head"}
_COMMON = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache", "_name_or_path"}


def resembling(source: Source) -> str:
    """Advice in one or two sentences: names like the model_type, then the types that fit best, all of them where several fit equally."""
    name = architectures.suggestion(source.config.model_type, architectures.causal_lm_classes())
    owners = architectures.definers((source.config.architectures or [None])[0])
    if owners:
        return f"{name} The class {source.config.architectures[0]} is that of {_listed(owners)}.".strip()
    best = most_alike(source)
    return f"{name} By tensor names and config keys it is most like {_listed(best)}.".strip() if best else name


def most_alike(source: Source) -> list[str]:
    """The causal-LM types that have every module that the tensors name; among them those with fewest modules beside and fewest config keys unknown."""
    named = {part for tensor in source.tensors for part in tensor.split(".")[:-1] if not part.isdigit()}
    keys = set(source.config.raw_text) - _COMMON
    found = {}
    for kind in architectures.causal_lm_classes():
        file = architectures.modeling_file(kind)
        if file is None:
            continue
        text = file.read_text()
        if named <= set(_ATTRIBUTE.findall(text)):
            config = file.with_name(file.name.replace("modeling_", "configuration_", 1))
            declared = config.read_text() if config.is_file() else ""
            unknown = sum(re.search(rf"\b{re.escape(key)}\b", declared) is None for key in keys)
            found[kind] = len(set(_MODULE.findall(text)) - named - _HEADS) + unknown
    return sorted(kind for kind, score in found.items() if score == min(found.values()))


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds[:SHOWN]) + (f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else "")
