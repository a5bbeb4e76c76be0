"""Measures of agreement. Each refuses or says "infinitely wrong" where it could otherwise pass in silence: other shapes, NaN, an all-zero reference."""

from dataclasses import dataclass

import numpy as np

from labkit.errors import InputError


def relative_error(a, b, where=None) -> float:
    """max|a - b| / max|b| in float64, `b` being the reference.

    where: boolean mask over leading axes, such as [batch, length] for arrays [batch, length, ...]; False entries (padding) are left out. Infinity when a
    value is not finite, or when the reference is all zero and `a` is not. Raises InputError on different shapes, or nothing to compare.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise InputError(f"shapes differ: ours {a.shape}, the reference's {b.shape}")
    a, b = _widen(a), _widen(b)
    if where is not None:
        where = np.asarray(where, bool)
        if where.shape != a.shape[: where.ndim]:
            raise InputError(f"the mask {where.shape} does not fit arrays {a.shape}")
        a, b = a[where], b[where]
    if a.size == 0:
        raise InputError("nothing to compare: every position is padding or the arrays are empty")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    scale, difference = np.abs(b).max(), np.abs(a - b).max()
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / scale)


def error_per_position(a, b) -> np.ndarray:
    """[length]: largest |a - b| at each position over batch and features, over max|b| of the whole array [batch, length, ...]."""
    a, b = _widen(np.asarray(a)), _widen(np.asarray(b))
    axes = (0, *range(2, a.ndim))
    return np.abs(a - b).max(axes) / max(np.abs(b).max(), np.finfo(float).tiny)


def _widen(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def log_softmax(logits) -> np.ndarray:
    """Log-probabilities over the last axis, in float64."""
    wide = np.asarray(logits).astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def kl_per_position(ours, reference, where=None) -> np.ndarray:
    """KL(reference || ours) in nats of logits [..., vocab], in float64: an array [...], or [kept] with a mask `where` [...].

    A position with a value that is not finite counts as infinitely far. Raises InputError on different shapes or nothing to compare.
    """
    ours, reference = np.asarray(ours), np.asarray(reference)
    if ours.shape != reference.shape:
        raise InputError(f"logits have different shapes: ours {ours.shape}, the reference's {reference.shape}")
    if where is not None:
        where = np.asarray(where, bool)
        if where.shape != ours.shape[:-1]:
            raise InputError(f"the mask {where.shape} does not fit logits {ours.shape}")
        ours, reference = ours[where], reference[where]
    if ours.size == 0:
        raise InputError("nothing to compare: no positions")
    finite = np.isfinite(ours.astype(np.float64)).all(-1) & np.isfinite(reference.astype(np.float64)).all(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        p, q = log_softmax(reference), log_softmax(ours)
        # The exponentials of equal inputs cancel exactly; a tiny negative sum is rounding, not information.
        kl = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    return np.where(finite, kl, np.inf)


def top_k_agreement(ours, reference, k: int = 5, where=None) -> float:
    """Share in 0..1 of the reference's k largest entries that are among our k largest, averaged over positions of logits [..., vocab]."""
    ours, reference = np.asarray(ours), np.asarray(reference)
    if ours.shape != reference.shape:
        raise InputError(f"logits have different shapes: ours {ours.shape}, the reference's {reference.shape}")
    if where is not None:
        ours, reference = ours[np.asarray(where, bool)], reference[np.asarray(where, bool)]
    if not 1 <= k <= ours.shape[-1]:
        raise InputError(f"k must lie in 1..{ours.shape[-1]}, not {k}")
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return 0.0
    best = [np.argpartition(-x.astype(np.float64), k - 1, -1)[..., :k].reshape(-1, k) for x in (ours, reference)]
    return float((best[1][:, :, None] == best[0][:, None, :]).any(-1).mean())


def top_2_gap(logits) -> np.ndarray:
    """Difference between the largest and second largest logit over the last axis, [...]."""
    wide = np.asarray(logits).astype(np.float64)
    best = np.partition(wide, -2, -1)[..., -2:]
    return best[..., 1] - best[..., 0]


@dataclass(frozen=True)
class KLSummary:
    """KL over positions: how many, mean, median, 99th percentile, largest, and the share of positions whose first choice agrees."""

    positions: int
    mean: float
    median: float
    p99: float
    max: float
    top_1: float
    top_5: float


def kl_summary(ours, reference, where=None) -> KLSummary:
    """`KLSummary` of logits [..., vocab]; see `kl_per_position`."""
    kl = kl_per_position(ours, reference, where).reshape(-1)
    k = min(5, np.asarray(ours).shape[-1])
    return KLSummary(
        int(kl.size),
        float(kl.mean()),
        float(np.median(kl)),
        float(np.quantile(kl, 0.99, method="higher")),
        float(kl.max()),
        top_k_agreement(ours, reference, 1, where),
        top_k_agreement(ours, reference, k, where),
    )
