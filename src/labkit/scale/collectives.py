"""The collectives of a compiled program: what each moves between devices, how much, how often, and why.

What is moved is judged by where the operand's values come from, not by the operation: weights that arrive by a chain of collective-permutes are an
all-gather all the same, and an all-reduce may carry activations or gradients.
"""

import dataclasses
import re

import numpy as np

from labkit.scale.hlo import Computation, Instruction, Module, leaves
from labkit.scale.hlo_cost import COLLECTIVES
from labkit.scale.hlo_flow import Executions, Origins

EXPLICIT = ("all_gather", "psum_scatter", "reduce_scatter", "psum", "psum_invariant", "all_to_all", "ppermute", "ragged_all_to_all")
"""Last parts of op names of collectives that the model's own code asked for."""

BATCH_AXES = frozenset({"data", "fsdp", "expert"})
"""Mesh axes that a batch is cut over: a sum over one of them, in the backward pass, adds up gradients of weights."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What an entry parameter of the program is. kind: "weight", "cache", "optimizer", "input" or "constant"; name: its path."""

    kind: str
    name: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    kind: as the compiler names it. moves: "weights", "gradients", "activations", "cache", "optimizer" or "indices". names: the weights that are moved.
    part: "forward", "backward" or "recomputed". axes: mesh axes that the groups span, None where the text does not tell. shape: operand of one device.
    bytes: what one device receives in one execution. times: executions per call. explicit: asked for by the model's code. source: op name.
    """

    kind: str
    moves: str
    names: tuple[str, ...]
    part: str
    axes: tuple[str, ...] | None
    group: tuple[int, ...]
    shape: str
    bytes: int
    times: int
    explicit: bool
    source: str

    @property
    def total(self) -> int:
        return self.bytes * self.times

    @property
    def moves_experts(self) -> bool:
        return self.moves == "weights" and any(is_expert(name) for name in self.names)


def is_expert(name: str) -> bool:
    """Whether a parameter's path leads through a module called `experts`."""
    return "experts" in name.split(".")


def find_collectives(module: Module, executions: Executions, origins: Origins, roles: list[Role], mesh_shape: dict[str, int]) -> list[Collective]:
    """All collectives, largest first. roles: by index of entry parameter. mesh_shape: axis -> size, in the order that numbers the devices.

    The compiler splits a collective that runs beside computation into several instructions of one channel, a chain that may reach into inner loops: it counts
    as often as its rarest link.
    """
    shards = {size for i, p in module.entry.parameters.items() if roles[i].kind == "weight" for size in _shard_sizes(leaves(p.shape)[0])}
    found: dict[tuple, Collective] = {}
    for name, times in executions.times.items():
        computation = module.computations[name]
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            channel = instruction.attribute("channel_id")
            chained = "chain_id=" in instruction.attributes
            key = (None if chained else executions.contexts[name], channel) if channel else (name, instruction.name)
            if key in found and found[key].times <= times:
                continue
            source, part = executions.op_name(computation, instruction), executions.part(computation, instruction)
            found[key] = _describe(computation, instruction, kind, source, part, times, origins, roles, mesh_shape, shards)
    return sorted((c for c in found.values() if c.bytes), key=lambda c: -c.total)


