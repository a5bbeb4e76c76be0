"""Where our bfloat16 rounds more than the reference's: every part on the reference's own bfloat16 inputs, against the same part in float32.

A missing upcast (a norm or a softmax computed in bfloat16) is invisible in float64 and float32, and the KL of bfloat16 logits drowns it: what a part loses is
small beside what all parts lose together. Isolated it shows: a right part rounds where the reference rounds and mostly gives the same bits.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from labkit.errors import GateError
from labkit.parity.capture import capture
from labkit.parity.components import KINDS, Fault, cite_ours, cite_reference, comparable, input_kind, kind_of

RATIO_LIMIT = 1.08
"""Root mean square error against float32, ours over the reference's. Right ports of 45 families gave at most 1.03, a missing upcast 1.13 and more."""
SAME_BITS = 0.02
"""Share of values with other bits than the reference's below which errors are not compared: few values make a ratio of chance."""


@dataclass(frozen=True)
class Rounding:
    """One part, over all layers. place: its captured name, layers as `*`; kind: its component; unequal: share of values whose bits differ from the reference's;
    ours, theirs: root mean square errors against float32; reference, cited: file:line on both sides."""

    place: str
    kind: str
    unequal: float
    ours: float
    theirs: float
    reference: str
    cited: str

    @property
    def ratio(self) -> float:
        """Our error over the reference's; 1 where the bits are the reference's."""
        if self.unequal <= SAME_BITS:
            return 1.0
        return self.ours / self.theirs if self.theirs else math.inf

    @property
    def passed(self) -> bool:
        return self.ratio <= RATIO_LIMIT

    def as_dict(self) -> dict:
        """Plain data."""
        return asdict(self) | {"ratio": self.ratio, "passed": self.passed}


def compare_rounding(model, wide_model, reference, tokens) -> list[Rounding]:
    """Every recorded part in the reference's order of execution, then what the code between modules hands to each. A router's weights are left out: they follow
    its choice, which a rounding of its logits may change.

    model, wide_model: ours in bfloat16 and in float32; of the latter only the dtypes count, the weights are the former's. reference: a `Reference` in bfloat16.
    tokens: int [batch, length]. Raises GateError when the reference runs in another dtype, or when nothing can be compared.
    """
    if reference.mode != "bfloat16":
        raise GateError(f"rounding is compared with a reference in bfloat16, not {reference.mode}")
    graphdef, state = nnx.split(wide_model)
    # The weights that bfloat16 keeps, in both: what the checkpoint stores beyond them is no error of the code.
    wide, form = jax.tree.flatten(state)
    kept = [narrow.astype(leaf.dtype) for leaf, narrow in zip(wide, jax.tree.leaves(nnx.state(model)), strict=True)]
    wide_model = nnx.merge(graphdef, jax.tree.unflatten(form, kept))
    theirs = reference.capture(tokens)
    ours = capture(model, tokens, inject=theirs)
    with jax.default_matmul_precision("highest"):
        exact = capture(wide_model, tokens, inject=theirs)
    made = {name: value for name, value in theirs.outputs.items() if not name.endswith(".weights")}
    handed = {name: value for name, value in theirs.inputs.items() if comparable(name, theirs.classes)}
    parts: dict[tuple[str, str], list] = {}
    for what, wanted, a, exactly in (("output", made, ours, exact), ("input", handed, ours.inputs, exact.inputs)):
        for name, value in wanted.items():
            if np.issubdtype(value.dtype, np.floating) and all(name in side and side[name].size == value.size for side in (a, exactly)):
                rows = parts.setdefault((re.sub(r"\.\d+(?=\.|$|#)", ".*", name), what), [])
                bias = theirs.biases.get(name.split("#")[0]) if what == "output" else None
                rows.append((name, *(_flat(side[name]) for side in (a, wanted, exactly)), bias))
    if not parts:
        raise GateError("no part of the model can be compared in bfloat16", type(model).__name__, "this is a fault of the lab's recorder")
    return [_rounding(place, what, rows, ours, theirs) for (place, what), rows in parts.items()]


def worst(found: Sequence[Rounding]) -> Rounding:
    """The part that rounds most beyond the reference."""
    return max(found, key=lambda part: part.ratio)


def by_kind(found: Sequence[Rounding]) -> list[tuple[str, int, Rounding, Rounding]]:
    """(component, parts, the worst by ratio, the one with most other bits) of each component there is."""
    rows = [(kind, [part for part in found if part.kind == kind]) for kind in KINDS]
    return [(kind, len(own), worst(own), max(own, key=lambda part: part.unequal)) for kind, own in rows if own]


def _rounding(place: str, what: str, rows, ours, theirs) -> Rounding:
    kind = (kind_of if what == "output" else input_kind)(rows[0][0], theirs.classes)
    count = max(sum(row[1].size for row in rows), 1)
    unequal = sum(np.count_nonzero(row[1] != row[2]) for row in rows) / count
    error = lambda rounded: math.sqrt(sum(float(np.square(values - row[3]).sum()) for row, values in zip(rows, rounded)) / count)
    errors = [error([row[1] for row in rows]), error([row[2] for row in rows])]
    if rows[0][4] is not None:
        errors[1] = max(errors[1], error([_bias_added_late(row[3], row[4]) for row in rows]))
    farthest = max(rows, key=lambda row: float(np.square(row[1] - row[3]).sum()))[0]
    fault = Fault(farthest, what, kind, errors[0])
    return Rounding(place + (" (input)" if what == "input" else ""), kind, float(unequal), *errors, cite_reference(fault, theirs), str(cite_ours(fault, ours)))


def _bias_added_late(exact: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """exact [rows * features], a product and its bias [features], with the product rounded to bfloat16 before the bias is added. torch's kernel rounds once, at
    the end; a product that is summed over devices is sent rounded."""
    if exact.size % bias.size:
        return exact
    narrow = lambda values: values.astype(ml_dtypes.bfloat16).astype(np.float64)
    wide = bias.astype(np.float64)
    return narrow(narrow(exact.reshape(-1, bias.size) - wide) + wide).reshape(-1)


def _flat(values) -> np.ndarray:
    return np.asarray(values).astype(np.float64).reshape(-1)
