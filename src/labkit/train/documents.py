"""Documents of tokens from a file: a text (the source's tokenizer), lines of JSON, or an array of tokens."""

import json
from pathlib import Path

import numpy as np

from labkit.errors import InputError

KINDS = 'a UTF-8 text, a .jsonl with one {"text": ...} per line, or a .npy of whole numbers'


def read_documents(path, source=None, *, vocab_size: int | None = None) -> list[np.ndarray]:
    """Token arrays, one per document.

    path: a `.npy` with token ids (one document, or one per row; memory-mapped, never copied), a `.jsonl` with one document per line under "text", or any other
    file as one UTF-8 text. Texts go through the tokenizer of `source` (hf.source.Source), each followed by its end-of-text token where it has one. Raises
    InputError naming file, line or index for what cannot be read, for an id outside `vocab_size`, and when nothing is there.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("There is no such data file", path, f"Give {KINDS}")
    documents = _token_array(path) if path.suffix == ".npy" else _texts(path, source)
    documents = [document for document in documents if document.size >= 2]
    if not documents:
        raise InputError("The data file holds no two tokens in a row, so there is nothing to predict", path, f"Give {KINDS}")
    if vocab_size is not None:
        for number, document in enumerate(documents):
            _require_ids(document, vocab_size, f"{path}, document {number}")
    return documents


def _token_array(path: Path) -> list[np.ndarray]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"The token array cannot be read: {error}", path, "Write it with numpy.save, without pickled objects") from None
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"The token array is {array.dtype} {array.shape}", path, "Give whole numbers in one axis, or [documents, length]")
    return [array] if array.ndim == 1 else list(array)


def _texts(path: Path, source) -> list[np.ndarray]:
    from labkit.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"The text is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}", path, f"Give {KINDS}") from None
    texts = _lines(path, text) if path.suffix == ".jsonl" else [text]
    end = getattr(tokenizer, "eos_token_id", None)
    tail = [] if end is None else [end]
    return [np.asarray([*tokenizer(text, verbose=False)["input_ids"], *tail], np.int32) for text in texts if text.strip()]


def _lines(path: Path, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            found.append(entry["text"])
        except (ValueError, KeyError, TypeError):
            entry = None
        if entry is None or not isinstance(found[-1], str):
            raise InputError('The line is no JSON object with a string under "text"', f"{path}, line {number}", "Mend or remove the line")
    return found


def _require_ids(document: np.ndarray, vocab_size: int, where: str, block: int = 1 << 24) -> None:
    for start in range(0, document.size, block):
        part = document[start : start + block]
        wrong = np.flatnonzero((part < 0) | (part >= vocab_size))
        if wrong.size:
            index = start + int(wrong[0])
            raise InputError(
                f"Token {int(document[index])} is outside the vocabulary of {vocab_size}",
                f"{where}, index {index}",
                "Make the tokens with this model's tokenizer",
            )