def _shard_sizes(array) -> tuple[int, ...]:
    """Elements that one device holds of a weight, and of one layer of it when the first axis is that of the layers."""
    return (array.size, array.size // array.dims[0]) if len(array.dims) > 1 else (array.size,)


def _describe(computation, instruction, kind, source, part, times, origins, roles, mesh_shape, shards) -> Collective:
    operands = [array for name in instruction.operands for array in leaves(computation.by_name[name].shape)]
    payload = sum(array.nbytes for array in operands)
    if kind == "all-reduce" and _scatters(computation, instruction):
        kind = "reduce-scatter"
    if kind == "collective-permute":
        pairs = np.array(re.findall(r"\{(\d+),(\d+)\}", instruction.attribute("source_target_pairs") or ""), int).reshape(-1, 2)
        moving = pairs[pairs[:, 0] != pairs[:, 1]]
        group, received = tuple(moving[0].tolist()) if len(moving) else (), payload if len(moving) else 0
        axes = _varying(moving, mesh_shape) if len(moving) else ()
    else:
        group = _first_group(instruction, mesh_shape)
        size = len(group)
        share = (size - 1) / size if size else 0
        factor = {"all-gather": size - 1, "all-reduce": 2 * share, "collective-broadcast": 1}.get(kind, share)
        received = round(payload * factor)
        axes = _varying([group], mesh_shape) if group else None
    explicit = source.rpartition("/")[2] in EXPLICIT
    parameters = sorted({roles[index] for index in origins.entry_parameters(instruction)}, key=lambda role: role.name)
    moves = _moved({role.kind for role in parameters}, kind, part, axes)
    if moves == "gradients" and not any(array.size // (len(group) if kind == "reduce-scatter" else 1) in shards for array in operands):
        moves = "activations"
    names = tuple(role.name for role in parameters if role.kind == "weight") if moves == "weights" else ()
    shown = ", ".join(f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in operands[:3]) + (
        f" and {len(operands) - 3} more" if len(operands) > 3 else ""
    )
    return Collective(kind, moves, names, part, axes, group, shown, received, times, explicit, source)


def _moved(kinds: set[str], opcode: str, part: str, axes) -> str:
    """What is moved, by the kinds of parameters it is made of. "gradients" may be activations' too: sums over the batch (which may go round in permutes, fused
    with the product) are told apart by their size, which is that of a weight's shard."""
    if not kinds - {"constant"}:
        return "indices"
    if kinds <= {"weight", "constant"}:
        return "weights"
    if kinds <= {"optimizer", "constant"}:
        return "optimizer"
    if kinds <= {"cache", "constant"}:
        return "cache"
    summed = opcode in ("all-reduce", "reduce-scatter", "collective-permute")
    return "gradients" if part == "backward" and summed and axes and BATCH_AXES & set(axes) else "activations"


def _scatters(computation: Computation, reduced: Instruction) -> bool:
    """Whether each device keeps but its slice of an all-reduce: the compiler's form of a reduce-scatter is one fused with those slices."""
    users = lambda value: [user for user in computation.instructions if value.name in user.operands]
    pending, slices = users(reduced), 0
    while pending:
        user = pending.pop()
        if user.opcode in ("bitcast", "reshape", "copy", "get-tuple-element"):
            pending += users(user)
        elif user.opcode == "dynamic-slice":
            slices += 1
        else:
            return False
    return slices > 0


def _first_group(instruction: Instruction, mesh_shape: dict[str, int]) -> tuple[int, ...]:
    """The devices of the group that device 0 is in; () when the text cannot be read."""
    text = instruction.attribute("replica_groups") or ""
    devices = int(np.prod(list(mesh_shape.values())))
    if text.startswith("{{"):
        return tuple(int(n) for n in re.match(r"\{\{([^}]*)\}", text)[1].split(",") if n.strip())
    if text in ("{}", ""):
        return tuple(range(devices))
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, dims, order = ([int(n) for n in part.split(",")] if part else None for part in match.groups())
        numbers = np.arange(int(np.prod(dims))).reshape(dims)
        return tuple((numbers.transpose(order) if order else numbers).reshape(groups)[0].tolist())
    if match := re.match(r"@?mesh\[([^\]]*)\]", text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w]+)'?=(\d+)", match[1])}
        rest = text[match.end() :]
        listed = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", rest)
        chosen = re.findall(r"'([\w]+)'(?::\((\d+)\)(\d+))?", rest)
        if not sizes or any(name not in sizes or part for name, part, _ in chosen):
            return ()
        numbers = np.arange(int(np.prod(list(sizes.values()))))
        if listed:
            dims = [int(n) for n in listed[1].split(",")]
            numbers = numbers.reshape(dims)
            numbers = numbers.transpose([int(n) for n in listed[2].split(",")]) if listed[2] else numbers
        numbers = numbers.reshape(list(sizes.values()))
        names = {name for name, _, _ in chosen}
        return tuple(numbers[tuple(slice(None) if name in names else 0 for name in sizes)].reshape(-1).tolist())
    return ()


def _varying(groups, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    sizes = list(mesh_shape.values())
    different = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), sizes))
        different |= (places != places[:, :1]).any(1)
    return tuple(name for name, varies in zip(mesh_shape, different) if varies)
