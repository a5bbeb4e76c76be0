"""How often each instruction of a compiled program runs, and which of the program's inputs its values come from."""

import dataclasses
import functools
import operator
import re

from labkit.scale.hlo import Array, Computation, Instruction, Module, Shape

MOST_STEPS = 1_000_000
"""A loop that counts further than this has no trip count that is worth finding by counting."""

EXPECTED = re.compile(r"about_(\d+)_times")
"""The name scope (`jax.named_scope`) by which model code says how often a loop runs whose length depends on data, at balanced load for example."""

_ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}
_SAME = {"copy", "convert", "bitcast", "reshape", "opt-barrier", "copy-done", "broadcast"}


class Scalars:
    """What a computation makes of known integers: exact where everything that a value depends on is known, None elsewhere."""

    def __init__(self, module: Module):
        self.module = module

    def value(self, computation: Computation, instruction: Instruction, arguments: dict, known: dict):
        """An int, a bool, a tuple of such, or None. arguments: parameter index -> value; known: memo of this evaluation."""
        if instruction.name not in known:
            known[instruction.name] = None
            known[instruction.name] = self._value(computation, instruction, arguments, known)
        return known[instruction.name]

    def _value(self, computation, instruction, arguments, known):
        opcode = instruction.opcode
        operand = lambda index: self.value(computation, computation.by_name[instruction.operands[index]], arguments, known)
        if opcode == "parameter":
            return arguments.get(int(instruction.arguments))
        if opcode == "constant":
            return _constant(instruction)
        if opcode == "get-tuple-element":
            whole = operand(0)
            return whole[int(instruction.attribute("index"))] if isinstance(whole, tuple) else None
        if opcode == "tuple":
            return tuple(operand(index) for index in range(len(instruction.operands)))
        if opcode in ("fusion", "call"):
            called = self.module.computations[(instruction.called.get("calls") or instruction.called["to_apply"])[0]]
            return self.value(called, called.root, {index: operand(index) for index in range(len(instruction.operands))}, {})
        if opcode in _SAME and instruction.operands:
            return operand(0)
        if opcode == "copy-start":
            return operand(0)
        values = [operand(index) for index in range(len(instruction.operands))] if opcode in (*_ARITHMETIC, "compare", "not", "select") else [None]
        if any(not isinstance(value, int) for value in values):
            return None
        if opcode == "compare":
            return _COMPARE[instruction.attribute("direction")](*values)
        if opcode == "not":
            return not values[0]
        if opcode == "select":
            return values[1] if values[0] else values[2]
        return _ARITHMETIC[opcode](*values)

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a while loop's body runs, found by counting; None when it depends on data."""
        state = self.value(computation, computation.by_name[loop.operands[0]], {}, {})
        if not isinstance(state, tuple):
            return None
        condition, body = (self.module.computations[loop.called[role][0]] for role in ("condition", "body"))
        for step in range(MOST_STEPS):
            goes_on = self.value(condition, condition.root, {0: state}, {})
            if goes_on is None:
                return None
            if not goes_on:
                return step
            state = self.value(body, body.root, {0: state}, {})
            if not isinstance(state, tuple):
                return None
        return None


def _constant(instruction: Instruction):
    if not isinstance(instruction.shape, Array) or instruction.shape.size != 1:
        return None
    text = instruction.arguments.strip(" {}")
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True)
class Executions:
    """How a program runs. times: computation -> how often it runs in one call. unknown: loops whose count depends on data, and how often they are counted:
    as `EXPECTED` tells, else once. loops: body -> trip count. contexts: computation -> the entry or loop body that it runs in. callers: computation -> the
    first instruction that runs it. backward: bodies of loops that compute gradients."""

    times: dict[str, int]
    unknown: tuple[tuple[str, int], ...]
    loops: dict[str, int]
    contexts: dict[str, str]
    callers: dict[str, Instruction]
    backward: frozenset[str] = frozenset()

    def op_name(self, computation: Computation, instruction: Instruction) -> str:
        """An instruction's op name; where the compiler left it out, that of the fusion around it, or of the first operand that has one."""
        if instruction.op_name:
            return instruction.op_name
        caller = self.callers.get(computation.name)
        if caller is not None and caller.opcode != "while" and caller.op_name:
            return caller.op_name
        return next(_operand_names(computation, instruction), "")

    def part(self, computation: Computation, instruction: Instruction) -> str:
        """ "forward", "backward" or "recomputed": which part of a training step an instruction belongs to. Where its op name is the compiler's own, the loop
        that it runs in tells; a kernel's first operand that the program named tells more: what is recomputed runs in a loop of the backward pass."""
        name = self.op_name(computation, instruction)
        if "jit(" not in name and instruction.opcode == "custom-call":
            name = next((found for found in _operand_names(computation, instruction) if "jit(" in found), name)
        if "rematted_computation" in name:
            return "recomputed"
        if "transpose(" in name or ("jit(" not in name and self.contexts.get(computation.name) in self.backward):
            return "backward"
        return "forward"


