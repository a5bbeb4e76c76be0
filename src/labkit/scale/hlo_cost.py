"""What a compiled program costs one device: operations in products of matrices, and bytes through its memory. Each instruction counts as often as it runs."""

import dataclasses
import re

import numpy as np

from labkit.scale.hlo import Array, Computation, Instruction, Module, leaves
from labkit.scale.hlo_flow import Executions, subprograms

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all", "collective-broadcast")
_NO_TRAFFIC = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier", "after-all", "partition-id", "replica-id",
    "add-dependency", "iota",
}  # fmt: skip
_ELEMENT_BY_ELEMENT = {
    "bitcast", "reshape", "transpose", "copy", "convert", "broadcast", "pad", "concatenate", "add", "subtract", "multiply", "divide", "maximum", "minimum",
    "select", "compare", "and", "or", "not", "negate", "exponential", "tanh", "logistic", "rsqrt", "clamp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of matrices. flops: of one execution on one device; times: executions per call. op_name: its place in the traced program;
    part: of a training step.

    kind: "dot", "convolution" or "ragged". A ragged product counts every row that it is given, whether or not it belongs to a group.
    """

    kind: str
    flops: int
    times: int
    op_name: str
    part: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return self.flops * self.times


def products(module: Module, executions: Executions) -> list[Product]:
    """Every product of matrices that the program runs. A ragged product is the compiler's grouped kernel: a custom call named after it."""
    found = []
    for name, times in executions.times.items():
        computation = module.computations[name]
        for instruction in computation.instructions:
            if instruction.opcode not in ("dot", "convolution", "ragged-dot", "custom-call"):
                continue
            source, part = executions.op_name(computation, instruction), executions.part(computation, instruction)
            shapes = tuple(array.dims for operand in instruction.operands if operand in computation.by_name for array in leaves(_shape(computation, operand)))
            if instruction.opcode == "dot":
                found.append(Product("dot", _dot_flops(instruction, shapes), times, source, part, shapes))
            elif instruction.opcode == "convolution":
                found.append(Product("convolution", _convolution_flops(instruction, shapes), times, source, part, shapes))
            elif instruction.opcode == "ragged-dot" or (instruction.opcode == "custom-call" and instruction.name.startswith("ragged-dot-") and len(shapes) > 2):
                rows = next((dims for dims in shapes if len(dims) == 2), None)
                if rows is not None and isinstance(instruction.shape, Array):
                    found.append(Product("ragged", 2 * instruction.shape.size * rows[1], times, source, part, shapes))
    return found


def _shape(computation: Computation, name: str):
    return computation.by_name[name].shape


def _dot_flops(instruction: Instruction, shapes) -> int:
    contracted = [int(d) for d in (instruction.attribute("lhs_contracting_dims") or "{}").strip("{}").split(",") if d]
    return 2 * instruction.shape.size * int(np.prod([shapes[0][d] for d in contracted], dtype=np.int64))


def _convolution_flops(instruction: Instruction, shapes) -> int:
    """Two for each multiply-add at positions that are neither padding nor holes of a dilation."""
    left, right, out = re.split("_|->", instruction.attribute("dim_labels"))
    window = _window(instruction.attribute("window") or "{}")
    lhs, rhs = shapes[0], shapes[1]
    valid = 1
    for spatial in sorted(set(left) - {"b", "f"}):
        at = int(spatial)
        setting = lambda key, default: window[key][at] if key in window else default
        before, after = setting("pad", (0, 0))
        valid *= _valid_positions(
            lhs[left.index(spatial)],
            rhs[right.index(spatial)],
            setting("stride", 1),
            before,
            after,
            setting("lhs_dilate", 1),
            setting("rhs_dilate", 1),
        )
    batch = lhs[left.index("b")] // int(instruction.attribute("batch_group_count") or 1)
    return 2 * batch * rhs[right.index("o")] * rhs[right.index("i")] * valid


def _window(text: str) -> dict[str, list]:
    """`{size=1x2 pad=0_0x1_1}` -> {"size": [1, 2], "pad": [(0, 0), (1, 1)]}."""
    settings = {}
    for part in text.strip("{}").split():
        key, _, values = part.partition("=")
        numbers = [[int(n) for n in value.split("_")] for value in values.split("x")]
        settings[key] = [tuple(n) if len(n) > 1 else n[0] for n in numbers]
    return settings


def _valid_positions(size: int, kernel: int, stride: int, before: int, after: int, dilation: int, kernel_dilation: int) -> int:
    """Pairs of output and kernel positions that meet an element of the input."""
    reach = (size - 1) * dilation + 1
    outputs = (reach + before + after - (kernel - 1) * kernel_dilation - 1) // stride + 1
    position = np.arange(outputs)[:, None] * stride - before + np.arange(kernel)[None, :] * kernel_dilation
    return int(((position >= 0) & (position < reach) & (position % dilation == 0)).sum())


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one instruction reads from and writes to HBM. bytes: of one execution on one device."""

    instruction: str
    shape: str
    bytes: int
    times: int
    op_name: str

    @property
    def total(self) -> int:
        return self.bytes * self.times


def hbm_traffic(module: Module, executions: Executions) -> list[Traffic]:
    """Every instruction that reads or writes HBM, the largest first. Values in the chip's own memories are left out, slices count as what they take, updates
    in place as what they change; tiles' padding does not count."""
    fused = {name for c in module.computations.values() for i in c.instructions if i.opcode not in ("call", "conditional") for name in subprograms(i)}
    found = []
    for name, times in executions.times.items():
        if name in fused:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions:
            if size := _traffic(module, computation, instruction):
                shape = ", ".join(f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in leaves(instruction.shape)[:1])
                found.append(Traffic(instruction.name, shape, size, times, executions.op_name(computation, instruction)))
    return sorted(found, key=lambda traffic: -traffic.total)


def _in_hbm(shape) -> int:
    return sum(array.nbytes for array in leaves(shape) if array.space == 0)


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _NO_TRAFFIC or opcode.endswith("-done") or _is_bookkeeping(instruction):
        return 0
    operands = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
    if opcode == "fusion":
        called = module.computations[instruction.called["calls"][0]]
        reads = sum(min(_in_hbm(shape), _read(module, called, called.parameters[index])) for index, shape in enumerate(operands) if _in_hbm(shape))
        return reads + _written(called, called.root, instruction.shape, _in_place(instruction))
    if opcode in ("copy-start", "slice-start"):
        target = leaves(instruction.shape)[0]
        return target.nbytes * ((target.space == 0) + (leaves(operands[0])[0].space == 0))
    if opcode.removesuffix("-start") in COLLECTIVES and opcode.endswith("-start"):
        return 2 * sum(map(_in_hbm, operands))
    if opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _in_hbm(instruction.shape)
    if opcode == "dynamic-update-slice":
        return 2 * _in_hbm(operands[1])
    if opcode == "scatter":
        return sum(map(_in_hbm, operands[1:])) + 2 * _in_hbm(operands[-1])
    return sum(map(_in_hbm, operands)) + _in_hbm(instruction.shape)


def _read(module: Module, computation: Computation, value: Instruction) -> int:
    """Bytes of a fused computation's value that its users read."""
    total = 0
    for user in computation.instructions:
        if value.name not in user.operands:
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            total += sum(array.nbytes for array in leaves(user.shape))
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == value.name:
            total += _updates(computation, user)
        elif user.opcode in ("tuple", "get-tuple-element") or user.opcode.removesuffix("-start") in COLLECTIVES or _is_bookkeeping(user):
            continue
        elif user.opcode in _ELEMENT_BY_ELEMENT and not user.is_root:
            total += _read(module, computation, user)
        elif user.opcode == "fusion":
            called = module.computations[user.called["calls"][0]]
            total += sum(_read(module, called, called.parameters[index]) for index, name in enumerate(user.operands) if name == value.name)
        else:
            return sum(array.nbytes for array in leaves(value.shape))
    return total


def _updates(computation: Computation, update: Instruction) -> int:
    """Bytes that an update in place changes: of a slice, or of a scatter of one array."""
    name = update.operands[1 if update.opcode == "dynamic-update-slice" else -1]
    return sum(array.nbytes for array in leaves(computation.by_name[name].shape))


def _written(computation: Computation, root: Instruction, shape, in_place: set[tuple[int, ...]], at: tuple[int, ...] = ()) -> int:
    """Bytes that a fusion writes to HBM: where its result is an update in place, the update; what an operand's memory holds already is not written."""
    if isinstance(shape, tuple):
        parts = [computation.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root] * len(shape)
        return sum(_written(computation, part, element, in_place, (*at, index)) for index, (part, element) in enumerate(zip(parts, shape)))
    if root.opcode == "parameter" or not _in_hbm(shape):
        return 0
    if root.opcode in ("dynamic-update-slice", "scatter"):
        return _updates(computation, root)
    if root.opcode == "bitcast" and root.operands:
        return _written(computation, computation.by_name[root.operands[0]], shape, in_place, at)
    return 0 if at in in_place else _in_hbm(shape)


def _in_place(instruction: Instruction) -> set[tuple[int, ...]]:
    """Places in a fusion's result that share an operand's memory."""
    text = instruction.attribute("output_to_operand_aliasing") or ""
    return {tuple(int(n) for n in place.split(",") if n.strip()) for place in re.findall(r"\{([\d, ]*)\}: \(", text)}


def _is_bookkeeping(instruction: Instruction) -> bool:
    """Custom calls that are no kernels: buffers set aside, halves of a collective, indices packed."""
    return instruction.opcode == "custom-call" and '"tpu_custom_call"' not in instruction.attributes
