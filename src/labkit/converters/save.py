"""From a model's present values to a checkpoint that `export` reads: what a training run hands over."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from labkit.converters.arrays import common, first_non_finite
from labkit.converters.checkpoint import HF_FILES, METADATA, CheckpointWriter, read_metadata
from labkit.converters.convert import MARGIN, described, disk_order, entries, kept_files, output_folder
from labkit.converters.filling import abstract_model, state_arrays
from labkit.converters.loading import fit
from labkit.converters.placement import placements
from labkit.errors import InputError
from labkit.hf.safetensors_io import NAMES
from labkit.hf.scratch import ensure_free
from labkit.models import get_family


@dataclass(frozen=True)
class Saved:
    """What `save` wrote."""

    path: Path
    family: str
    parameters: int
    nbytes: int
    fingerprint: str

    def __str__(self):
        return f"{self.parameters} parameters, {self.nbytes:,} bytes, in {self.path}"


def save(model, source, out: str | os.PathLike, *, training: dict, force: bool = False, progress: Callable[[int, int], None] | None = None) -> Saved:
    """Writes a model that was loaded from `source` and changed since as a checkpoint at `out`, which appears only when it is complete.

    Every array keeps the dtype that it has now, and so will the tensors that `export` makes of it; the rest (names, config, tokenizer) is the source's.
    training: plain data about what changed it, kept in the metadata. force: replace what was trained
    from the same source at `out`. One row of one parameter is on
    the host at a time. On a mesh of several processes all of them call it, and process 0 writes. Raises InputError for a value that is not finite, and for an
    `out` that cannot be written or is not empty.
    """
    out, writing = Path(out).absolute(), jax.process_index() == 0
    family, config = get_family(source.config.model_type), model.config
    arrays = state_arrays(model)
    expansion = fit(source, family, config, abstract_model(family, config)).expansion
    placed = placements(config.plan, {path: tuple(array.shape) for path, array in arrays.items()}, True)
    total, digest = sum(array.nbytes for array in arrays.values()), hashlib.sha256()
    stored = {name: common({arrays[t.path].dtype for t in a.targets}) for a in expansion.assignments for name in a.names}
    kept = kept_files(source.path)
    with contextlib.ExitStack() as stack:
        if writing:
            folder = stack.enter_context(output_folder(out, force and _replaceable(out, source)))
            ensure_free(folder, total + sum(p.stat().st_size for p in kept) + MARGIN)
            writer = CheckpointWriter(folder)
        done = 0
        for place in placed.values():
            if writing:
                for key, shape in entries(place):
                    writer.declare(key, shape, arrays[place.path].dtype, bool(place.layers))
            for index in place.rows():
                row = on_host(arrays[place.path], index)
                if (wrong := first_non_finite(row)) is not None:
                    raise InputError(
                        f"The parameter {place.path} holds {float(row[wrong])} at index {list(wrong)}", out, "The training diverged: go back a step"
                    )
                digest.update(row.tobytes())
                done += row.nbytes
                if writing:
                    writer.write(*place.row(index), row)
                if progress is not None:
                    progress(done, total)
        metadata = described(source, family, expansion, kept) | {
            "origin": "trained",
            "fingerprint": digest.hexdigest(),
            "trained": {"from": source.fingerprint, **training},
            "scan": True,
            "dtype": None,
            "parameters": {path: list(array.shape) for path, array in arrays.items()},
            "tensors": {
                name: {
                    "dtype": NAMES[stored[name]] if name in stored else info.dtype,
                    "shape": list(info.shape),
                    "shard": str(info.shard.relative_to(source.path)),
                }
                for name, info in disk_order(source.tensors)
            },
            "narrowed": {},
            "findings": [],
        }
        if writing:
            (folder / HF_FILES).mkdir()
            for path in kept:
                shutil.copyfile(path, folder / HF_FILES / path.name)
            _tell_dtype(folder / HF_FILES / "config.json", _main_dtype(arrays))
            (folder / METADATA).write_text(json.dumps(metadata, indent=1))
            writer.close({"labkit": {k: metadata[k] for k in ("schema", "family", "name", "fingerprint", "trained", "scan", "versions")}})
    return Saved(out, family.name, len(placed), total, metadata["fingerprint"])


def _replaceable(out: Path, source) -> bool:
    """True when `out` is what was trained from this source; False when it is free. Raises InputError for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / METADATA).is_file() or read_metadata(out).get("trained", {}).get("from") != source.fingerprint:
        raise InputError("The output exists and was not trained from this source, so force does not replace it", out, "Choose a new folder, or remove this one")
    return True


def on_host(array: jax.Array, index: int | None) -> np.ndarray:
    """The array, or one index of axis 0, as numpy's; gathered over processes where no process holds all of it."""
    if array.is_fully_addressable:
        return np.asarray(array if index is None else array[index])
    whole = NamedSharding(array.sharding.mesh, PartitionSpec())
    take = (lambda x: x) if index is None else (lambda x: jax.lax.index_in_dim(x, index, keepdims=False))
    return np.asarray(jax.jit(take, out_shardings=whole)(array).addressable_data(0))


def _main_dtype(arrays: dict) -> np.dtype:
    """The dtype of most values."""
    sizes: dict = {}
    for array in arrays.values():
        sizes[np.dtype(array.dtype)] = sizes.get(np.dtype(array.dtype), 0) + array.size
    return max(sizes, key=sizes.get)


def _tell_dtype(config: Path, dtype: np.dtype) -> None:
    """transformers loads what it finds in the dtype that the config names."""
    raw = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in raw:
            raw[key] = dtype.name
    config.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