def _operand_names(computation: Computation, instruction: Instruction):
    """Op names of what an instruction is made from, nearest first; parameters have none."""
    pending, seen = list(instruction.operands), set()
    while pending:
        name = pending.pop(0)
        operand = computation.by_name.get(name)
        if operand is None or name in seen:
            continue
        seen.add(name)
        if operand.op_name and operand.opcode != "parameter":
            yield operand.op_name
            if "jit(" in operand.op_name:
                continue
        pending += operand.operands


def count_executions(module: Module) -> Executions:
    """Every computation that runs as part of the program. Branches of a conditional are each counted as if taken."""
    found = Executions({}, (), {}, {}, {})
    unknown = []
    scalars = Scalars(module)

    def visit(computation: Computation, count: int, context: str) -> None:
        found.times[computation.name] = found.times.get(computation.name, 0) + count
        found.contexts.setdefault(computation.name, context)
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                trips, body = scalars.trip_count(computation, instruction), instruction.called["body"][0]
                if trips is None:
                    told = EXPECTED.search(instruction.op_name)
                    trips = int(told[1]) if told else 1
                    unknown.append((instruction.op_name or instruction.name, trips))
                found.loops[body] = trips
                found.callers.setdefault(body, instruction)
                visit(module.computations[body], count * found.loops[body], body)
            else:
                for name in subprograms(instruction):
                    found.callers.setdefault(name, instruction)
                    visit(module.computations[name], count, context)

    visit(module.entry, 1, module.entry.name)
    votes: dict[str, int] = {}
    for name in found.times:
        for instruction in module.computations[name].instructions:
            if instruction.op_name and instruction.opcode not in ("constant", "parameter"):
                context = found.contexts[name]
                votes[context] = votes.get(context, 0) + (1 if "transpose(" in instruction.op_name else -1)
    backward = {context for context, vote in votes.items() if vote > 0}
    return dataclasses.replace(found, unknown=tuple(dict.fromkeys(unknown)), backward=frozenset(backward - {module.entry.name}))


def subprograms(instruction: Instruction) -> list[str]:
    """Computations that an instruction runs once each: fusions, calls, branches; the scalar functions of reductions and sorts are not among them."""
    if instruction.opcode == "while":
        return []
    roles = ("calls", "branch_computations", "true_computation", "false_computation", "called_computations")
    roles += ("to_apply",) if instruction.opcode == "call" else ()
    return [name for role in roles for name in instruction.called.get(role, ())]


class Origins:
    """Which entry parameters a value is made of: a bit set per array, tuples of them for tuples.

    Everything that an instruction reads counts, the indices of a gather included; constants, loop counters and device numbers come from nothing.
    `of[instruction]` holds, after construction, the union over all places where it runs.
    """

    def __init__(self, module: Module):
        self.module = module
        self.of: dict[Instruction, object] = {}
        self._made: dict[tuple, object] = {}
        arguments = {index: _fill(parameter.shape, 1 << index) for index, parameter in module.entry.parameters.items()}
        self._run(module.entry, tuple(arguments[index] for index in sorted(arguments)))

    def _run(self, computation: Computation, arguments: tuple):
        key = (computation.name, arguments)
        if key not in self._made:
            values: dict[str, object] = {}
            for instruction in computation.instructions:
                value = self._value(instruction, arguments, [values[name] for name in instruction.operands if name in values])
                values[instruction.name] = value
                self.of[instruction] = _join(self.of[instruction], value) if instruction in self.of else value
            self._made[key] = values[computation.root.name]
        return self._made[key]

    def _value(self, instruction: Instruction, arguments: tuple, operands: list):
        opcode = instruction.opcode
        if opcode == "parameter":
            return arguments[int(instruction.arguments)]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return operands[0][int(instruction.attribute("index"))]
        if opcode == "while":
            body, state = self.module.computations[instruction.called["body"][0]], operands[0]
            while (after := _join(state, self._run(body, (state,)))) != state:
                state = after
            return state
        if opcode in ("fusion", "call", "async-start"):
            called = self.module.computations[(instruction.called.get("calls") or instruction.called.get("to_apply"))[0]]
            made = self._run(called, tuple(operands))
            return made if opcode != "async-start" else _fill(instruction.shape, _union(made))
        if opcode == "conditional":
            names = subprograms(instruction)
            return functools.reduce(_join, [self._run(self.module.computations[name], (operand,)) for name, operand in zip(names, operands[1:])])
        if opcode in ("opt-barrier", "copy", "bitcast") and len(operands) == 1:
            return operands[0]
        if opcode == "add-dependency":
            return operands[0]
        return _fill(instruction.shape, functools.reduce(operator.or_, map(_union, operands), 0))

    def entry_parameters(self, instruction: Instruction) -> set[int]:
        """Indices of the entry parameters that any part of an instruction's value is made of; empty when it never runs."""
        mask = _union(self.of.get(instruction, 0))
        return {index for index in range(mask.bit_length()) if mask >> index & 1}


def _fill(shape: Shape, mask: int):
    return mask if isinstance(shape, Array) else tuple(_fill(part, mask) for part in shape)


def _union(value) -> int:
    return value if isinstance(value, int) else functools.reduce(operator.or_, map(_union, value), 0)


def _join(a, b):
    if isinstance(a, int) and isinstance(b, int):
        return a | b
    if isinstance(a, int) or isinstance(b, int):
        return _union(a) | _union(b)
    return tuple(map(_join, a, b))
