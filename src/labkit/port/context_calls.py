"""What the rewriting must know of calls: modules, attention, heads, functions of other files, arrays changed within."""

import ast

from labkit.port.grouped import rewrite_by_counts
from labkit.port.refusal import CannotTranslate
from labkit.port.reported import REPORT
from labkit.port.values import CACHE_NAMES


class ContextCalls:
    """The call methods of the context."""

    def call(self, rewriter, node) -> str | None:
        func, name = node.func, ast.unparse(node.func)
        if name == REPORT:
            return f"{rewriter.use('labkit.layers.decoding', 'report')}({rewriter.arguments(node)})"
        if name == "getattr":
            return self._getattr(rewriter, node)
        if isinstance(func, ast.Attribute) and func.attr == "store_compression_weights":
            return f"{rewriter.expr(func)}({rewriter.arguments(node)}, self.compress_rate)"
        product = rewrite_by_counts(rewriter, node)
        if product is not None:
            return product
        if name == "hasattr" and len(node.args) == 2 and self._is_config(rewriter, node.args[0]):
            self.config_attributes.setdefault(node.args[1].value, None)
            return f"({rewriter.expr(node.args[0])}.{node.args[1].value} is not None)"
        if isinstance(func, ast.Attribute) and func.attr in ("get_text_config",) and self._is_config(rewriter, func.value):
            return rewriter.expr(func.value)
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call) and ast.unparse(func.value.func) == "super":
            method = {"forward": "__call__"}.get(func.attr, func.attr)
            return f"super().{method}({rewriter.arguments(node)})"
        tied = self.tied_head(rewriter, func)
        if tied is not None:
            tag = rewriter.use("labkit.layers.tags", "tag")
            x = rewriter.expr(node.args[0])
            head = f'{tag}(self.{tied}.attend({x}), "{func.attr}")'
            head = f"self.{func.attr}({head})" if self.head_has_bias(func.attr) else head
            return f"({head} if self.config.tie_word_embeddings else self.{func.attr}({x}))"
        level = self._spine_attribute(rewriter, func)
        if level is not None:
            return f"super().decode({self._spine_arguments(rewriter, node, level)})"
        if isinstance(func, ast.Attribute) and func.attr == "apply" and getattr(node, "callees", None):
            return f"{rewriter.expr(func.value)}.forward({rewriter.arguments(node)})"
        if isinstance(func, ast.Attribute) and func.attr == "forward":
            return f"{rewriter.expr(func.value)}({rewriter.arguments(node)})"
        if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name) and self._mask_table(rewriter, func.value.id) is not None:
            return f"{rewriter.expr(func)}()"
        chosen = self._chosen_mask(rewriter, node)
        if chosen is not None:
            return chosen
        callees = [self.functions[c] for c in getattr(node, "callees", []) if c in self.functions]
        if len(callees) == 1 and callees[0].cls is None:
            known = self.known(callees[0])
            if known is not None:
                return known(rewriter, node, callees[0])
        bare = (
            isinstance(func, ast.Name)
            and not callees
            and self.builtin_module([func.id])
            and self.program.resolve(rewriter.folded.file, func.id).kind == "class"
        )
        if bare or callees and self.facts.modules(node) and callees[0].node.name == "__init__":
            name = func.id if isinstance(func, ast.Name) else None
            if name is not None and name not in self.local_names(rewriter.folded):
                self.globals[name] = self.program.resolve(rewriter.folded.file, name)
            else:
                name = rewriter.expr(func)
            arguments = rewriter.arguments(node)
            return f"{name}({arguments}{', ' if arguments else ''}build=build)"
        return None

    def head_has_bias(self, attribute: str) -> bool:
        return any(f"{attribute}.bias" in state for state in self.facts.record.state)

    def tied_head(self, rewriter, func) -> str | None:
        """The path of the embedding that a head in the causal LM may be tied to."""
        if not (isinstance(func, ast.Attribute) and ast.unparse(func.value) == "self" and self._level_of(rewriter.folded) is self.spine.levels[0]):
            return None
        to = self.heads.get(f"{func.attr}.weight")
        if to is None:
            return None
        for level in reversed(self.spine.levels):
            if level.path and to.startswith(level.path + "."):
                to = to[len(level.path) + 1 :]
                break
        self.config_attributes.setdefault("tie_word_embeddings", None)
        self.uses_config.add(f"{rewriter.folded.file}::{rewriter.folded.cls}")
        return to.removesuffix(".weight")

    def _spine_arguments(self, rewriter, node, level) -> str:
        """What the next level's `decode` takes, the call's handle always among it."""
        text = rewriter.arguments(node)
        passed = {k.arg for k in node.keywords}
        target = self.functions.get(self.forward_key(level))
        names = target.parameters if target else []
        positional = names[: len(node.args)]
        if not (passed | set(positional)) & CACHE_NAMES:
            text = f"{text}{', ' if text else ''}{self.cache_name(target)}=cache"
        return text

    def _getattr(self, rewriter, node) -> str | None:
        target, name = node.args[0], node.args[1]
        if ast.unparse(target) == "torch" and self._is_config_value(rewriter, name):
            dtype = "build.dtype" if rewriter.numpy else f"{'config' if 'config' in rewriter.folded.parameters else 'self.config'}.dtype"
            return f"{rewriter.use('labkit.layers.precision', 'dtype_named')}({rewriter.expr(name)}, {dtype})"
        if f"{rewriter.folded.file}::{rewriter.folded.cls}" in self.ropes and isinstance(name, ast.JoinedStr) and ast.unparse(target) == "self":
            ending = ast.unparse(name)
            if "inv_freq" in ending:
                return f"jnp.asarray(inv_freq, {rewriter.wide_dtype()})"
            if "attention_scaling" in ending:
                return "attention_scaling"
        if self._is_config(rewriter, target) and isinstance(name, ast.Constant):
            text = f"{rewriter.expr(target)}.{name.value}"
            if len(node.args) == 2:
                self.config_attributes.setdefault(name.value, None)
                return text
            try:
                ast.literal_eval(node.args[2])
                self.config_attributes[name.value] = node.args[2]
                return text
            except (ValueError, TypeError):
                self.config_attributes.setdefault(name.value, None)
                return f"({text} if {text} is not None else {rewriter.expr(node.args[2])})"
        if isinstance(name, ast.Constant):
            plain = ast.Attribute(target, name.value, ast.Load())
            return rewriter.expr(ast.copy_location(plain, node)) if len(node.args) == 2 else f"getattr({rewriter.arguments(node)})"
        return None

    def external_function(self, rewriter, node) -> str | None:
        """A call of a function that the modeling files import from elsewhere."""
        symbol = self.program.resolve(rewriter.folded.file, node.func.id)
        if symbol.kind != "external":
            return None
        name = symbol.name
        if name.startswith("create_") and "mask" in name:
            return self._mask(rewriter, node, name)
        if name in ("KVSharingDict", "UserDict") and not node.keywords and all(ast.unparse(a) == "None" for a in node.args):
            return "{}"
        if name == "get_activation":
            return f"{rewriter.use('labkit.layers.activations', 'activation')}({rewriter.arguments(node)})"
        if name in ("deepcopy", "copy"):
            return rewriter.expr(node.args[0])
        if symbol.file in ("itertools", "math", "operator"):
            return f"{rewriter.use(symbol.file, name)}({rewriter.arguments(node)})"
        raise CannotTranslate(f"the function {name} from {symbol.file}", node)

    def holder(self, rewriter, node) -> str | None:
        """ "dict" or "list" when a name was assigned one here."""
        if isinstance(node, ast.Name):
            for statement in ast.walk(rewriter.folded.node):
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                    if (
                        isinstance(statement.value, (ast.Dict, ast.DictComp))
                        or ast.unparse(statement.value).endswith(".copy()")
                        and self._dictionary(rewriter, node)
                    ):
                        return "dict"
                    if isinstance(statement.value, (ast.List, ast.ListComp)):
                        return "list"
        return None

    def mutating_call(self, rewriter, node, text):
        """The text of a call, and the names among its arguments that the function called gives back changed."""
        if not isinstance(node, ast.Call):
            return text, []
        callees = [self.functions[c] for c in getattr(node, "callees", []) if c in self.functions]
        if len(callees) != 1 or not getattr(callees[0], "mutated", ()):
            return text, []
        target, after = callees[0], []
        for name in target.mutated:
            position = target.parameters.index(name)
            argument = node.args[position] if position < len(node.args) else next((k.value for k in node.keywords if k.arg == name), None)
            after.append(argument.id if isinstance(argument, ast.Name) else "_")
        return text, after

    def write_back(self, rewriter, names) -> list[str]:
        """Changed states go back into the cache they came from."""
        lines = []
        for name in names:
            for node in ast.walk(rewriter.folded.node):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
                    func = node.value.func
                    if isinstance(func, ast.Attribute) and func.attr in ("get_recurrent_state", "get_conv_state"):
                        kind = func.attr.removeprefix("get_")
                        arguments = "".join(f", {k.arg}={rewriter.expr(k.value)}" for k in node.value.keywords)
                        lines.append(f"{rewriter.expr(func.value)}.update_{kind}({name}{arguments})")
                        break
        return lines
