"""Floating-point operations of a training step, from shapes. One multiply-add counts as two; backward counts as twice forward."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TrainingFlops:
    """Tera-operations of one training step on one device: products with weights, attention products, and their sum."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __str__(self):
        return f"{self.total:.3f} TFLOP per step and device: {self.weights:.3f} in products with weights, {self.attention:.3f} in attention"


def visible_pairs(length: int, window: int | None = None) -> int:
    """Query-key pairs under a causal mask of `length` tokens, with or without a sliding window."""
    reach = np.minimum(np.arange(length) + 1, length if window is None else window)
    return int(reach.sum())


def training_flops(*, tokens: int, sequences: int, active_parameters: int, pairs: int, heads: int, head_dim: int) -> TrainingFlops:
    """tokens: per step and device. sequences: how many. active_parameters: weights each token is multiplied with, head included. pairs: query-key pairs of one
    sequence summed over layers; heads and head_dim: of one layer."""
    return TrainingFlops(weights=6 * tokens * active_parameters / 1e12, attention=12 * sequences * pairs * heads * head_dim / 1e12)
