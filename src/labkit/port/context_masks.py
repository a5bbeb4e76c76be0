"""What the rewriting must know of masks: the calls and tables that make them."""

import ast

from labkit.port.refusal import CannotTranslate

MASKS = "labkit.layers.masks"


class ContextMasks:
    """The mask methods of the context."""

    def _chosen_mask(self, rewriter, node) -> str | None:
        """A call of a local name that was bound to one of two mask functions."""
        if not isinstance(node.func, ast.Name):
            return None
        for statement in ast.walk(rewriter.folded.node):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.func.id and isinstance(statement.value, ast.IfExp):
                sides = [statement.value.body, statement.value.orelse]
                if all(isinstance(s, ast.Name) and self._is_mask(rewriter, s) for s in sides):
                    texts = [self._mask(rewriter, node, self.program.resolve(rewriter.folded.file, s.id).name) for s in sides]
                    return f"({texts[0]} if {rewriter.expr(statement.value.test)} else {texts[1]})"
        return None

    def _mask_table(self, rewriter, name: str) -> ast.Dict | None:
        """The dictionary of mask functions that a local name holds."""
        for statement in ast.walk(rewriter.folded.node):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name and isinstance(statement.value, ast.Dict):
                values = statement.value.values
                local = self.local_names(rewriter.folded)
                if values and all(isinstance(v, ast.Name) and v.id not in local and self._is_mask(rewriter, v) for v in values):
                    return statement.value
        return None

    def _mask_table_text(self, rewriter, name: str, table: ast.Dict) -> str | None:
        """Each mask of the table made when it is asked for, with the arguments of the one call that asks."""
        calls = [
            n for n in ast.walk(rewriter.folded.node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript) and ast.unparse(n.func.value) == name
        ]
        if len(calls) != 1:
            return None
        masks = [self._mask(rewriter, calls[0], self.program.resolve(rewriter.folded.file, v.id).name) for v in table.values]
        return "{" + ", ".join(f"{rewriter.expr(k)}: lambda: {mask}" for k, mask in zip(table.keys, masks)) + "}"

    def _is_mask(self, rewriter, node) -> bool:
        symbol = self.program.resolve(rewriter.folded.file, node.id)
        return symbol.kind == "external" and symbol.name.startswith("create_") and "mask" in symbol.name

    def _mask_arguments(self, rewriter, node) -> dict:
        given = {k.arg: k.value for k in node.keywords if k.arg}
        for keyword in node.keywords:
            if keyword.arg is None:
                given |= self._dictionary(rewriter, keyword.value)
        names = ["config", "inputs_embeds", "attention_mask", "cache", "position_ids"]
        return {**dict(zip(names, node.args)), **given}

    def _dictionary(self, rewriter, node) -> dict:
        """The entries of a dictionary that is written out, copied, or extended in this function."""
        if isinstance(node, ast.Dict):
            found: dict = {}
            for key, value in zip(node.keys, node.values):
                found |= self._dictionary(rewriter, value) if key is None else {key.value: value} if isinstance(key, ast.Constant) else {}
            return found
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
            return self._dictionary(rewriter, node.func.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
            start = self._dictionary(rewriter, node.args[0]) if node.args else {}
            return start | {k.arg: k.value for k in node.keywords if k.arg}
        if isinstance(node, ast.Name):
            for statement in ast.walk(rewriter.folded.node):
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id and not isinstance(statement.value, ast.Name):
                    return self._dictionary(rewriter, statement.value)
        return {}

    def _mask(self, rewriter, node, name) -> str:
        given = self._mask_arguments(rewriter, node)
        cache = next((given[n] for n in ("cache", "past_key_values") if n in given and isinstance(given[n], ast.Name)), None)
        cache = rewriter.expr(cache) if cache is not None else self.cache_name(rewriter.folded)
        if name == "create_recurrent_attention_mask":
            return f"{cache}.attention_mask.astype(jnp.int32)"
        config = rewriter.expr(given["config"]) if "config" in given else "self.config"
        like = given.get("inputs_embeds", given.get("input_embeds"))
        dtype = f"{rewriter.expr(like)}.dtype" if like is not None else f"{config}.dtype"
        extras = ""
        for key, out in (("or_mask_function", "or_mask"), ("and_mask_function", "and_mask")):
            if key in given and not (isinstance(given[key], ast.Constant) and given[key].value is None):
                extras += f", {out}={rewriter.expr(given[key])}"
        function = rewriter.use(MASKS, name)
        if config == "self.config":
            self.uses_config.add(f"{rewriter.folded.file}::{rewriter.folded.cls}")
        if name == "create_causal_mask":
            return f"{function}({cache}, {dtype}{extras})"
        if name == "create_sliding_window_causal_mask":
            self.config_attributes.setdefault("sliding_window", None)
            return f"{function}({cache}, {config}.sliding_window, {dtype}{extras})"
        if name == "create_chunked_causal_mask":
            self.config_attributes.setdefault("attention_chunk_size", None)
            return f"{function}({cache}, {config}.attention_chunk_size, {dtype}{extras})"
        if name == "create_masks_for_generate":
            for key in ("sliding_window", "attention_chunk_size", "layer_types"):
                self.config_attributes.setdefault(key, None)
            return f"{function}({cache}, {config}, {dtype}{extras})"
        raise CannotTranslate(f"the mask function {name}", node)
