"""The compiler's final program, HLO text, as data: computations, instructions, shapes. Only what the reports read is kept."""

import dataclasses
import functools
import math
import re

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(calls|body|condition|to_apply|true_computation|false_computation)=%([^\s,)}]+)")
_CALLED_LIST = re.compile(r"(branch_computations|called_computations)=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """A shape of one array. space: 0 for HBM, others are memories on the chip. layout: what stood in braces."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without padding to tiles."""
        return -(-self.size * bits(self.dtype) // 8)


Shape = Array | tuple
"""An array's shape, or a tuple of shapes."""


def bits(dtype: str) -> int:
    """Bits of one element."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


def leaves(shape: Shape) -> list[Array]:
    """The arrays of a shape, in order."""
    return [shape] if isinstance(shape, Array) else [leaf for part in shape for leaf in leaves(part)]


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation. operands: names; attributes: the text after them."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """Where the operation comes from in the traced program, "" when the compiler made it."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """role -> names of the computations that it calls."""
        found = {role: (name,) for role, name in _CALLED.findall(self.attributes)}
        for role, names in _CALLED_LIST.findall(self.attributes):
            found[role] = tuple(name.strip().lstrip("%") for name in names.split(",") if name.strip())
        return found

    def attribute(self, name: str) -> str | None:
        """The text of `name=...` up to the comma that ends it; brackets are kept whole."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        if match is None:
            return None
        return self.attributes[match.end() : _end_of_value(self.attributes, match.end())]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A named list of instructions in schedule order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """index -> parameter instruction."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: Computation


def _end_of_value(text: str, start: int) -> int:
    """Where a value that begins at `start` ends: the first comma outside brackets and quotes, or the end."""
    depth, quoted, at = 0, False, start
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            break
        at += 1
    return min(at, len(text))


def parse_shape(text: str) -> Shape:
    """`bf16[2,3]{1,0}` or `(f32[], (s32[2]))`. Raises ValueError for anything else."""
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if text.startswith("("):
        inner, parts, start = text[1:-1].strip(), [], 0
        while start < len(inner):
            end = _end_of_value(inner, start)
            parts.append(parse_shape(inner[start:end]))
            start = end + 1
        return tuple(parts)
    match = _ARRAY.match(text)
    if match is None:
        raise ValueError(f"not a shape: {text!r}")
    dims = tuple(int(part.strip().removeprefix("<=")) for part in match[2].split(",") if part.strip())
    space = _SPACE.search(match[3] or "")
    return Array(match[1], dims, int(space[1]) if space else 0)


def _parse_instruction(line: str) -> Instruction | None:
    text = line.strip()
    is_root = text.startswith("ROOT ")
    text = text.removeprefix("ROOT ")
    if not text.startswith("%") or " = " not in text:
        return None
    name, rest = text.split(" = ", 1)
    end = _end_of_group(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = parse_shape(rest[:end]), rest[end:].lstrip()
    open_at = rest.index("(")
    close_at = _end_of_group(rest, open_at)
    arguments = rest[open_at + 1 : close_at - 1]
    operands = tuple(re.findall(r"%([^\s,)]+)", arguments)) if "%" in arguments else ()
    return Instruction(name.lstrip("%"), rest[:open_at], shape, operands, arguments, rest[close_at:].removeprefix(", "), is_root)


def _end_of_group(text: str, start: int) -> int:
    """Just past the bracket that closes the one at `start`."""
    depth, quoted = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "([{":
            depth += 1
        elif not quoted and char in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
    raise ValueError(f"unbalanced: {text[start : start + 80]!r}")


def parse_module(text: str) -> Module:
    """The program of `compiled.as_text()`. Raises ValueError when it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, name, body, is_entry = None, None, [], False
    for line in text.splitlines():
        if name is None:
            stripped = line.strip()
            if line[:1] in ("%", "E") and stripped.endswith("{") and "(" in stripped:
                is_entry = stripped.startswith("ENTRY ")
                name, body = stripped.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%"), []
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
            entry = computations[name] if is_entry else entry
            name = None
        elif (instruction := _parse_instruction(line)) is not None:
            body.append(instruction)
    if entry is None:
        raise ValueError("the text holds no entry computation: not a compiled program")
    return Module(computations, entry)
