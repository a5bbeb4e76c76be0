"""A decoding step whose products of one row with a weight go through `row_product`: the step's own program, with those products replaced.

It works on the traced program and so on any model: a weight is followed from the arguments through casts, transposes, and the stacking and slicing of layers to
the products that take it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from labkit.parity.row_product import row_times


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A value that is argument `index`: as it came, or transposed; with a leading axis of one where `lead`."""

    index: int
    transposed: bool = False
    lead: bool = False


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Weights joined along a leading axis."""

    members: tuple[_Weight, ...]


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """How an argument is kept for decoding: its dtype, and whether as its transpose, [out, in]."""

    dtype: str
    transposed: bool

    def store(self, weight):
        """float32 [...] -> the array that is kept."""
        return (weight.T if self.transposed else weight).astype(self.dtype)


class RowProducts:
    """`step(weights, *arguments)` over a flat list of float32 weights, traced once: which weights meet single rows, and the step that multiplies them so.

    Products of anything else, and weights that no product takes, stay as they are.
    """

    def __init__(self, step: Callable, weights: Sequence, *arguments):
        """weights, arguments: arrays or their shapes; trees of them for arguments."""
        self.step = step
        self.shapes = [jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in weights]
        walk = _Walk(self._trace(arguments)[0], len(self.shapes), None)
        walk.run([None] * len(walk.closed.jaxpr.invars))
        self.uses = walk.uses
        self.stored = [self._how(weight, walk.uses.get(index, set())) for index, weight in enumerate(weights)]

    @property
    def replaces(self) -> bool:
        """Whether some product is replaced at all."""
        return any(stored is not None for stored in self.stored)

    def store(self, weights: Sequence) -> list:
        """The weights as `__call__` takes them. A weight that products take and that bfloat16 holds exactly is kept as bfloat16."""
        return [weight if stored is None else stored.store(weight) for weight, stored in zip(weights, self.stored)]

    def __call__(self, stored: Sequence, *arguments):
        """The step's result, from weights as `store` gives them."""
        closed, form = self._trace(arguments)
        walk = _Walk(closed, len(self.shapes), list(zip(stored, self.stored)))
        return jax.tree.unflatten(form, walk.run([None] * len(self.shapes) + jax.tree.leaves(arguments)))

    def _trace(self, arguments):
        """The step's program for such arguments, and the tree of its result."""
        closed, shape = jax.make_jaxpr(self.step, return_shape=True)(self.shapes, *arguments)
        return closed, jax.tree.structure(shape)

    @staticmethod
    def _how(weight, uses: set) -> StoredWeight | None:
        if not uses or weight.dtype != jnp.float32:
            return None
        narrow = isinstance(weight, jax.Array) and bool(jnp.all(weight.astype(jnp.bfloat16).astype(weight.dtype) == weight))
        return StoredWeight("bfloat16" if narrow else "float32", transposed=uses == {0})


