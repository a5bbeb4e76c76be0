"""Check 8: on a mesh every weight of some size is spread over an active axis, and the model computes what it computes on one device."""

import jax
import numpy as np

from labkit.converters.filling import state_arrays
from labkit.parity.compare import relative_error
from labkit.parity.conformance.report import Found

LIMIT = 1e-9
ELEMENTS = 256


def check(subject) -> Found:
    """On mesh (1, 2, 2, 1). value: the relative error of the sharded logits against the unsharded ones."""
    found = Found()
    whole, undivided = replicated(subject.sharded_model, subject.placements, subject.mesh)
    found.problems += [f"{what} is on every device whole" for what in whole]
    found.notes += [f"{what} has no dimension that an axis divides" for what in undivided]
    with jax.set_mesh(subject.mesh):
        sharded = np.asarray(subject.forward(subject.tokens, model=subject.sharded_model))
    found.within(relative_error(sharded, np.asarray(subject.forward(subject.tokens))), LIMIT, "the sharded forward against the unsharded one")
    return found


def replicated(model, placements, mesh) -> tuple[list[str], list[str]]:
    """(weights of two or more dimensions and 256 or more elements, layers not counted, that no active axis cuts; those of them that no axis divides)."""
    whole, undivided = [], []
    active = [size for size in mesh.shape.values() if size > 1]
    for path, array in state_arrays(model).items():
        row = placements[path].row_shape
        if len(row) < 2 or np.prod(row) < ELEMENTS or not array.sharding.is_fully_replicated:
            continue
        divides = any(dim % size == 0 for dim in row for size in active)
        (whole if divides else undivided).append(f"{path} {list(array.shape)}")
    return whole, undivided
