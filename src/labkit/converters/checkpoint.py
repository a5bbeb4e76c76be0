"""Orbax's layout on disk, written and read in place: one folder per array with a zarr header, one uncompressed file per layer.

Plain Orbax restores it (`StandardCheckpointer`, `PyTreeCheckpointer`). Chunks are plain bytes, so a reader maps them and no part of a checkpoint needs to be in
memory to be written or read. No file names a device, so any number of devices restores it. Source of the layout: orbax-checkpoint 0.12 with `use_ocdbt=False`.
"""

from __future__ import annotations

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from labkit.converters.arrays import bits, contiguous
from labkit.errors import InputError
from labkit.models.mapping import Shape

METADATA = "labkit.json"
SCHEMA = 1
HF_FILES = "hf_files"
SYNC_THREADS = 16
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
CONVERT_AGAIN = "Convert the model again"


def zarr_dtype(dtype) -> str:
    """The dtype's name in a zarr 2 header: ml_dtypes by name, numpy's own by letter and size."""
    dtype = np.dtype(dtype)
    return dtype.name if dtype.kind == "V" or hasattr(ml_dtypes, dtype.name) else dtype.newbyteorder("<").str


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


class CheckpointWriter:
    """Writes arrays chunk by chunk into an empty folder; `close` writes what Orbax needs to find them and brings everything to the disk."""

    def __init__(self, folder: Path):
        self.folder, self.keys = Path(folder), {}

    def declare(self, key: str, shape: Shape, dtype, stacked: bool) -> None:
        """An array; stacked: one chunk per index of axis 0, else one chunk."""
        chunks = [1, *shape[1:]] if stacked else list(shape)
        header = {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": [max(c, 1) for c in chunks],
            "dtype": zarr_dtype(dtype),
            "order": "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
            "dimension_separator": ".",
        }
        (self.folder / key).mkdir()
        (self.folder / key / ".zarray").write_text(json.dumps(header))
        self.keys[key] = (tuple(shape), np.dtype(dtype))

    def write(self, key: str, index: int | None, array: np.ndarray) -> None:
        """One chunk: the whole array (index None), or the slice at `index` of axis 0, without that axis. An empty array has no chunk."""
        shape, dtype = self.keys[key]
        if array.dtype != dtype or tuple(array.shape) != (shape if index is None else shape[1:]):
            raise ValueError(f"{array.dtype} {array.shape} for {key} {dtype} {shape}")
        if array.size:
            with open(self.folder / key / _chunk_name(shape, index), "xb", buffering=0) as file:
                write_all(file, contiguous(array))

    def close(self, custom_metadata: dict) -> None:
        entries = {
            str(tuple(key.split("."))): {
                "key_metadata": [{"key": part, "key_type": 2} for part in key.split(".")],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for key in self.keys
        }
        now = time.time_ns()
        tree = {
            "tree_metadata": entries,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": custom_metadata,
        }
        root = {
            "item_handlers": _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": custom_metadata,
        }
        (self.folder / "_METADATA").write_text(json.dumps(tree))
        (self.folder / "_CHECKPOINT_METADATA").write_text(json.dumps(root))
        sync_tree(self.folder)


def _chunk_name(shape: Shape, index: int | None) -> str:
    return ".".join(["0" if index is None else str(index), *["0"] * (len(shape) - 1)]) if shape else "0"


def write_all(file, array: np.ndarray) -> None:
    """All bytes of a contiguous array to an unbuffered file: one call writes at most 2 GiB."""
    view = memoryview(bits(array.reshape(-1)).view(np.uint8))
    while view:
        view = view[file.write(view) :]


def sync_tree(folder: Path) -> None:
    """fsync of every file, then of every folder. Many at once: the file system's journal commits them together, 10 times as fast as one after the other."""
    files, folders = [], []
    for base, _, names in os.walk(folder):
        folders.append(base)
        files.extend(os.path.join(base, name) for name in names)
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(sync, files))
        list(pool.map(sync, folders))


def sync(path: str | os.PathLike) -> None:
    """fsync of one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(ckpt: str | os.PathLike) -> dict:
    """The lab's metadata of a checkpoint. Raises InputError when the folder is no checkpoint of the lab, or of another schema."""
    path = Path(ckpt)
    if not path.is_dir():
        raise InputError("There is no such checkpoint", path, "Give the folder that `labkit convert` wrote")
    try:
        metadata = json.loads((path / METADATA).read_text())
    except FileNotFoundError:
        raise InputError(f"The folder is no checkpoint of the lab: it has no {METADATA}", path, "Give the folder that `labkit convert` wrote") from None
    except (OSError, ValueError) as error:
        raise InputError(f"The checkpoint's metadata cannot be read: {error}", path / METADATA, CONVERT_AGAIN) from None
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        raise InputError(f"The checkpoint's metadata has another schema than this version of the lab reads ({SCHEMA})", path / METADATA, CONVERT_AGAIN)
    return metadata


class CheckpointReader:
    """Arrays of a checkpoint as memory maps. Raises InputError naming the file for what is missing, cut short or not as its header says."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        try:
            tree = json.loads((self.folder / "_METADATA").read_text())
            keys = [".".join(part["key"] for part in entry["key_metadata"]) for entry in tree["tree_metadata"].values()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"The checkpoint's tree cannot be read: {error}", self.folder / "_METADATA", CONVERT_AGAIN) from None
        self.headers = {key: self._header(key) for key in keys}

    def _header(self, key: str) -> tuple[Shape, np.dtype, bool]:
        file = self.folder / key / ".zarray"
        try:
            header = json.loads(file.read_text())
            shape, chunks, dtype = tuple(header["shape"]), tuple(header["chunks"]), _numpy_dtype(header["dtype"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"An array's header cannot be read: {error}", file, CONVERT_AGAIN) from None
        whole = tuple(max(n, 1) for n in shape)
        if header.get("compressor") is not None or chunks not in (whole, (1, *whole[1:])):
            raise InputError("The array is compressed or cut into chunks that are not layers: another program wrote it", file, "Restore it with Orbax")
        return shape, dtype, bool(shape) and chunks != whole

    def dtype(self, key: str) -> np.dtype:
        return self.headers[key][1]

    def shape(self, key: str) -> Shape:
        return self.headers[key][0]

    def read(self, key: str, index: int | None = None) -> np.ndarray:
        """The chunk at `index` of axis 0, without that axis; the whole array where it is one chunk (index None). Read-only."""
        shape, dtype, stacked = self.headers[key]
        part = shape if index is None else shape[1:]
        if index is None and stacked:
            raise ValueError(f"{key} is stacked; read it by index")
        nbytes = math.prod(part) * dtype.itemsize
        if not nbytes:
            return np.empty(part, dtype)
        file = self.folder / key / _chunk_name(shape, index)
        try:
            size = file.stat().st_size
            if size != nbytes:
                raise InputError(f"A chunk has {size:,} bytes where {dtype} {part} takes {nbytes:,}", file, CONVERT_AGAIN)
            return np.memmap(file, np.uint8, "r", 0, (nbytes,)).view(np.ndarray).view(dtype).reshape(part)
        except OSError as error:
            raise InputError(f"A chunk of the checkpoint cannot be read: {error.strerror}", file, CONVERT_AGAIN) from None
