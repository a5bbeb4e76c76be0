"""Emit: the config class with its layer plan, and the sharding class."""

import ast


class EmitConfig:
    """The methods of the emitter for the config."""

    def config_text(self) -> str:
        from labkit.port.config_class import ConfigClass

        path = self.tree.config_file.relative_to(self.t.program.folder).as_posix() if self.tree.config_file else None
        name = self.t.config_class or "Config"
        lines = [
            "@dataclasses.dataclass(frozen=True, kw_only=True)",
            f"class {name}(TranslatedConfig):",
            f'    """`{name}` of transformers: the attributes that this slice reads."""',
            "",
        ]
        attributes = dict(self.t.config_attributes)
        count = next(
            (k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers") if any(k in c for c in self.t.facts.record.config)),
            "num_hidden_layers",
        )
        for key in (count, "vocab_size", "hidden_size", "num_attention_heads", "tie_word_embeddings"):
            attributes.setdefault(key, None)
        if any("layer_types" in c for c in self.t.facts.record.config):
            attributes.setdefault("layer_types", None)
        if self._counts_key_values():
            attributes.setdefault("num_key_value_heads", None)
        if self.t.reports:
            for key in ("router_aux_loss_coef", "aux_loss_coef", "router_aux_loss_coefficient"):
                if any(key in c for c in self.t.facts.record.config):
                    attributes.setdefault(key, None)
        if self.t.ropes:
            for key in ("rope_parameters", "max_position_embeddings", "head_dim", "partial_rotary_factor", "original_max_position_embeddings", "rope_theta"):
                if any(key in c for c in self.t.facts.record.config):
                    attributes.setdefault(key, None)
        for label in self.t.labels:
            for node in ast.walk(ast.parse(label)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    attributes.setdefault(node.attr, None)
        if path:
            config_class = ConfigClass(self.t.program, path, name)
            lines += config_class.lines(name, attributes, self.t.facts.record.config)
            lines += config_class.irrelevant(self._config_reads(), self.t.facts.record.config)
        self.t.needs.use("labkit.models.config", "TranslatedConfig")
        if self.maker:
            self.t.needs.use("labkit.layers.planning", "plan_layers")
            labels = f", labels=tuple(({', '.join(self.t.labels)},) for layer_idx in range(self.{count}))" if self.t.labels else ""
            lines += [
                "",
                "    @property",
                "    def plan(self):",
                f"        return plan_layers(self.{count}, lambda layer_idx, build: make_layer(self, layer_idx, build), self{labels})",
            ]
        else:
            self.t.needs.use("labkit.layers.plan", "LayerPlan")
            lines += ["", "    @property", "    def plan(self):", "        return LayerPlan.from_kinds([])"]
        return "\n".join(lines)

    def _config_reads(self) -> dict[str, list[str]]:
        """Config attribute -> "file:line `statement`" of every read in the reference's functions that the model reaches, before anything was folded away."""
        found: dict[str, list[str]] = {}
        for folded in self.t.functions.values():
            for statement in (n for n in ast.walk(folded.original) if isinstance(n, ast.stmt)):
                parts = (
                    [statement] if not hasattr(statement, "body") else [p for p in (getattr(statement, "test", None), getattr(statement, "iter", None)) if p]
                )
                for node in (n for part in parts for n in ast.walk(part)):
                    for name in self._read_of_config(node):
                        text = ast.unparse(parts[0])
                        place = f"{folded.file.split('/')[-1]}:{node.lineno} `{text if len(text) <= 60 else text[:57] + '...'}`"
                        found.setdefault(name, []).append(place)
        return found

    def _read_of_config(self, node) -> list[str]:
        """`config.name`, `getattr(config, "name")`."""
        is_config = lambda owner: self.t.facts.is_a(owner, "config") or ast.unparse(owner).endswith(("config", "cfg"))
        if isinstance(node, ast.Attribute) and is_config(node.value):
            return [node.attr]
        if isinstance(node, ast.Call) and node.args and is_config(node.args[0]):
            return [a.value for a in node.args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return []

    def _counts_key_values(self) -> bool:
        """The config says how many heads keys and values have: one number, the same for every layer."""
        counts = [c["num_key_value_heads"] for c in self.t.facts.record.config if "num_key_value_heads" in c]
        return bool(counts) and all(count is None or isinstance(count, int) for count in counts)

    def names(self) -> tuple[str, str, str]:
        """(config class, sharding class, model class)."""
        name = self.t.config_class or "Config"
        return name, name.removesuffix("Config") + "Sharding", self.t.program.entry.name

    def sharding_text(self) -> str:
        self.t.needs.use("labkit.layers.sharding", "Sharding")
        config, sharding, _ = self.names()
        return "\n".join(
            [
                f"class {sharding}(Sharding):",
                '    """The base mapping as it is."""',
                "",
                "    @classmethod",
                f"    def for_mesh(cls, config: {config}, mesh):",
                f"        heads, kv_heads = config.num_attention_heads or 0, config.num_{'key_value' if self._counts_key_values() else 'attention'}_heads or 0",
                "        return cls(dict(mesh.shape), vocab_size=config.vocab_size or 0, num_heads=heads, num_kv_heads=kv_heads)",
            ]
        )
