"""Token prompts for parity: real text where the checkpoint brings a tokenizer, random tokens elsewhere; always of the exact lengths asked for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.errors import InputError

LENGTHS = (6, 64, 256)
"""Three lengths by default, the longest beyond 200 tokens: short ones cannot see windows, rope scaling or a cache that drifts."""

TEXT = """The capital of France is Paris, and the river that runs through it is the Seine. In 1889 a tower of iron was finished there for a fair; it was meant
to stand for twenty years and is still there. Visitors count 1,665 steps if they climb. "Why iron?" a child asked. "Because stone that high would be
too heavy," said her grandfather, "and because the people who built bridges had learned how wind pushes on open lattices." He drew two curves on a
napkin: one for the load, one for the wind.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Water boils at 100 degrees Celsius at sea level, at about 93 on a mountain of 2,000 metres, and at 70 on the highest peaks. The reason is pressure:
bubbles form when the vapour inside them can hold off the air outside. A cook who moves from the coast to the mountains finds that beans stay hard; a
pot with a tight lid mends it. Eine Übersetzung ist nie ganz treu, sagt man; dennoch verstehen wir uns. On the third day the survey team walked back
along the ridge, checked the seven markers they had left, and found that two of them had moved by 4.5 centimetres to the north-east. They wrote it
down, argued over the cause until dark, and agreed to measure again in spring.
"""
"""Prose, dialogue, code, numbers, and a line of German: our own words, so that every run sees the same text."""


def make_prompts(path, vocab_size: int, lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[tuple[str, np.ndarray]]:
    """(text, tokens int [length]) for each length.

    path: the checkpoint's directory (or a `Source`). Without a usable tokenizer the tokens are random in 3..vocab_size - 1 and the text says so. The prompts
    start at different places of the text; a length beyond it goes round.
    """
    path = Path(getattr(path, "path", path))
    if vocab_size < 8 or any(length < 1 for length in lengths):
        raise InputError(f"prompts need a vocabulary of 8 or more and lengths of 1 or more, not {vocab_size} and {list(lengths)}")
    rng = np.random.default_rng(seed)
    tokenizer = _tokenizer(path)
    if tokenizer is None:
        return [(f"{length} random tokens, seed {seed}", rng.integers(3, vocab_size, length)) for length in lengths]
    stream = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], np.int64)
    if not len(stream) or stream.max() >= vocab_size:
        return [(f"{length} random tokens, seed {seed} (the tokenizer's ids exceed the vocabulary)", rng.integers(3, vocab_size, length)) for length in lengths]
    prompts, start = [], 0
    for length in lengths:
        tokens = np.resize(np.roll(stream, -start), length)
        prompts.append((tokenizer.decode(tokens), tokens))
        start = (start + length) % len(stream)
    return prompts


def _tokenizer(path: Path):
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # a tokenizer that transformers cannot read is no wall for logits: random tokens serve
        return None
