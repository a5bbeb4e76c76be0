"""The tensor table of a checkpoint directory, from headers and the index alone, cross-checked."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from labkit.errors import InputError
from labkit.hf.safetensors_io import DOWNLOAD_AGAIN, TensorInfo, read_header, read_tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TO_SAFETENSORS = (
    "Convert the weights on a machine where you trust the file: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors, and then open NEW_DIR"
)


def holds_non_finite(name: str, shape, value: float, index, shard) -> InputError:
    """The refusal of a tensor for its first NaN or infinity, the same words for whoever meets it first."""
    return InputError(
        f"The tensor {name} {tuple(shape)} holds {float(value)} at index {list(index)}",
        f"{shard}, tensor {name}",
        "Download this file again; if it is your own, the training that wrote it diverged",
    )


class TensorTable(Mapping[str, TensorInfo]):
    """Tensor name -> TensorInfo, in the order of the shards. `read(name)` gives the array."""

    def __init__(self, infos: Mapping[str, TensorInfo]):
        self._infos = dict(infos)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._infos.values())

    @property
    def size(self) -> int:
        """The number of values in all tensors."""
        return sum(info.size for info in self._infos.values())

    @property
    def shards(self) -> list[Path]:
        return list(dict.fromkeys(info.shard for info in self._infos.values()))

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only array of its own shape and dtype (ml_dtypes for BF16 and F8). Raises InputError for a name the checkpoint lacks."""
        if name not in self._infos:
            raise InputError(f"The checkpoint has no tensor {name}", self.shards[0].parent if self._infos else "")
        return read_tensor(self._infos[name])


def read_table(directory: str | os.PathLike) -> TensorTable:
    """The table of a Hugging Face checkpoint directory. Raises InputError naming file and tensor when index, shards and headers do not agree."""
    directory = Path(directory)
    on_disk = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("."))
    index = directory / INDEX
    if index.is_file():
        return TensorTable(_read_sharded(directory, index, on_disk))
    if not on_disk:
        _refuse_other_formats(directory)
        raise InputError("The directory has no weights", directory, f"Expected {SINGLE}, or {INDEX} and its shards; download them")
    if len(on_disk) > 1:
        raise InputError(
            f"{len(on_disk)} weight files and no {INDEX}: which tensors belong to the model is unknown",
            ", ".join(map(str, on_disk[:4])),
            "Download the index, or leave one file",
        )
    if on_disk[0].name != SINGLE:
        raise InputError(
            f"The only weight file is {on_disk[0].name}; its index {INDEX} is missing",
            on_disk[0],
            f"Download the index and the other shards, or name the file {SINGLE} if it is complete",
        )
    _check_links(directory, on_disk[0], str(on_disk[0]))
    return TensorTable(read_header(on_disk[0])[0])


def _refuse_other_formats(directory: Path) -> None:
    pickles = sorted(path.name for path in directory.iterdir() if path.name.endswith(PICKLE_SUFFIXES) and path.name != "training_args.bin")
    if pickles:
        raise InputError(
            "The weights are pickle files only, which can run code when they are read; the lab refuses them", directory / pickles[0], TO_SAFETENSORS
        )
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    if ggufs:
        raise InputError("The directory holds GGUF weights", directory / ggufs[0], "Give the path of the .gguf file itself as the model")


def _read_sharded(directory: Path, index: Path, on_disk: list[Path]) -> dict[str, TensorInfo]:
    weight_map = _weight_map(index)
    shards = {name: _inside(directory, index, tensor, name) for tensor, name in weight_map.items()}
    missing = {name: next(tensor for tensor, shard in weight_map.items() if shard == name) for name, path in shards.items() if not path.is_file()}
    if missing:
        name, tensor = next(iter(missing.items()))
        more = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
        raise InputError(
            f"A shard that the index lists is missing{more}: {name}, which should hold {tensor}", f"{directory / name}, tensor {tensor}", "Download this file"
        )
    known = {path.resolve() for path in shards.values()}
    for path in on_disk:
        if path.resolve() not in known:
            tensors = list(read_header(path)[0])
            shown = f"tensor {tensors[0]}" if tensors else "no tensor"
            raise InputError(
                f"A weight file is present and not indexed: {path.name} with {len(tensors)} tensors",
                f"{path}, {shown}",
                f"Add its tensors to {INDEX}, or move the file away",
            )
    infos: dict[str, TensorInfo] = {}
    for name, path in shards.items():
        for tensor, info in read_header(path)[0].items():
            if tensor in infos:
                raise InputError(f"The tensor {tensor} is in two shards", f"{infos[tensor].shard.name} and {name}, tensor {tensor}", DOWNLOAD_AGAIN)
            infos[tensor] = info
    for tensor, name in weight_map.items():
        if tensor not in infos:
            raise InputError(f"The index lists a tensor that no shard holds: {tensor}", f"{index}, tensor {tensor} in {name}", DOWNLOAD_AGAIN)
        if infos[tensor].shard != shards[name]:
            raise InputError(
                f"The index points at the wrong shard: {tensor} is in {infos[tensor].shard.name}, the index says {name}",
                f"{index}, tensor {tensor}",
                DOWNLOAD_AGAIN,
            )
    for tensor, info in infos.items():
        if tensor not in weight_map:
            raise InputError(
                f"A shard holds a tensor that the index does not list: {tensor}",
                f"{info.shard}, tensor {tensor}",
                f"Add it to {INDEX}, or write the shard without it",
            )
    return infos


def _weight_map(index: Path) -> dict[str, str]:
    def no_duplicates(pairs):
        seen = {}
        for key, value in pairs:
            if key in seen:
                raise InputError(f"The index lists {key!r} twice", f"{index}, tensor {key}", DOWNLOAD_AGAIN)
            seen[key] = value
        return seen

    try:
        content = json.loads(index.read_bytes().decode("utf-8"), object_pairs_hook=no_duplicates)
    except OSError as error:
        raise InputError(f"The index cannot be read: {error.strerror}", index) from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"The index is not valid JSON ({error})", index, DOWNLOAD_AGAIN) from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError("The index has no weight_map of tensor names to file names", index, DOWNLOAD_AGAIN)
    return weight_map


def _inside(directory: Path, index: Path, tensor: str, name: str) -> Path:
    """The shard's path. Links inside the directory and the hub cache's own (snapshots -> blobs of one repository) are followed."""
    where = f"{index}, tensor {tensor} in {name!r}"
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not pure.parts or pure.suffix != ".safetensors":
        raise InputError(
            "The index points outside the directory, or at something that is not a safetensors file",
            where,
            "Fix the index by hand; do not open models from a source that you do not trust",
        )
    path = directory / pure
    _check_links(directory, path, where)
    return path


def _check_links(directory: Path, path: Path, where: str) -> None:
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        allowed.append(root.parent.parent / "blobs")
    if path.exists() and not any(path.resolve().is_relative_to(base) for base in allowed):
        raise InputError("A weight file is a link that leaves the directory", where, "Replace the link by the file itself")