class _Walk:
    """One pass over a traced step. Without values it only notes `uses`: argument -> the axes of it that products sum over."""

    def __init__(self, closed: ClosedJaxpr, count: int, stored: list | None):
        self.closed, self.count, self.stored = closed, count, stored
        self.uses: dict[int, set[int]] = {}

    def run(self, values: list) -> list:
        origins = [_Weight(index) if index < self.count else None for index in range(len(values))]
        if self.stored is not None:
            values = [self._whole(index) if index < self.count else value for index, value in enumerate(values)]
        return [value for value, _ in self._inline(self.closed, list(zip(values, origins)))]

    def _inline(self, closed: ClosedJaxpr, inputs: list) -> list:
        """Values and origins of a program's results, from those of its inputs."""
        jaxpr, known = closed.jaxpr, {}
        read = lambda atom: (atom.val, None) if isinstance(atom, Literal) else known[atom]
        known.update(zip(jaxpr.constvars, ((value, None) for value in closed.consts)))
        known.update(zip(jaxpr.invars, inputs))
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name == "jit":
                known.update(zip(eqn.outvars, self._inline(eqn.params["jaxpr"], operands)))
                continue
            origin = _follow(eqn, [origin for _, origin in operands])
            results = self._narrow(eqn, operands)
            if results is None:
                results = self._bind(eqn, [value for value, _ in operands])
            known.update(zip(eqn.outvars, ((result, origin) for result in results)))
        return [read(atom) for atom in jaxpr.outvars]

    def _bind(self, eqn, values) -> list:
        if self.stored is None:
            return [None] * len(eqn.outvars)
        params = eqn.primitive.get_bind_params(eqn.params)
        out = eqn.primitive.bind(*values, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    def _narrow(self, eqn, operands) -> list | None:
        """The result of an operation that is done with the weight as it is kept: a product of one row, or rows looked up in a table."""
        if eqn.primitive.name == "dot_general":
            return self._product(eqn, operands)
        origin = operands[0][1] if operands else None
        if eqn.primitive.name != "gather" or not isinstance(origin, _Weight) or origin.lead or origin.transposed or self.stored is None:
            return None
        kept, how = self.stored[origin.index]
        if how is None or how.transposed:
            return None
        found = self._bind(eqn, [kept, *(value for value, _ in operands[1:])])
        return [found[0].astype(eqn.outvars[0].aval.dtype)]

    def _product(self, eqn, operands) -> list | None:
        (contracted, batched), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
        for side in (1, 0):
            weight, row = operands[side][1], eqn.invars[1 - side].aval
            if not isinstance(weight, _Weight) or weight.lead or batched[0] or len(contracted[0]) != 1 or eqn.invars[side].aval.ndim != 2:
                continue
            width = row.shape[contracted[1 - side][0]]
            if math.prod(row.shape) != width or row.dtype != jnp.float32 or out.dtype != jnp.float32 or eqn.invars[side].aval.dtype != jnp.float32:
                continue
            axis = contracted[side][0]
            self.uses.setdefault(weight.index, set()).add(1 - axis if weight.transposed else axis)
            if self.stored is None:
                return [None]
            kept, how = self.stored[weight.index]
            if how is None:
                return None
            # The kept array [a, b]: as the argument lies, or its transpose. The product needs it by output.
            sums_last = (1 - axis if weight.transposed else axis) == (0 if how.transposed else 1)
            return [row_times(operands[1 - side][0].reshape(-1), kept if sums_last else kept.T).reshape(out.shape)]
        return None

    def _whole(self, index: int):
        kept, how = self.stored[index]
        return kept if how is None else (kept.astype(jnp.float32).T if how.transposed else kept.astype(jnp.float32))


def _follow(eqn, origins: list):
    """What weight the only result of an operation is, if it is one still."""
    name, params, first = eqn.primitive.name, eqn.params, origins[0] if origins else None
    if name == "stack" and params["axis"] == 0 and all(isinstance(origin, _Weight) and not origin.lead for origin in origins):
        members = tuple(dataclasses.replace(origin, lead=True) for origin in origins)
        return _Stack(members) if len(members) > 1 else members[0]
    if name == "slice" and isinstance(first, _Stack):
        shape, start, stop = eqn.invars[0].aval.shape, params["start_indices"], params["limit_indices"]
        one_layer = stop[0] - start[0] == 1 and not any(start[1:]) and tuple(stop[1:]) == tuple(shape[1:]) and params["strides"] is None
        return first.members[start[0]] if one_layer and shape[0] == len(first.members) else None
    if not isinstance(first, _Weight):
        return None
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "convert_element_type":
        return first if before.dtype == after.dtype else None
    if name == "copy" or (name == "reshape" and before.shape == after.shape):
        return first
    if name in ("squeeze", "reshape") and first.lead and after.shape == before.shape[1:]:
        return dataclasses.replace(first, lead=False)
    if name == "transpose" and not first.lead and tuple(np.asarray(params["permutation"])) == (1, 0):
        return dataclasses.replace(first, transposed=not first.transposed)
    return None
