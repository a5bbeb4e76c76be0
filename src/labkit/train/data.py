"""Batches of packed sequences in a seeded order: a pure function of the step, so a run goes on where it stopped."""

import dataclasses
import functools
import hashlib

import jax
import numpy as np

HASHED_BLOCKS, HASHED_BLOCK = 1024, 1 << 16


@dataclasses.dataclass(frozen=True)
class PackedData:
    """Rows of `length` predictions. Build it with `PackedData.pack`.

    documents: token arrays. pieces: int64 [pieces, 3], (document, first token, predictions). row_starts: int64 [rows + 1], where each row's pieces begin in
    `pieces`.
    """

    documents: tuple
    pieces: np.ndarray
    row_starts: np.ndarray
    length: int
    batch: int
    seed: int

    @classmethod
    def pack(cls, documents, *, length: int, batch: int, seed: int = 0) -> "PackedData":
        """Documents (arrays of 2 tokens or more) cut into pieces of at most `length` predictions, put one after the other into rows while they fit.

        Every token but a document's first is predicted once an epoch.
        """
        parts = []
        for number, document in enumerate(documents):
            starts = np.arange(0, document.size - 1, length, dtype=np.int64)
            parts.append(np.stack([np.full_like(starts, number), starts, np.minimum(length, document.size - 1 - starts)], 1))
        pieces = np.concatenate(parts)
        row_starts, filled = [0], 0
        for index, predictions in enumerate(pieces[:, 2]):
            if filled and filled + predictions > length:
                row_starts.append(index)
                filled = 0
            filled += predictions
        return cls(tuple(documents), pieces, np.asarray([*row_starts, len(pieces)], np.int64), length, batch, seed)

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of tokens and packing: hex. Of a large array evenly spaced blocks are read."""
        digest = hashlib.sha256(self.pieces.tobytes() + self.row_starts.tobytes())
        for document in self.documents:
            blocks = range(0, document.size, max(HASHED_BLOCK, document.size // HASHED_BLOCKS))
            for start in blocks:
                digest.update(np.asarray(document[start : start + HASHED_BLOCK], np.int64).tobytes())
        return digest.hexdigest()

    def as_dict(self) -> dict:
        """What a resumed run must find again, plain data."""
        return {"fingerprint": self.fingerprint, "rows": self.rows, "length": self.length, "batch": self.batch, "seed": self.seed}

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in their order: int64 [rows]."""
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self._orders[epoch]

    @functools.cached_property
    def _orders(self) -> dict:
        return {}

    def at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of update `step` (from 0): inputs, targets, inputs_segmentation, targets_segmentation, int32 [batch, length].

        Segments count from 1 in each row, 0 is padding. A batch that reaches the end of an epoch goes on into the next one.
        """
        fields = ("inputs", "targets", "inputs_segmentation", "targets_segmentation")
        out = {name: np.zeros((self.batch, self.length), np.int32) for name in fields}
        for place in range(self.batch):
            epoch, index = divmod(step * self.batch + place, self.rows)
            row, filled = self.order(epoch)[index], 0
            for segment, piece in enumerate(range(self.row_starts[row], self.row_starts[row + 1]), 1):
                number, first, predictions = (int(n) for n in self.pieces[piece])
                tokens, span = np.asarray(self.documents[number][first : first + predictions + 1]), slice(filled, filled + predictions)
                out["inputs"][place, span], out["targets"][place, span] = tokens[:-1], tokens[1:]
                out["inputs_segmentation"][place, span] = out["targets_segmentation"][place, span] = segment
                filled += predictions
        return out


def split_batch(batch: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    """[sequences, length] -> [parts, sequences / parts, length]."""
    return {name: array.reshape(parts, -1, *array.shape[1:]) for name, array in batch.items()}


def place_batch(batch: dict[str, np.ndarray], shardings: dict) -> dict[str, jax.Array]:
    """The batch on the mesh. Every process makes the same whole batch and places what its own devices hold."""
    return {name: jax.make_array_from_callback(array.shape, shardings[name], lambda index, array=array: array[index]) for name, array in batch.items()}
