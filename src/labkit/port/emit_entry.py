"""Emit: the public face of the model: its call, its cache and the layers that it makes."""

import ast

from labkit.port.construct import numpy_text
from labkit.port.refusal import CannotTranslate
from labkit.port.rewrite import Rewriter
from labkit.port.trim import names_in
from labkit.port.values import CACHE_NAMES

_STATES = {"update_conv_state", "update_recurrent_state", "keep_state", "store_compression_weights"}
"""Calls on the cache by which a layer keeps what depends on all tokens before."""


class EmitEntry:
    """The methods of the emitter for the entry."""

    def entry_lines(self, folded) -> list[str]:
        rewriter = Rewriter(self.t, folded)
        cache = self.t.cache_name(folded)
        stores = {n.id for n in ast.walk(folded.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        used = names_in(folded.node)
        self.t.needs.use("labkit.layers.decoding", "DecoderCall")
        apart = [f"    @{self.t.needs.use('labkit.layers.packing', 'apart_when_packed')}"] if self._keeps_a_state() else []
        lines = [
            *apart,
            "    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):",
            '        """tokens int [batch, length] -> logits [batch, length, vocab][, aux][, cache].',
            "",
            f'        {folded.file}:{folded.original.lineno}."""',
            "        cache = DecoderCall.begin(self, tokens, positions, segment_ids, cache, scan=scan, remat=remat)",
        ]
        for name, text in (
            ("input_ids", "tokens"),
            ("attention_mask", f"cache.{'key_' if self._keeps_keys() else ''}attention_mask.astype(jnp.int32)"),
            ("position_ids", "cache.positions"),
            (cache, "cache"),
        ):
            if name == text or name not in used:
                continue
            if name in stores:
                lines.append(f"        {name} = {text}")
            else:
                rewriter.renames[name] = text
        rewriter.returned = lambda node: f"cache.outputs({rewriter.expr(node.value)}, return_aux)"
        return lines + self.guarded("__call__", lambda: rewriter.block(folded.node.body, "        "))

    def _keeps_a_state(self) -> bool:
        """Some layer carries more along a row than keys and values, which no mask keeps from the next segment."""
        calls = [n for key in self.reached for n in ast.walk(self.t.functions[key].node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return any(call.func.attr in _STATES for call in calls)

    def _keeps_keys(self) -> bool:
        """Some layer keeps keys: a mask is over all of them, else over the tokens of the call."""
        calls = [n for key in self.reached for n in ast.walk(self.t.functions[key].node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        return any(c.func.attr == "update" and ast.unparse(c.func.value) in CACHE_NAMES for c in calls)

    def cache_lines(self) -> list[str]:
        uncached = self.t.uncached(self.reached)
        if uncached is not None:
            from labkit.port.translate import Refusal

            construct, where = uncached
            self.refusals.append(Refusal(construct, where, "init_cache", "write cached attention by hand, or call it without a cache"))
            return [
                "    def init_cache(self, batch: int, capacity: int):",
                f'        """Raises NotImplementedError: {construct}."""',
                f"        raise NotImplementedError({f'{construct} ({where})'!r})",
                "",
            ]
        self.t.needs.use("labkit.layers.decoding", "empty_cache")
        return [
            "    def init_cache(self, batch: int, capacity: int):",
            '        """An empty cache for `capacity` tokens per row, in the model\'s dtype."""',
            "        return empty_cache(self, batch, capacity)",
            "",
        ]

    def layer_maker(self, rewriter, node) -> None:
        """`make_layer` from the constructor's list of layers: a comprehension, or a loop that appends."""
        value = node.value
        argument = value.args[0] if isinstance(value, ast.Call) and value.args else None
        if isinstance(argument, ast.ListComp) and len(argument.generators) == 1:
            generator = argument.generators[0]
            index = generator.target.id
            rewriter.renames[index] = "layer_idx"
            body = [f"    return {rewriter.expr(argument.elt)}"]
            rewriter.renames.pop(index)
        else:
            name = ast.unparse(argument) if argument is not None else f"self.{self.t.spine.layers}"
            loop = next((s for s in rewriter.folded.node.body if isinstance(s, ast.For) and f"{name}.append" in ast.unparse(s)), None)
            if loop is None or not isinstance(loop.target, ast.Name):
                raise CannotTranslate("a list of layers made in another way than by a comprehension or by append", node)
            rewriter.renames[loop.target.id] = "layer_idx"
            body = []
            for statement in loop.body:
                for line in rewriter.statement(statement, "    "):
                    stripped = line.strip()
                    if stripped.startswith(f"{name}.append(") and stripped.endswith(")"):
                        line = line[: len(line) - len(stripped)] + f"return {stripped[len(name) + 8 : -1]}"
                    body.append(line)
            rewriter.folded.node.body = [s for s in rewriter.folded.node.body if s is not loop]
            rewriter.renames.pop(loop.target.id)
        body = self._completed(rewriter, body)
        needed = self._locals_before(rewriter, node, body)
        self.maker = [
            "def make_layer(config, layer_idx, build):",
            '    """One layer of the decoder, by its index."""',
            *needed,
            *[b.replace("self.config", "config") for b in body],
        ]

    def _completed(self, rewriter, body) -> list[str]:
        """With what the constructor does to every layer once all are made: `for layer in self.layers: layer.x.register_buffer(...)`."""
        for loop in rewriter.folded.node.body:
            if isinstance(loop, ast.For) and ast.unparse(loop.iter) == f"self.{self.t.spine.layers}" and isinstance(loop.target, ast.Name):
                made = body[-1].strip().removeprefix("return ")
                body = [*body[:-1], f"    {loop.target.id} = {made}", *rewriter.block(loop.body, "    "), f"    return {loop.target.id}"]
        return body

    def _locals_before(self, rewriter, node, body) -> list[str]:
        """Assignments to locals that the layer's constructor arguments read."""
        wanted = names_in(ast.parse("\n".join(["def f():", *body])))
        out = []
        for statement in reversed(rewriter.folded.node.body):
            if statement is node or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                continue
            if statement.targets[0].id in wanted and statement.targets[0].id != "config":
                wanted |= names_in(statement.value)
                out = rewriter.statement(statement, "    ") + out
        return [numpy_text(line).replace("self.config", "config") for line in out]

    def _maker_text(self) -> list[str]:
        return ["\n".join(numpy_text(line) for line in self.maker)] if self.maker else []

    def create_text(self) -> str:
        self.t.needs.use("labkit.layers.building", "create_model")
        config, sharding, model = self.names()
        return "\n".join(
            [
                f"def create_{self.model_type.replace('-', '_')}_model(config: {config}, *, rngs, mesh=None, quant_mode_str=None) -> {model}:",
                '    """A model with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`."""',
                f"    return create_model({model}, config, {sharding}, rngs=rngs, mesh=mesh, quant_mode_str=quant_mode_str)",
            ]
        )
