"""The tokenizer of a source: facts against the config, and text to tokens as the reference's own tokenizer does it."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labkit.errors import InputError
from labkit.hf.components import classify
from labkit.hf.source import Source

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json", "spiece.model", "tekken.json")
NO_TOKENIZER = "no tokenizer"
PROBE = "The capital of France is"


@dataclass(frozen=True)
class TokenizerFacts:
    """present: False means `no tokenizer` and the rest is empty. size: tokens with added ones. vocab_size: the config's. rows: of the embedding on disk.

    special: name -> id. template: a chat template is there. adds_bos, adds_eos: what plain encoding puts around a text. findings: disagreements in words.
    """

    present: bool
    kind: str = NO_TOKENIZER
    size: int | None = None
    added: int | None = None
    vocab_size: int | None = None
    rows: int | None = None
    special: dict[str, int | None] = field(default_factory=dict)
    template: bool = False
    adds_bos: bool = False
    adds_eos: bool = False
    findings: tuple[str, ...] = ()


def has_tokenizer(source: Source) -> bool:
    return any((source.path / name).is_file() for name in FILES)


@functools.lru_cache(maxsize=8)
def _load(path: Path, trust_remote_code: bool):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(
            f"The tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}", path, "Download its files again, or give token ids instead of text"
        ) from None


def load_tokenizer(source: Source):
    """The transformers tokenizer. Raises InputError when the source has none or it does not load."""
    if not has_tokenizer(source):
        raise InputError(f"{source.name} has no tokenizer", source.path, "Give token ids instead of text, or copy the tokenizer's files into the directory")
    return _load(source.path, source.config.trust_remote_code)


def encode(source: Source, prompt: str) -> np.ndarray:
    """Token ids of `prompt` as the reference's tokenizer gives them, special tokens included: int32 [1, length]. Raises InputError for an empty result."""
    tokens = np.asarray([load_tokenizer(source)(prompt)["input_ids"]], np.int32)
    if tokens.size == 0:
        raise InputError("The prompt has no tokens", repr(prompt), "Give a text that is not empty")
    return tokens


def decode(source: Source, tokens) -> str:
    """The text of token ids [length] or [1, length], special tokens shown."""
    return load_tokenizer(source).decode(np.asarray(tokens).reshape(-1).tolist(), skip_special_tokens=False)


def tokenizer_facts(source: Source) -> TokenizerFacts:
    """Size, special ids, chat template and BOS behaviour, checked against the config's vocabulary and the embedding's rows."""
    vocab_size = source.config.effective.get("vocab_size")
    embedding = next((info for name, info in source.tensors.items() if classify(name) == "embedding" and len(info.shape) == 2), None)
    rows = embedding.shape[0] if embedding else None
    findings = []
    if rows is not None and vocab_size is not None and rows != vocab_size:
        findings.append(f"the embedding {embedding.name} has {rows} rows and vocab_size is {vocab_size}")
    if not has_tokenizer(source):
        return TokenizerFacts(False, vocab_size=vocab_size, rows=rows, findings=tuple(findings))
    tokenizer = load_tokenizer(source)
    size, special = len(tokenizer), {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    if vocab_size is not None and size > vocab_size:
        findings.append(f"the tokenizer has {size} tokens and vocab_size is {vocab_size}: ids from {vocab_size} on have no embedding")
    elif vocab_size is not None and size < vocab_size:
        findings.append(f"the tokenizer has {size} tokens and vocab_size is {vocab_size}: {vocab_size - size} rows are never used")
    for name in ("bos", "eos", "pad"):
        ours, theirs = special[name], source.config.effective.get(f"{name}_token_id")
        listed = theirs if isinstance(theirs, list) else [theirs]
        if ours is not None and theirs is not None and ours not in listed:
            findings.append(f"{name}_token_id is {theirs} in the config and {ours} in the tokenizer")
    plain, bare = tokenizer(PROBE)["input_ids"], tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    template = bool(getattr(tokenizer, "chat_template", None))
    return TokenizerFacts(
        True,
        type(tokenizer).__name__,
        size,
        len(tokenizer.get_added_vocab()),
        vocab_size,
        rows,
        special,
        template,
        adds_bos=special["bos"] is not None and plain[:1] == [special["bos"]] and bare[:1] != [special["bos"]],
        adds_eos=special["eos"] is not None and plain[-1:] == [special["eos"]] and bare[-1:] != [special["eos"]],
        findings=tuple(findings),
    )
