"""The training loss and every gradient against the reference's, parameter by parameter: a gradient goes through the rule table as the weight does."""

from dataclasses import dataclass

import numpy as np

from labkit.converters.filling import abstract_model
from labkit.converters.loading import assignments_by_path, fit, write_row
from labkit.hf.gradients import NOT_COUNTED, LossAndGradients
from labkit.parity.compare import relative_error

NEGLIGIBLE = 1e-12
"""A gradient below this share of the model's largest is zero but for rounding."""


@dataclass(frozen=True)
class GradientTable:
    """errors: parameter path -> relative error of its gradient (of those that are zero but for rounding: relative to the model's largest gradient).

    loss, aux_loss: relative errors; aux_loss is None where neither side has one. zero: paths whose gradient is zero on both sides but for rounding.
    """

    loss: float
    aux_loss: float | None
    errors: dict[str, float]
    zero: tuple[str, ...]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error of all, and of what."""
        entries = [(self.loss, "loss")] + ([(self.aux_loss, "aux loss")] if self.aux_loss is not None else [])
        return max([*entries, *((error, path) for path, error in self.errors.items())])


def labels_of(tokens, mask=None) -> np.ndarray:
    """Labels for the reference: the tokens themselves, -100 in padding and at the first real token of a row, which padding would have to predict."""
    labels = np.array(tokens)
    if mask is not None:
        labels[(np.asarray(mask) == 0) | (np.asarray(mask) != 0) & (np.roll(mask, 1, 1) == 0) & (np.arange(labels.shape[1]) > 0)] = NOT_COUNTED
    return labels


def batch_of(tokens, mask=None) -> dict[str, np.ndarray]:
    """The same batch for ours: each position predicts the next one; the last of a row, and padding, predict nothing.

    tokens: int [batch, length]; mask: int of the same shape, 0 in left padding. Arrays are int32: inputs, targets, inputs_segmentation, targets_segmentation.
    """
    tokens = np.asarray(tokens, np.int32)
    real = np.ones_like(tokens) if mask is None else np.asarray(mask, np.int32)
    counted = real.copy()
    counted[:, -1] = 0
    return {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "inputs_segmentation": real, "targets_segmentation": counted}


def through_rules(source, family, config, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reference's gradients [tensor name on disk -> array] as those of our parameters: path -> float64 array.

    A parameter made from a tensor without a gradient (a buffer) is left out. Every step of a rule moves elements and computes nothing, so what carries a
    weight carries its gradient.
    """
    abstract = abstract_model(family, config)
    report = fit(source, family, config, abstract)
    report.require(source.path)
    out = {}
    for path, assignments in assignments_by_path(report.expansion).items():
        names = {name for assignment, _, _ in assignments for name in assignment.names}
        if not names <= gradients.keys():
            continue
        array = np.full(abstract.shapes[path], np.nan)
        for assignment, which, index in assignments:
            write_row(array, index, assignment.forward(gradients.__getitem__)[which])
        out[path] = array
    return out


def compare_gradients(
    ours: dict[str, np.ndarray], loss: float, aux_loss: float | None, mapped: dict[str, np.ndarray], wanted: LossAndGradients
) -> GradientTable:
    """Ours [path -> array] against the reference's, mapped by `through_rules`. A path that one side lacks is infinitely wrong; so is a one-sided aux loss."""
    scalar = lambda a, b: relative_error(np.asarray([a]), np.asarray([b]))
    aux = None
    if aux_loss is not None or wanted.aux_loss is not None:
        aux = float("inf") if aux_loss is None or wanted.aux_loss is None else scalar(aux_loss, wanted.aux_loss)
    largest = max((float(np.abs(g).max()) for g in mapped.values()), default=0.0)
    errors, zero = {}, []
    for path in sorted(ours.keys() | mapped.keys()):
        if path not in ours or path not in mapped:
            errors[path] = float("inf")
            continue
        a, b = np.asarray(ours[path], np.float64), mapped[path]
        if np.abs(b).max() <= NEGLIGIBLE * largest:
            zero.append(path)
            errors[path] = float(np.abs(a - b).max() / largest) if largest else float(np.abs(a).max() > 0)
        else:
            errors[path] = relative_error(a, b)
    return GradientTable(scalar(loss, wanted.loss), aux, errors, tuple(zero))
