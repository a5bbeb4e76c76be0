"""From a checkpoint back to a Hugging Face directory, streamed: the tensors of the source, in its shards, dtypes and order."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labkit.converters.arrays import cast, contiguous, exact
from labkit.converters.checkpoint import HF_FILES, CheckpointReader, read_metadata, sync, sync_tree
from labkit.converters.convert import MARGIN
from labkit.converters.filling import abstract_model
from labkit.converters.placement import Placement, placements
from labkit.converters.restore import require_same
from labkit.converters.rules import Assignment, expand
from labkit.errors import InputError
from labkit.hf.safetensors_io import DTYPES, NAMES, Slot, write_safetensors
from labkit.hf.scratch import atomic_directory, ensure_free
from labkit.hf.tensors import INDEX
from labkit.models import get_family, read_config


@dataclass(frozen=True)
class Export:
    """What `export` wrote. dropped: tensors of the source that it does not write, with the reason. notes: what differs from the source and why."""

    path: Path
    family: str
    tensors: int
    nbytes: int
    shards: list[str]
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self):
        return "; ".join(
            [f"{self.tensors} tensors, {self.nbytes:,} bytes in {len(self.shards)} file{'s' if len(self.shards) > 1 else ''}, in {self.path}", *self.notes]
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(str(self))}</p>"


def export(ckpt: str | os.PathLike, out: str | os.PathLike, *, progress: Callable[[int, int], None] | None = None) -> Export:
    """Writes a checkpoint of `convert` as a Hugging Face directory at `out`, which appears only when it is complete: weights, index, config, tokenizer.

    Every tensor is bit for bit the source's, unless the conversion narrowed it: then it stays narrow and a note says so. Tied and ignored tensors are not
    written. progress(done, total) in bytes. Raises InputError for a damaged checkpoint and for an `out` that cannot be written or is not empty.
    """
    path, out = Path(ckpt).absolute(), Path(out).absolute()
    metadata = read_metadata(path)
    reader, family = CheckpointReader(path), get_family(metadata["family"])
    config, _ = read_config(family, metadata["config"]["effective"], metadata["config"]["defaults"])
    shapes = abstract_model(family, config).shapes
    placed = placements(config.plan, shapes, metadata["scan"])
    require_same(path, reader, placed)
    tensors = {name: entry for name, entry in metadata["tensors"].items() if name not in metadata["dropped"]}
    expansion = expand(family.rules(config), config.plan, shapes, tensors)
    by_name = {name: assignment for assignment in expansion.assignments for name in assignment.names}
    if by_name.keys() != tensors.keys():
        odd = sorted(by_name.keys() ^ tensors.keys())
        raise InputError(f"The rules of this version of the lab and the checkpoint's tensors differ: {', '.join(odd[:4])}", path, "Convert the model again")
    narrowed = metadata["narrowed"]
    slots = {name: Slot(name, narrowed[name][1] if name in narrowed else entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}
    total = sum(slot.nbytes for slot in slots.values())
    shards = list(dict.fromkeys(entry["shard"] for entry in tensors.values()))
    arrays = _Arrays(reader, placed, by_name, slots, total, progress)
    with atomic_directory(out) as folder:
        ensure_free(folder, total + MARGIN)
        for shard in shards:
            names = [name for name in tensors if tensors[name]["shard"] == shard]
            _write_shard(folder, shard, [slots[name] for name in names], arrays.stream(names))
        if shards != ["model.safetensors"]:
            index = {"metadata": {"total_size": total}, "weight_map": {name: tensors[name]["shard"] for name in sorted(tensors)}}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name in metadata["files"]:
            shutil.copyfile(path / HF_FILES / name, folder / name)
        notes = _notes(metadata, folder)
        sync_tree(folder)
    sync(out.parent)
    dropped = {name: entry["reason"] for name, entry in metadata["dropped"].items()}
    return Export(out, family.name, len(slots), total, shards, dropped, notes)


def _write_shard(folder: Path, shard: str, slots: list[Slot], stream: Iterator[np.ndarray]) -> None:
    """One file of the source's name."""
    room = folder / ".shard"
    room.mkdir()
    (file,) = write_safetensors(room, slots, stream, max_shard_size=1 << 62)
    (folder / shard).parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, folder / shard)
    room.rmdir()


class _Arrays:
    """Tensors of the source from the checkpoint's rows. An assignment is undone once for all the tensors that follow each other in the file."""

    def __init__(self, reader: CheckpointReader, placed: dict[str, Placement], by_name: dict[str, Assignment], slots: dict[str, Slot], total: int, progress):
        self.reader, self.placed, self.by_name, self.slots, self.total, self.progress = reader, placed, by_name, slots, total, progress
        self.done, self._last, self._undone = 0, None, {}

    def stream(self, names: list[str]) -> Iterator[np.ndarray]:
        for name in names:
            yield self._array(name)
            self.done += self.slots[name].nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)

    def _array(self, name: str) -> np.ndarray:
        assignment, dtype = self.by_name[name], DTYPES[self.slots[name].dtype]
        if assignment is not self._last:
            rows = [self.reader.read(*self.placed[t.path].row(t.index)) for t in assignment.targets]
            self._last, self._undone = assignment, assignment.backward(rows, lambda n: self.slots[n].shape)
        array = contiguous(self._undone[name])
        if array.dtype == dtype:
            return array
        result = cast(array, dtype)
        if not exact(array.dtype, dtype) and not np.array_equal(cast(result, array.dtype), array):
            raise InputError(
                f"The checkpoint's {name} holds {array.dtype} values that {NAMES[dtype]}, the source's dtype, lacks: they are not the source's",
                self.reader.folder,
                "Convert the model again; a trained checkpoint is not written back under its source's dtype in silence",
            )
        return result


def _notes(metadata: dict, folder: Path) -> list[str]:
    """Says what is not as in the source; a narrowed checkpoint's config gets the dtype that the files hold."""
    notes = [f"{name} is not written: {entry['reason']}" for name, entry in metadata["dropped"].items()]
    if metadata["narrowed"]:
        (name, (old, new)), count = next(iter(metadata["narrowed"].items())), len(metadata["narrowed"])
        notes.append(f"{count} tensors are {new}, not as in the source (e.g. {name}, {old}): the conversion narrowed them, which cannot be undone")
        raw = json.loads((folder / "config.json").read_text())
        for key in ("dtype", "torch_dtype"):
            if key in raw:
                raw[key] = metadata["dtype"]
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    return notes
