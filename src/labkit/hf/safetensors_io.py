"""The safetensors format: a strict reader of headers and a writer that holds one tensor at a time.

Format: 8 bytes (little-endian length n), n bytes of JSON (name -> dtype, shape, data_offsets), then the data.
Source: the format page of the safetensors library.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from labkit.errors import InputError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # the library's own limit
DOWNLOAD_AGAIN = "Download this file again; if it is your own, write it again with the safetensors library"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor on disk. begin and end are byte offsets in the file `shard` (not in its data section)."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]


def read_header(path: str | os.PathLike) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name in the order of the header, and the metadata.

    Raises InputError naming the file, and the tensor where there is one, for any header that lies.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise InputError(f"A safetensors file of {total} bytes is too short to hold a header", path, DOWNLOAD_AGAIN)
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER:
                raise InputError(f"The header claims a length of {length:,} bytes, more than the format allows ({MAX_HEADER:,})", path, DOWNLOAD_AGAIN)
            if 8 + length > total:
                raise InputError(f"The file is truncated: its header claims {length:,} bytes and the file has {total:,}", path, DOWNLOAD_AGAIN)
            text = file.read(length)
    except OSError as error:
        raise InputError(f"A weight file cannot be read: {error.strerror}", path, "Check that the file exists and that you may read it") from None
    header = _parse(text, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError("The header's __metadata__ is not a map of strings", path, DOWNLOAD_AGAIN)
    infos = {name: _info(name, entry, path, 8 + length) for name, entry in header.items()}
    _check_layout(infos, path, 8 + length, total)
    return infos, metadata


def _parse(text: bytes, path: Path) -> dict:
    def no_duplicates(pairs):
        seen = {}
        for key, value in pairs:
            if key in seen:
                raise InputError(f"The header lists {key!r} twice", f"{path}, {key}", DOWNLOAD_AGAIN)
            seen[key] = value
        return seen

    def no_constant(name):
        raise ValueError(f"{name} is not JSON")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"The header is not valid JSON ({error})", path, DOWNLOAD_AGAIN) from None
    if not isinstance(header, dict):
        raise InputError("The header is not a JSON object", path, DOWNLOAD_AGAIN)
    return header


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _info(name: str, entry, path: Path, data_start: int) -> TensorInfo:
    where = f"{path}, tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError("A header entry must hold dtype, shape and data_offsets and nothing else", where, DOWNLOAD_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise InputError(f"The dtype {dtype!r} is not one of {', '.join(DTYPES)}", where, "Convert the file to one of these dtypes")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise InputError(f"The shape {shape!r} is not a list of sizes", where, DOWNLOAD_AGAIN)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise InputError(f"The data_offsets {offsets!r} are not [begin, end]", where, DOWNLOAD_AGAIN)
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise InputError(
            f"The header lies about a size: {dtype} {shape} takes {needed:,} bytes and the offsets span {offsets[1] - offsets[0]:,}", where, DOWNLOAD_AGAIN
        )
    return TensorInfo(name, path, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_layout(infos: Mapping[str, TensorInfo], path: Path, data_start: int, total: int) -> None:
    at, previous = data_start, "the header"
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        where = f"{path}, tensor {info.name}"
        if info.end > total:
            raise InputError(f"The file is truncated: this tensor ends at byte {info.end:,} and the file has {total:,}", where, DOWNLOAD_AGAIN)
        if info.begin < at:
            raise InputError(f"The header lies about offsets: this tensor overlaps {previous}", where, DOWNLOAD_AGAIN)
        if info.begin > at:
            raise InputError(
                f"The header lies about offsets: {info.begin - at:,} bytes between {previous} and this tensor belong to no tensor", where, DOWNLOAD_AGAIN
            )
        at, previous = info.end, info.name
    if at != total:
        raise InputError(f"The file has {total - at:,} bytes after its last tensor ({previous})", path, DOWNLOAD_AGAIN)


def read_tensor(info: TensorInfo) -> np.ndarray:
    """The tensor, read-only, in its own dtype: a memory map of its bytes in the file (empty and scalar tensors are plain arrays)."""
    if info.nbytes == 0:
        array = np.empty(info.shape, info.numpy_dtype)
    elif os.path.getsize(info.shard) < info.end:
        raise InputError("The file became shorter after its header was read", f"{info.shard}, tensor {info.name}", DOWNLOAD_AGAIN)
    else:
        array = np.memmap(info.shard, np.uint8, "r", info.begin, (info.nbytes,)).view(np.ndarray).view(info.numpy_dtype).reshape(info.shape)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Slot:
    """A tensor that is to be written: its name, dtype (a safetensors name such as "BF16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def plan_shards(infos: Iterable[Slot | TensorInfo], max_shard_size: int) -> list[list[Slot | TensorInfo]]:
    """Consecutive tensors in shards of at most `max_shard_size` bytes; a larger tensor has a shard of its own."""
    shards, filled = [[]], 0
    for info in infos:
        if shards[-1] and filled + info.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.nbytes
    return shards


def write_safetensors(
    path: str | os.PathLike, infos: Iterable[Slot | TensorInfo], arrays: Iterable[np.ndarray], *, max_shard_size: int = 5_000_000_000
) -> list[Path]:
    """Writes tensors into the folder `path`: model.safetensors, or numbered shards and an index when they exceed `max_shard_size` bytes.

    `arrays` gives one array per entry of `infos`, in that order; each must have the announced dtype and shape, and is dropped before the next one is asked for.
    Every file is written under another name first; nothing of a failed write stays. Returns the shard files.
    Raises InputError for a wrong array, a doubled name or a failed write.
    """
    folder, infos = Path(path), list(infos)
    names = [info.name for info in infos]
    if len(set(names)) != len(names):
        raise InputError(f"A tensor is to be written twice: {next(name for name in names if names.count(name) > 1)}", folder)
    shards = plan_shards(infos, max_shard_size)
    files = [
        folder / ("model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors") for number in range(1, len(shards) + 1)
    ]
    stream, written = iter(arrays), []
    try:
        for file, shard in zip(files, shards):
            written.append((_write_shard(file, shard, stream), file))
        if next(stream, None) is not None:
            raise InputError(f"More arrays than the {len(infos)} announced tensors", folder)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(info.nbytes for info in infos)},
                "weight_map": {info.name: file.name for file, shard in zip(files, shards) for info in shard},
            }
            temporary = folder / f".model.safetensors.index.json.{os.getpid()}"
            written.append((temporary, folder / "model.safetensors.index.json"))
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for temporary, file in written:
            os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"Writing failed: {error.strerror or error}", folder, "Check the free space and the permissions of this folder") from None
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
    return files


def _write_shard(file: Path, shard: list[Slot | TensorInfo], stream) -> Path:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for info in shard:
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for info in shard:
                array = next(stream, None)
                if array is None:
                    raise InputError("Fewer arrays than announced tensors", f"{file}, tensor {info.name}")
                array = np.asarray(array)
                if array.dtype != DTYPES[info.dtype] or array.shape != tuple(info.shape):
                    raise InputError(
                        f"{array.dtype} {array.shape} was given for a tensor announced as {info.dtype} {tuple(info.shape)}", f"{file}, tensor {info.name}"
                    )
                # A uint8 view: the buffer protocol does not know bfloat16.
                out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                del array
            out.flush()
            os.fchmod(out.fileno(), 0o644)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)
