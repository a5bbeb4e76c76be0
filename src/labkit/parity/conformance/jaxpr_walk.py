"""What in a traced program depends on parameters alone, with the sharding that it still has: found in the jaxpr, through every program within it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

DATA = "data"
"""The mark of a value that depends on the call's inputs. None marks constants."""


@dataclass(frozen=True)
class Weights:
    """The mark of a value that depends on parameters alone. paths: which. spec: mesh axes per dimension, each a tuple, while the value is a stored weight but
    for its dtype, its layout or the choice of a layer; None once that is no longer told."""

    paths: frozenset[str]
    spec: tuple[tuple[str, ...], ...] | None


Mark = None | str | Weights
Visit = Callable[[object, list], None]


def equations(jaxpr) -> Iterator:
    """Every equation of a program and of all programs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def inner_programs(equation) -> list:
    """The programs that an equation holds, as open jaxprs."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def walk(jaxpr, marks: Sequence[Mark], visit: Visit) -> list[Mark]:
    """Marks of the outputs from marks of the inputs. visit(equation, marks of its inputs) is called for every equation, innermost programs included, loops
    with the marks that their carry ends up with."""
    known: dict = dict(zip(jaxpr.invars, marks, strict=True))
    look = lambda atom: None if isinstance(atom, Literal) else known.get(atom)
    for equation in jaxpr.eqns:
        inputs = [look(atom) for atom in equation.invars]
        visit(equation, inputs)
        for variable, mark in zip(equation.outvars, _outputs(equation, inputs, visit), strict=True):
            known[variable] = mark
    return [look(atom) for atom in jaxpr.outvars]


def join(marks: Sequence[Mark]) -> Mark:
    """The mark of what is made of several values."""
    marks = [mark for mark in marks if mark is not None]
    if not marks:
        return None
    if any(mark == DATA for mark in marks):
        return DATA
    return marks[0] if all(mark == marks[0] for mark in marks) else Weights(frozenset().union(*(mark.paths for mark in marks)), None)


def _outputs(equation, inputs: list[Mark], visit: Visit) -> list[Mark]:
    name, inner = equation.primitive.name, inner_programs(equation)
    if name == "scan":
        return _scan(equation, inner[0], inputs, visit)
    if name == "while":
        return _while(equation, inputs, visit)
    if name == "cond":
        outcomes = [walk(branch, inputs[1:], visit) for branch in inner]
        return [DATA if inputs[0] == DATA else join(marks) for marks in zip(*outcomes)]
    if name == "shard_map":
        return walk(inner[0], [_unplaced(mark) for mark in inputs], visit)
    if inner:
        fitting = [program for program in inner if len(program.invars) == len(inputs) and len(program.outvars) == len(equation.outvars)]
        if fitting:
            return walk(fitting[0], inputs, visit)
        for program in inner:
            walk(program, [join(inputs)] * len(program.invars), visit)
    marked = [mark for mark in inputs if mark is not None]
    if len(marked) == 1 and isinstance(marked[0], Weights) and len(equation.outvars) == 1:
        return [Weights(marked[0].paths, _carried(equation, inputs.index(marked[0]), marked[0].spec))]
    return [_unplaced(join(inputs))] * len(equation.outvars)


def _unplaced(mark: Mark) -> Mark:
    return Weights(mark.paths, None) if isinstance(mark, Weights) else mark


def _silent(equation, marks) -> None:
    """The visit of a pass that only looks for where a carry settles."""


def _settled(run: Callable[[list[Mark], Visit], list[Mark]], carry: list[Mark]) -> list[Mark]:
    """The carry's marks once another turn adds nothing: marks only ever move towards `DATA`."""
    while True:
        after = [join(pair) for pair in zip(carry, run(carry, _silent), strict=True)]
        if after == carry:
            return carry
        carry = after


def _scan(equation, program, inputs, visit) -> list[Mark]:
    consts, count = equation.params["num_consts"], equation.params["num_carry"]
    each = [Weights(m.paths, None if m.spec is None else m.spec[1:]) if isinstance(m, Weights) else m for m in inputs[consts + count :]]
    run = lambda carry, visit: walk(program, [*inputs[:consts], *carry, *each], visit)
    carry = _settled(lambda carry, visit: run(carry, visit)[:count], inputs[consts : consts + count])
    return [*carry, *(_unplaced(mark) for mark in run(carry, visit)[count:])]


def _while(equation, inputs, visit) -> list[Mark]:
    tests, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    condition, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr
    carry = _settled(lambda carry, visit: walk(body, [*inputs[tests : tests + consts], *carry], visit), inputs[tests + consts :])
    stop = walk(condition, [*inputs[:tests], *carry], visit)[0]
    walk(body, [*inputs[tests : tests + consts], *carry], visit)
    return [DATA if stop == DATA else mark for mark in carry]


def _carried(equation, which: int, spec):
    """The spec of the result of an equation that takes one weight, None where it is not told."""
    if spec is None:
        return None
    name, parameters = equation.primitive.name, equation.params
    before, after = tuple(equation.invars[which].aval.shape), tuple(getattr(equation.outvars[0].aval, "shape", ()))
    if name == "transpose":
        return tuple(spec[dim] for dim in parameters["permutation"])
    if name == "squeeze":
        return tuple(entry for dim, entry in enumerate(spec) if dim not in parameters["dimensions"])
    if name == "broadcast_in_dim":
        placed = dict(zip(parameters["broadcast_dimensions"], spec, strict=True))
        return tuple(placed.get(dim, ()) for dim in range(len(after)))
    if name == "reshape":
        return _reshaped(before, after, spec)
    if name in ("slice", "dynamic_slice") and len(before) == len(after):
        return spec if all(size == kept or not entry for size, kept, entry in zip(before, after, spec)) else None
    return spec if before == after and len(equation.invars) == 1 else None


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], spec):
    """Merged or split dimensions keep the axes of the outermost one; None where an inner dimension was cut."""
    out, i, j = [()] * len(after), 0, 0
    while i < len(before) or j < len(after):
        first, target, left, right = i, j, 1, 1
        while i < len(before) and (left == 1 or left < right):
            left, i = left * before[i], i + 1
        while j < len(after) and (right == 1 or right < left):
            right, j = right * after[j], j + 1
            while left < right and i < len(before):
                left, i = left * before[i], i + 1
        if left != right:
            return None
        axes = [(dim, spec[dim]) for dim in range(first, i) if spec[dim]]
        if axes:
            outer = next(dim for dim in range(first, i) if before[dim] > 1)
            if len(axes) > 1 or axes[0][0] != outer:
                return None
            out[next(dim for dim in range(target, j) if after[dim] > 1)] = axes[0][1]
    return tuple(out)
