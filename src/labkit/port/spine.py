"""Plan: where the decoder's layers are, and the chain of modules from the causal LM down to the one that runs them (the spine)."""

import ast
import dataclasses

from labkit.port.facts import Facts
from labkit.port.program import Symbol
from labkit.port.shared_weights import fills_table


@dataclasses.dataclass(frozen=True)
class Level:
    """One module of the spine. path: its module path in the reference ("" for the causal LM). symbol: its class."""

    path: str
    symbol: Symbol

    @property
    def attribute(self) -> str:
        return self.path.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Spine:
    """levels: from the causal LM down. layers: the attribute of the last level that holds the stacked layers, or None when no list can be stacked.
    apart: parts of the list run on their own, each layer finding its states by its index."""

    levels: tuple[Level, ...]
    layers: str | None
    apart: bool = False

    @property
    def keys(self) -> dict[str, Level]:
        return {level.symbol.key: level for level in self.levels}

    @property
    def last(self) -> Level:
        return self.levels[-1]

    def prefix(self) -> str:
        """Module path of the layer list in the reference."""
        return f"{self.last.path}.{self.layers}" if self.last.path else str(self.layers)


def runs_apart(program, facts: Facts) -> bool:
    """Whether some class runs parts of its layer list: from one layer on, or again. Such a list is no stack."""
    for key in {cls for cls in facts.record.modules[0].values() if "::" in cls and not cls.startswith("external::")}:
        symbol = _symbol(key)
        found = program.method(symbol.file, symbol.name, "forward")
        for node in ast.walk(found[1]) if found else ():
            iterated = node.iter if isinstance(node, ast.For) else None
            if isinstance(iterated, ast.Call) and ast.unparse(iterated.func) == "enumerate" and iterated.args:
                iterated = iterated.args[0]
            if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice) and iterated.slice.lower is not None:
                if isinstance(iterated.value, ast.Attribute) and facts.is_a(iterated.value, "modulelist"):
                    return True
    return False


def find_spine(program, facts: Facts, functions: dict) -> Spine:
    """The spine of a folded program."""
    modules = facts.record.modules
    candidates = []
    for folded in functions.values():
        if folded.cls is None:
            continue
        owners = [path for path, cls in modules[0].items() if _is(program, cls, folded)]
        for node in ast.walk(folded.node):
            if isinstance(node, ast.For) and (attribute := layer_list(node.iter)) is not None and len(owners) == 1:
                path = f"{owners[0]}.{attribute}".lstrip(".")
                count = len({p.split(".")[path.count(".") + 1] for p in modules[0] if p.startswith(path + ".")})
                holds = sum(p.startswith(path + ".") for p in modules[0])
                if count and _config_counts(facts, path, modules) and not fills_table(program, folded.file, folded.cls):
                    candidates.append((holds, owners[0], attribute))
    if runs_apart(program, facts):
        owner, attribute = _base_model(program, modules[0]), None
    elif candidates:
        _, owner, attribute = max(candidates, key=lambda c: c[0])
    else:
        owner, attribute = _base_model(program, modules[0]), None
    parts = owner.split(".") if owner else []
    paths = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
    levels = tuple(Level(path, _symbol(modules[0][path])) for path in paths)
    return Spine(levels, attribute, runs_apart(program, facts))


def layer_list(iterated) -> str | None:
    """`self.layers`, `self.layers[:n]`, `enumerate(self.layers)` -> "layers"."""
    if isinstance(iterated, ast.Call) and ast.unparse(iterated.func) == "enumerate" and iterated.args:
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice) and iterated.slice.lower is None:
        iterated = iterated.value
    if isinstance(iterated, ast.Attribute) and isinstance(iterated.value, ast.Name) and iterated.value.id == "self":
        return iterated.attr
    return None


def _config_counts(facts, path, modules) -> bool:
    """The list's length is the config's layer count in every recorded model."""
    for found, config in zip(modules, facts.record.config):
        depth = path.count(".") + 1
        count = len({p.split(".")[depth] for p in found if p.startswith(path + ".")})
        known = [
            config[k]
            for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers")
            if isinstance(config.get(k), int)
        ]
        if count not in known:
            return False
    return True


def _symbol(key: str) -> Symbol:
    path, _, name = key.partition("::")
    return Symbol("class", path, name)


def _is(program, cls: str, folded) -> bool:
    if cls.startswith("external::") or "::" not in cls:
        return False
    symbol = _symbol(cls)
    if symbol.file == folded.file and symbol.name == folded.cls:
        return True
    try:
        return any(b.file == folded.file and b.name == folded.cls for b in program.bases(symbol.file, symbol.name))
    except (KeyError, FileNotFoundError):
        return False


def _base_model(program, modules: dict) -> str:
    """The child of the causal LM that holds most modules."""
    children = [p for p in modules if p and "." not in p and not modules[p].startswith("external::")]
    return max(children, key=lambda c: sum(p.startswith(c + ".") for p in modules), default="")
