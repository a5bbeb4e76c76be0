"""Goldens: what the reference answered, one JSON object per line, for machines without PyTorch.

A line holds `prompt`, `tokens` and `logits`: plain lists [length][vocab], as other tools write them, or, in our own files, an object with the float32 bytes in
base64 and their shape; `positions` then names the rows kept (all when absent). Optional: `greedy`, `dtype`, `versions`, `fingerprint`, `model`.
"""

import base64
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labkit.errors import InputError


@dataclass(frozen=True)
class Golden:
    """One prompt and the reference's answer.

    tokens: int [length]. logits: float32 [kept, vocab], teacher-forced. positions: int [kept], the token position of each row. greedy: int [length + steps]
    or None. dtype: the dtype that the reference ran in. fingerprint: of the source; empty when unknown.
    """

    prompt: str
    tokens: np.ndarray
    logits: np.ndarray
    positions: np.ndarray
    greedy: np.ndarray | None = None
    dtype: str = ""
    fingerprint: str = ""
    model: str = ""
    versions: dict = field(default_factory=dict)


def make_goldens(
    reference, prompts: Sequence[tuple[str, np.ndarray]], *, steps: int = 16, keep: int | None = 16, fingerprint: str = "", model: str = ""
) -> list[Golden]:
    """Goldens of `reference` for (text, tokens [length]) pairs. keep: at most so many evenly spaced positions per prompt, the last included; None keeps all."""
    import torch
    import transformers

    goldens = []
    for text, tokens in prompts:
        tokens = np.asarray(tokens).reshape(-1)
        count = len(tokens) if keep is None else min(keep, len(tokens))
        positions = np.unique(np.linspace(0, len(tokens) - 1, count).round().astype(np.int64))
        logits = reference.logits(tokens[None])[0][positions].astype(np.float32)
        greedy = reference.greedy(tokens[None], steps)[0] if steps else None
        goldens.append(
            Golden(
                text,
                tokens,
                logits,
                positions,
                greedy,
                reference.dtype,
                fingerprint,
                model,
                {"torch": torch.__version__, "transformers": transformers.__version__},
            )
        )
    return goldens


def write_goldens(path, goldens: Iterable[Golden]) -> Path:
    """Write goldens to a `.jsonl` file, whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for golden in goldens:
                logits = np.ascontiguousarray(golden.logits, "<f4")
                line = {
                    "prompt": golden.prompt,
                    "tokens": golden.tokens.tolist(),
                    "positions": golden.positions.tolist(),
                    "logits": {"dtype": "float32", "shape": list(logits.shape), "base64": base64.b64encode(logits.tobytes()).decode()},
                    "dtype": golden.dtype,
                    "fingerprint": golden.fingerprint,
                    "model": golden.model,
                    "versions": golden.versions,
                }
                if golden.greedy is not None:
                    line["greedy"] = golden.greedy.tolist()
                file.write(json.dumps(line) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"goldens cannot be written: {error.strerror}", str(path), "choose a folder with room that you may write to") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_goldens(path, *, vocab_size: int | None = None) -> list[Golden]:
    """Read a `.jsonl` file of goldens, ours or made elsewhere. Raises InputError naming the line that is not one."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"goldens cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}", str(path)) from error
    goldens = [_golden(line, f"{path}, line {number}", vocab_size) for number, line in enumerate(lines, start=1) if line.strip()]
    if not goldens:
        raise InputError("the file holds no goldens", str(path), "each line is a JSON object with prompt, tokens and logits")
    return goldens


def check_goldens(path, *, vocab_size: int | None = None) -> None:
    """Refuse what `read_goldens` would refuse of the file and of its first line, without reading the rest."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            number, line = next(((n, line) for n, line in enumerate(file, 1) if line.strip()), (1, ""))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"goldens cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}", str(path)) from error
    if not line:
        raise InputError("the file holds no goldens", str(path), "each line is a JSON object with prompt, tokens and logits")
    _golden(line, f"{path}, line {number}", vocab_size)


def _golden(line: str, where: str, vocab_size: int | None) -> Golden:
    help_ = "each line is a JSON object with prompt, tokens [length] and logits [length][vocab]"
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"a golden is not valid JSON: {error.msg}", where, help_) from error
    if not isinstance(data, dict) or "tokens" not in data or "logits" not in data:
        raise InputError("a golden lacks tokens or logits", where, help_)
    tokens, logits = _array(data["tokens"], where, "tokens"), _logits(data["logits"], where)
    tokens, logits = (x[0] if x.ndim == rank + 1 and len(x) == 1 else x for x, rank in ((tokens, 1), (logits, 2)))
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"tokens of a golden are not a list of whole numbers: {tokens.dtype} {tokens.shape}", where, help_)
    positions = _array(data["positions"], where, "positions") if "positions" in data else np.arange(len(tokens))
    if logits.ndim != 2 or not logits.size or len(logits) != len(positions):
        raise InputError(f"logits of a golden have shape {logits.shape}, not [{len(positions)}, vocab]", where, help_)
    if not np.issubdtype(positions.dtype, np.integer) or positions.min() < 0 or positions.max() >= len(tokens):
        raise InputError(f"positions of a golden must lie in 0..{len(tokens) - 1}", where, help_)
    if not np.isfinite(logits).all():
        raise InputError("logits of a golden are not finite", where, "write it again from a reference without NaN or infinite logits")
    vocab = logits.shape[1]
    greedy = _array(data["greedy"], where, "greedy").reshape(-1) if data.get("greedy") is not None else None
    for name, values in (("tokens", tokens), ("greedy", greedy)):
        if values is not None and (values.min() < 0 or values.max() >= vocab):
            raise InputError(f"{name} of a golden lie outside its vocabulary of {vocab}", where, help_)
    if greedy is not None and (len(greedy) <= len(tokens) or not np.array_equal(greedy[: len(tokens)], tokens)):
        raise InputError("greedy of a golden does not continue its tokens", where, "greedy is the prompt's tokens followed by the generated ones")
    if vocab_size is not None and vocab != vocab_size:
        raise InputError(f"a golden has {vocab} logits per position, the model {vocab_size}", where, "use goldens of this model")
    text = {key: str(data.get(key) or "") for key in ("prompt", "dtype", "fingerprint", "model")}
    return Golden(tokens=tokens, logits=logits, positions=positions, greedy=greedy, versions=data.get("versions") or {}, **text)


def _array(value, where, name) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InputError(f"{name} of a golden are ragged", where) from error


def _logits(value, where) -> np.ndarray:
    if not isinstance(value, dict):
        array = _array(value, where, "logits")
        if not np.issubdtype(array.dtype, np.number):
            raise InputError("logits of a golden are not numbers", where)
        return array.astype(np.float32)
    try:
        if value["dtype"] != "float32":
            raise InputError(f"logits of a golden are stored as {value['dtype']}, not float32", where)
        return np.frombuffer(base64.b64decode(value["base64"], validate=True), "<f4").reshape(value["shape"])
    except (KeyError, ValueError, TypeError) as error:
        raise InputError("the stored bytes of a golden's logits do not fit their shape", where, "the file is damaged; write the goldens again") from error
