"""From a checkpoint to a model, by the checkpoint's own metadata."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from labkit.converters.arrays import common
from labkit.converters.checkpoint import CheckpointReader, read_metadata
from labkit.converters.filling import abstract_model, filled_model, poisoned
from labkit.converters.loading import require_filled, write_row
from labkit.converters.placement import Placement, placements
from labkit.errors import InputError
from labkit.models import get_family, read_config


def restore(ckpt: str | os.PathLike, *, dtype=None, mesh: Mesh | None = None, scan: bool | None = None, config=None, source=None):
    """(model, config, metadata) of a checkpoint that `convert` wrote.

    dtype: of every parameter; None keeps each as stored and computes in the one that most are stored in. mesh: shards every parameter by its own spec, each
    part read from the checkpoint by itself, so that no host holds more than its devices do; the devices that wrote the checkpoint do not matter. scan, config,
    source: what the caller believes; InputError where the checkpoint says otherwise. Raises InputError for every difference between what is stored and what
    the model needs, and for a damaged checkpoint.
    """
    path = Path(ckpt)
    metadata = read_metadata(path)
    check_belief(path, metadata, scan, source)
    reader = CheckpointReader(path)
    family = get_family(metadata["family"])
    own, _ = read_config(family, metadata["config"]["effective"], metadata["config"]["defaults"], dtype=jnp.dtype(dtype or _main_dtype(reader)))
    if config is not None and type(config) is not type(own):
        raise InputError(
            f"The checkpoint holds a {family.name} model and a {type(config).__name__} was given",
            path,
            "Restore it without a config, or take the right checkpoint",
        )
    used = own if config is None else config
    abstract = abstract_model(family, used, mesh)
    placed = placements(used.plan, abstract.shapes, metadata["scan"])
    require_same(path, reader, placed)

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        place = placed[name]
        within = index[1:] if place.layers else index
        rows = place.rows()[index[0]] if place.layers else [None]
        shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, place.shape))
        array = poisoned(shape, dtype or common({reader.dtype(key) for key in place.keys}))
        for number, row in enumerate(rows):
            write_row(array, None if row is None else number, reader.read(*place.row(row))[within])
        require_filled(name, array)
        return array

    return filled_model(abstract, lambda name: part(name, (slice(None),) * len(placed[name].shape)), mesh, part), used, metadata


def _main_dtype(reader: CheckpointReader) -> np.dtype:
    """The floating-point dtype of most values."""
    count = Counter()
    for key in reader.headers:
        if jnp.issubdtype(reader.dtype(key), jnp.floating):
            count[reader.dtype(key)] += int(np.prod(reader.shape(key)))
    return count.most_common(1)[0][0] if count else np.dtype(np.float32)


def check_belief(path: Path, metadata: dict, scan: bool | None, source=None) -> None:
    """Raises InputError where the caller takes the checkpoint for something else than it says it is."""
    if scan is not None and scan != metadata["scan"]:
        stored, asked = (("scanned", "unscanned"), ("unscanned", "scanned"))[not metadata["scan"]]
        raise InputError(
            f"The checkpoint is {stored} and was asked for as {asked}",
            path,
            f"Leave scan out: the checkpoint tells its own layout; for an {asked} one on disk convert again with scan={scan}",
        )
    if source is not None and source.fingerprint != metadata["fingerprint"]:
        what = f"{metadata['name']} ({metadata['family']})", f"{source.name} ({source.config.model_type})"
        raise InputError(
            f"The checkpoint was made from {what[0]}, fingerprint {metadata['fingerprint'][:12]}, not from {what[1]}, fingerprint {source.fingerprint[:12]}",
            path,
            "Convert this model, or take its own checkpoint",
        )


def require_same(path: Path, reader: CheckpointReader, placed: dict[str, Placement]) -> None:
    """Raises InputError that lists what the checkpoint stores and the model lacks, the reverse, and shapes that differ."""
    wanted = {key: place.entry_shape for place in placed.values() for key in place.keys}
    problems = [f"{key} {shape} is needed and not stored" for key, shape in wanted.items() if key not in reader.headers]
    problems += [f"{key} {reader.shape(key)} is stored and not needed" for key in reader.headers if key not in wanted]
    problems += [
        f"{key} is stored as {reader.shape(key)} and needed as {shape}" for key, shape in wanted.items() if key in reader.headers and reader.shape(key) != shape
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(
            f"The checkpoint and the model do not fit: {'; '.join(problems[:4])}{more}",
            path,
            "Restore it with the config that it was made from (leave config out)",
        )
