"""Simplify: what a module keeps in its own attributes from one call to the next becomes the layer's state in the cache.

Such an attribute is None in the constructor and assigned while the model runs. Taken are a recurrent state that is read and written (None stands for no state),
and the last columns of a causal convolution's input; a block that sets states to zeros before the first token goes: a cache begins with zeros.
"""

import ast

from labkit.port.cache_paths import cache_of, give_cache


def states_to_cache(program, functions: dict) -> None:
    """Replace reads and writes of modules' own states; one that is used in another way stays, for the rewriter to refuse."""
    states = _own_states(functions)
    if not states:
        return
    wanting, numbers = [], {}
    for folded in functions.values():
        if folded.cls is None or folded.node.name == "__init__":
            continue
        before = ast.dump(folded.node)
        _Resets(states).visit(folded.node)
        _Convolutions(program, folded, states).visit(folded.node)
        _Recurrent(folded, states, numbers).visit(folded.node)
        if ast.dump(folded.node) != before:
            wanting.append(folded)
    give_cache(functions, wanting)


def _own_states(functions: dict) -> set[str]:
    """Attributes that constructors set to None and other methods assign."""
    none, assigned = set(), set()
    for folded in functions.values():
        for node in ast.walk(folded.original if folded.node.name == "__init__" else folded.node):
            for target in node.targets if isinstance(node, ast.Assign) and folded.cls else ():
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).partition(".")[0] == "self":
                    if folded.node.name != "__init__":
                        assigned.add(target.attr)
                    elif isinstance(node.value, ast.Constant) and node.value.value is None:
                        none.add(target.attr)
    return none & assigned


def _is_state(node, states) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in states and ast.unparse(node.value).partition(".")[0] == "self"


def _writes(statement, states) -> bool:
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _is_state(statement.targets[0], states)


class _Resets(ast.NodeTransformer):
    """`if self.state is None or ...: self.state = torch.zeros(...)` goes."""

    def __init__(self, states):
        self.states = states

    def visit_If(self, node):
        self.generic_visit(node)
        tested = any(_is_state(n, self.states) for n in ast.walk(node.test))
        zeros = all(_writes(s, self.states) and isinstance(s.value, ast.Call) and ast.unparse(s.value.func) == "torch.zeros" for s in node.body)
        return None if tested and zeros and not node.orelse else node


class _Convolutions(ast.NodeTransformer):
    """A branch of which one side runs a causal convolution over its whole input `x` and keeps x's last columns (the other one, over kept and new
    columns, is for
    single tokens) becomes the convolution over the kept columns and x."""

    def __init__(self, program, folded, states):
        self.program, self.folded, self.states = program, folded, states

    def visit_If(self, node):
        self.generic_visit(node)
        for side in (node.body, node.orelse):
            made = self._whole(side)
            if made is not None:
                return made
        return node

    def _whole(self, side):
        if len(side) != 2 or not _writes(side[0], self.states) or not isinstance(side[1], ast.Assign):
            return None
        keep, run = side
        call = keep.value
        if not (
            isinstance(call, ast.Call)
            and ast.unparse(call.func) in ("nn.functional.pad", "F.pad")
            and isinstance(call.args[0], ast.Name)
            and len(call.args) == 2
        ):
            return None
        x, sides = call.args[0].id, call.args[1]
        crop = run.value
        if not (isinstance(sides, ast.Tuple) and len(sides.elts) == 2 and ast.unparse(sides.elts[1]) == "0" and ast.unparse(run.targets[0]) == x):
            return None
        if not (isinstance(crop, ast.Subscript) and isinstance(crop.value, ast.Call) and [ast.unparse(a) for a in crop.value.args] == [x]):
            return None
        length = crop.slice.elts[-1].upper if isinstance(crop.slice, ast.Tuple) and isinstance(crop.slice.elts[-1], ast.Slice) else None
        width = self._width(crop.value.func)
        if length is None or width is None or ast.unparse(sides.elts[0]) not in (f"{width} - {x}.shape[-1] - 1", f"{width} - 1 - {x}.shape[-1]"):
            return None
        cache = cache_of(self.folded) or "cache"
        update = ast.parse(f"{x} = {cache}.update_conv_state({x}, conv_kernel_size={width} - 1)").body[0]
        crop.slice.elts[-1].upper = ast.parse(f"{x}.shape[-1]", mode="eval").body
        last = ast.Slice(ast.UnaryOp(ast.USub(), length), None)
        run.value = ast.Subscript(crop, ast.Tuple([ast.Constant(Ellipsis), last], ast.Load()), ast.Load())
        return [update, run]

    def _width(self, module) -> str | None:
        """The kernel of `self.conv` as this method spells it, when the constructor pads it by one less."""
        if not (isinstance(module, ast.Attribute) and ast.unparse(module.value) == "self"):
            return None
        init = self.program.method(self.folded.file, self.folded.cls, "__init__")
        spelled = {}
        for node in ast.walk(init[1]) if init else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and ast.unparse(node.targets[0].value) == "self":
                if node.targets[0].attr != module.attr:
                    spelled[ast.unparse(node.value)] = ast.unparse(node.targets[0])
                elif isinstance(node.value, ast.Call):
                    given = {k.arg: ast.unparse(k.value) for k in node.value.keywords}
                    kernel = given.get("kernel_size")
                    if kernel is not None and given.get("padding") == f"{kernel} - 1" and "stride" not in given and "dilation" not in given:
                        return spelled.get(kernel, kernel)
        return None


class _Recurrent(ast.NodeTransformer):
    """`self.state` read as an argument and assigned: the cache's recurrent states, one number for each attribute of a class."""

    def __init__(self, folded, states, numbers):
        self.folded, self.numbers = folded, numbers
        self.cache = cache_of(folded) or "cache"
        own = [n for n in ast.walk(folded.node) if _is_state(n, states)]
        arguments = [a for c in ast.walk(folded.node) if isinstance(c, ast.Call) for a in [*c.args, *(k.value for k in c.keywords)]]
        plain = all(ast.unparse(n.value) == "self" and (isinstance(n.ctx, ast.Store) or n in arguments) for n in own)
        self.states = {n.attr for n in own} if plain and {type(n.ctx) for n in own} == {ast.Load, ast.Store} else set()

    def _number(self, attribute: str) -> int:
        return self.numbers.setdefault((self.folded.file, self.folded.cls, attribute), len(self.numbers))

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if not _is_state(node, self.states) or not isinstance(node.ctx, ast.Load):
            return node
        return ast.parse(f"{self.cache}.get_recurrent_state(state_idx={self._number(node.attr)})", mode="eval").body

    def visit_Assign(self, node):
        if not _writes(node, self.states):
            return self.generic_visit(node)
        call = ast.parse(f"{self.cache}.update_recurrent_state(None, state_idx={self._number(node.targets[0].attr)})", mode="eval").body
        call.args = [self.visit(node.value)]
        return ast.copy_location(ast.Expr(call), node)
