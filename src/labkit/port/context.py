"""What the rewriting of one function must know of the whole: names, builtin modules, masks, attention, the config, the cache."""

import ast
import builtins
import re

from labkit.layers.activations import ACTIVATIONS
from labkit.port.context_calls import ContextCalls
from labkit.port.context_masks import ContextMasks
from labkit.port.grouped import rewrite_experts
from labkit.port.known import KNOWN_BODIES, body_fingerprint
from labkit.port.layer_loop import rewrite_layer_loop
from labkit.port.program import Symbol
from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Needs, Rewriter
from labkit.port.time_loop import rewrite_time_loop
from labkit.port.trim import sets_attributes
from labkit.port.values import CACHE_NAMES

_MASK_KEYS = {"or_mask_function", "and_mask_function", "block_sequence_ids"}
PLAIN_MODULES = {"math", "np", "numpy", "itertools", "functools", "copy", "operator"}
BUILTIN_MODULES = {"Linear", "Embedding", "LayerNorm", "Conv1d", "RMSNorm", "Conv1D"}


class Context(ContextMasks, ContextCalls):
    """One translation in progress. refusals and unproven grow as functions are rewritten."""

    def __init__(self, program, facts, functions, spine, trimmer):
        self.program, self.facts, self.functions, self.spine, self.trimmer = program, facts, functions, spine, trimmer
        taken = {n.id for f in functions.values() for n in ast.walk(f.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        taken |= {d for path in program.files for d, node in program.file(path).definitions.items() if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        taken |= {p for f in functions.values() for p in f.parameters}
        self.needs = Needs(taken - {"torch", "nn"})
        self.config_attributes: dict[str, object] = {}
        self.local_experts: dict = {}
        self.globals: dict[str, Symbol] = {}
        self.unproven: list[tuple[str, str]] = []
        self.labels: list[str] = []
        self.branch_refusals: list = []
        self._locals: dict[str, set[str]] = {}
        self.uses_config: set[str] = set()
        self.numpy_only: set[str] = set()

    def local_names(self, folded) -> set[str]:
        if folded.key not in self._locals:
            bound = set(folded.parameters) | {"self", "cls"}
            for node in ast.walk(folded.original):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    bound.add(node.id)
                elif isinstance(node, ast.arg):
                    bound.add(node.arg)
                elif isinstance(node, ast.FunctionDef) and node is not folded.original:
                    bound.add(node.name)
            self._locals[folded.key] = bound | set(folded.extras) | getattr(folded, "made_locals", set())
        return self._locals[folded.key]

    def is_external(self, folded, node, name: str) -> bool:
        return node.id not in self.local_names(folded) and self.program.resolve(folded.file, node.id).name == name

    def global_name(self, rewriter, node) -> str:
        """A name of module level as the emitted file knows it."""
        if hasattr(builtins, node.id) or node.id in PLAIN_MODULES:
            if node.id in PLAIN_MODULES:
                rewriter.use("", node.id)
            return node.id
        symbol = self.program.resolve(rewriter.folded.file, node.id)
        if symbol.kind in ("class", "function", "value"):
            self.globals[symbol.name] = symbol
            return symbol.name
        if symbol.name == "ACT2FN":
            return rewriter.use("labkit.layers.activations", "ACT2FN")
        if symbol.kind == "external" and symbol.file == "activations" and symbol.name in ACTIVATIONS:
            return f"{rewriter.use('labkit.layers.activations', 'activation')}({symbol.name!r})"
        raise CannotTranslate(f"the name {node.id} from {symbol.file}", node)

    def keeps_config(self, folded) -> bool:
        """The class has `self.config`, or gets it because its code asks for it here."""
        if folded.cls is None:
            return False
        init = self.program.method(folded.file, folded.cls, "__init__")
        if init is None or not any(a.arg == "config" for a in init[1].args.args):
            return False
        self.uses_config.add(f"{folded.file}::{folded.cls}")
        return True

    def takes_dtype(self, folded) -> bool:
        """A function outside of classes that makes floats from integers alone: its callers say in which dtype."""
        if folded.cls is not None or folded.key in self.numpy_only or "dtype" in folded.parameters or self.known(folded) is not None:
            return False
        args = [*folded.original.args.args, *folded.original.args.kwonlyargs]
        kinds = [k for a in args if a.arg in folded.parameters for k in self.facts.kinds(a)]
        if any(k.startswith(("array:f", "param:f", "buffer:f", "module", "config")) for k in kinds):
            return False
        return any(k.startswith("array:f") for n in ast.walk(folded.node) for k in self.facts.kinds(n))

    def uncached(self, reached) -> tuple[str, str] | None:
        """(why, where) no cached call can be right: the reference keeps nothing, or does something else once its cache holds tokens."""
        functions = [self.functions[key] for key in reached]
        kept = {
            n.func.attr
            for f in functions
            for n in ast.walk(f.node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and not self.facts.is_array(n.func.value)
        }
        if not kept & {"update", "update_conv_state", "update_recurrent_state", "update_indexer", "keep_state"}:
            entry = self.program.entry
            return "the reference keeps no cache: every call computes all tokens", f"{entry.file}:{self.program.node(entry).lineno}"
        for folded in functions:
            counts = {
                s.targets[0].id for s in ast.walk(folded.node) if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and _counts_tokens(s.value)
            }
            for node in ast.walk(folded.node):
                if isinstance(node, ast.If) and any(_counts_tokens(n) or (isinstance(n, ast.Name) and n.id in counts) for n in ast.walk(node.test)):
                    line = getattr(node, "lineno", folded.original.lineno)
                    return "a branch on how many tokens the cache holds", f"{folded.file}:{line}"
        return None

    def builtin_module(self, modules: list[str]) -> str | None:
        """ "Linear", "Embedding", ... when a module of torch.nn, or a class of the program that derives from it, was seen."""
        found = set()
        for name in modules:
            if name in BUILTIN_MODULES:
                found.add(name)
                continue
            for path in self.program.files:
                if isinstance(self.program.file(path).definitions.get(name), ast.ClassDef):
                    bases = {b.split(".")[-1] for b in self.program.base_names(path, name)}
                    found |= bases & BUILTIN_MODULES
        return found.pop() if len(found) == 1 else None

    def constructs(self, key: str) -> bool:
        """A function outside of classes that makes modules."""
        folded = self.functions.get(key)
        if folded is None:
            return False
        if folded.cls is not None:
            return folded.node.name != "__init__" and key in self.numpy_only and sets_attributes(folded.node)
        return any(isinstance(n, ast.Call) and ast.unparse(n.func).startswith(("nn.", "torch.nn.")) and self.facts.modules(n) for n in ast.walk(folded.node))

    def attribute(self, rewriter, node) -> str | None:
        base = node.value
        own = isinstance(base, ast.Name) and base.id == "self" and self._level_of(rewriter.folded) is not None
        if node.attr == "dtype" and (own or ast.unparse(base) == "next(self.parameters())") and self.keeps_config(rewriter.folded):
            return "self.config.dtype"
        if self._is_config(rewriter, base):
            if node.attr == "dtype":
                return f"{rewriter.expr(base)}.dtype"
            self.config_attributes.setdefault(node.attr, None)
            if node.attr == "per_layer_config":
                self.config_attributes.setdefault("layer_types", None)
                return f"{rewriter.expr(base)}.layer_configs"
            if ast.unparse(base) == "self.config":
                self.uses_config.add(f"{rewriter.folded.file}::{rewriter.folded.cls}")
            return f"{rewriter.expr(base)}.{node.attr}"
        if ast.unparse(node) == "self.config" and rewriter.folded.cls:
            self.uses_config.add(f"{rewriter.folded.file}::{rewriter.folded.cls}")
            return "self.config"
        if rewriter.folded.cls and f"{rewriter.folded.file}::{rewriter.folded.cls}" in self.ropes and ast.unparse(base) == "self":
            if node.attr in ("inv_freq", "original_inv_freq"):
                return f"jnp.asarray(inv_freq, {rewriter.wide_dtype()})"
            if node.attr == "attention_scaling":
                return node.attr
        level = self._spine_attribute(rewriter, base)
        if level is not None:
            if self.facts.is_parameter(node):
                return f"{rewriter.use('labkit.layers.building', 'read')}(self.{node.attr})"
            return f"self.{self.renamed(level, node.attr)}"
        if isinstance(base, ast.Name) and base.id == "self" and rewriter.folded.cls:
            level = self.spine.keys.get(f"{rewriter.folded.file}::{rewriter.folded.cls}")
            if level is not None and self.renamed(level, node.attr) != node.attr:
                return f"self.{self.renamed(level, node.attr)}"
        return None

    def renamed(self, level, attribute: str) -> str:
        return "layers" if level is self.spine.last and attribute == self.spine.layers else attribute

    def _spine_attribute(self, rewriter, node):
        """`self.model` in a class of the spine -> the next level; `self.model.decoder` -> the one after it."""
        if not (isinstance(node, ast.Attribute) and rewriter.folded.cls):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            level = self._level_of(rewriter.folded)
        else:
            level = self._spine_attribute(rewriter, node.value)
        if level is None:
            return None
        index = self.spine.levels.index(level)
        if index + 1 < len(self.spine.levels) and self.spine.levels[index + 1].attribute == node.attr:
            return self.spine.levels[index + 1]
        return None

    def _level_of(self, folded):
        for level in self.spine.levels:
            owners = [level.symbol, *self.program.bases(level.symbol.file, level.symbol.name)]
            if any(o.file == folded.file and o.name == folded.cls for o in owners):
                return level
        return None

    def _is_config(self, rewriter, node) -> bool:
        text = ast.unparse(node)
        if text == "self.config" or (text == "config" and "config" in self.local_names(rewriter.folded)):
            return True
        return self.facts.is_a(node, "config")

    def refuse(self, refused, folded) -> None:
        from labkit.port.translate import Refusal

        self.branch_refusals.append(Refusal(refused.construct, refused.where, folded.key.partition("::")[2], refused.advice))

    def causal(self) -> bool:
        """Every mask that the model makes hides what comes later."""
        names = set()
        for folded in self.functions.values():
            for node in ast.walk(folded.node):
                if (
                    isinstance(node, ast.Name)
                    and self.program.resolve(folded.file, node.id).kind == "external"
                    and re.fullmatch(r"create_\w*masks?(_\w+)?", node.id)
                ):
                    names.add(node.id)
                elif isinstance(node, ast.keyword) and node.arg in _MASK_KEYS and not (isinstance(node.value, ast.Constant) and node.value.value is None):
                    return False
        return bool(names) and all("causal" in name or "recurrent" in name for name in names)

    def known(self, folded):
        return KNOWN_BODIES.get(body_fingerprint(folded))

    def forward_key(self, level) -> str:
        found = self.program.method(level.symbol.file, level.symbol.name, "forward")
        return f"{found[0].key}.forward"

    def cache_name(self, folded) -> str:
        """The parameter under which a function takes the cache."""
        return next((p for p in (folded.parameters if folded else []) if p in CACHE_NAMES), "cache")

    def _is_config_value(self, rewriter, node) -> bool:
        return isinstance(node, ast.Attribute) and self._is_config(rewriter, node.value)

    def statement(self, rewriter, node, indent) -> list[str] | None:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and getattr(node.targets[0].slice, "value", None) in _MASK_KEYS:
            raise CannotTranslate(f"a branch that changes the mask ({node.targets[0].slice.value})", node, "write this kind of mask by hand")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            table = self._mask_table(rewriter, node.targets[0].id)
            text = self._mask_table_text(rewriter, node.targets[0].id, table) if table is not None else None
            return None if text is None else [f"{indent}{node.targets[0].id} = {text}"]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            sides = [node.value.body, node.value.orelse]
            if all(isinstance(s, ast.Name) and s.id not in self.local_names(rewriter.folded) and self._is_mask(rewriter, s) for s in sides):
                return []
        if isinstance(node, ast.For):
            experts = rewrite_experts(self, rewriter, node, indent)
            if experts is not None:
                return experts
            layers = rewrite_layer_loop(self, rewriter, node, indent)
            return layers if layers is not None else rewrite_time_loop(self, rewriter, node, indent)
        return None

    def branch(self, rewriter, node) -> None:
        """Note the sides of a branch that no configuration ran."""
        truths = set(self.facts.truths(node.test))
        origin = getattr(node, "origin", None)
        if origin is None or truths == {True, False}:
            return
        where = f"{origin[0]}:{origin[1].split(':')[0]}"
        if not truths:
            if self.facts.calls(rewriter.folded.file, _qualname(rewriter.folded)) == 0:
                return
            self.unproven.append((where, f"if {ast.unparse(node.test)}: never reached"))
        else:
            side = "else" if truths == {True} else "then"
            if side == "then" or node.orelse:
                self.unproven.append((where, f"if {ast.unparse(node.test)}: only ever {truths.pop()}"))


def _counts_tokens(node) -> bool:
    """`cache.get_seq_length()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_seq_length"


def _qualname(folded) -> str:
    return folded.key.partition("::")[2]


__all__ = ["Context", "Rewriter"]
