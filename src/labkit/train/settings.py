"""What a training run is told, checked before anything is loaded."""

import dataclasses
import math
from typing import ClassVar

from labkit.errors import InputError
from labkit.layers.stack import REMAT_POLICIES


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """steps: updates of the run; the learning rate's schedule spans them. batch: sequences per update, over all devices and all of `accumulate` parts.

    length: tokens per sequence. accumulate: parts of a batch that run one after the other, the update being that of the whole batch. learning_rate: the peak,
    after `warmup` updates; a cosine then falls to `final_fraction` of it. weight_decay acts on matrices only. clip: largest global norm of the gradients, None
    for none. seed: of the data's order. scan: layers run by a scan. remat: what layers keep for the backward pass; products of matrices unless told otherwise,
    a third of the memory, and on CPU the rest takes less time to compute again than to write and read back. checkpoint_every: updates between checkpoints (the
    last one is always kept), keep: how many stay.
    """

    steps: int
    batch: int = 8
    length: int = 256
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup: int = 0
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    clip: float | None = 1.0
    seed: int = 0
    scan: bool = True
    remat: str | None = "dots"
    checkpoint_every: int = 100
    keep: int = 2

    FREE: ClassVar[tuple[str, ...]] = ("scan", "remat", "checkpoint_every", "keep")
    """Settings that a resumed run may change: they leave the mathematics as it is."""

    def check(self) -> "TrainSettings":
        """The settings themselves. Raises InputError that names the first one that cannot be."""
        for name in ("steps", "batch", "length", "accumulate", "checkpoint_every", "keep"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("batch", self.batch % self.accumulate == 0, f"a multiple of accumulate, which is {self.accumulate}")
        self._require("warmup", 0 <= self.warmup <= self.steps, f"between 0 and steps, which is {self.steps}")
        self._require("learning_rate", math.isfinite(self.learning_rate) and self.learning_rate > 0, "a number above 0")
        self._require("weight_decay", math.isfinite(self.weight_decay) and self.weight_decay >= 0, "0 or more")
        self._require("final_fraction", 0 <= self.final_fraction <= 1, "between 0 and 1")
        self._require("clip", self.clip is None or (math.isfinite(self.clip) and self.clip > 0), "a number above 0, or none")
        self._require("seed", self.seed >= 0, "0 or more")
        for name in ("beta_1", "beta_2"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("epsilon", self.epsilon > 0, "above 0")
        self._require("remat", self.remat is None or self.remat in REMAT_POLICIES, f"one of {', '.join(REMAT_POLICIES)}, or none")
        return self

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise InputError(f"{name} is {getattr(self, name)} and must be {wanted}", f"training setting {name}", "change it")

    def as_dict(self) -> dict:
        """The settings that decide the result, by name; plain data."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.FREE}
