"""Phase 1: what the model is, from its config and headers; the smallest representative subset; what stands in the way."""

import itertools
import json
from pathlib import Path

from labkit.errors import BlockedError, InputError
from labkit.lab import figures
from labkit.lab.phases.base import Phase, cell
from labkit.lab.show import Section, Table, Text


class Discover(Phase):
    """Reads config, headers and tokenizer; writes the subset."""

    number, name, title = 1, "discover", "what the model is, before any weight is trusted"
    cells = ("config_table", "decoder_pattern", "parameters_by_component", "tokenizer", "delta", "slice_made", "walls", "subset")
    helpers = ("../deltas.py", "../slices.py")
    floors = ("hf", "models", "layers", "converters", "port")

    def __init__(self, model: str, revision: str = "", trust_remote_code: bool = False, subset_layers: int = 0):
        """subset_layers: how many leading layers the subset keeps; 0 chooses the fewest that show every kind of layer."""
        super().__init__(model, revision, trust_remote_code, subset_layers=subset_layers)
        self.subset_layers = subset_layers
        self.command(
            "facts, and the subset as a safetensors directory",
            f"labkit run {self.named} --phases 1" + (f" -p subset_layers {subset_layers}" if subset_layers else ""),
        )
        self.command("facts from headers alone", f"labkit inspect {self.named}")

    @cell
    def config_table(self) -> Section:
        """Every config key: its value, the installed class's default, and what the slice does with it."""
        from labkit.hf.facts import config_table

        rows = config_table(self.source, self.reading or None)
        shown = [[r.key, _text(r.value), _text(r.default), r.use or "no slice"] for r in rows]
        unusual = [r for r in rows if r.use.startswith("read") and r.value != r.default and r.default != "-"]
        items = [
            Table(
                title="Every config key",
                columns=["key", "value", "class default", "slice"],
                rows=shown,
                code=["key", "value", "class default"],
                fold=len(shown) > 12,
            )
        ]
        if unusual:
            items.insert(
                0,
                Table(
                    title="What the slice reads and is not the default",
                    columns=["key", "value", "class default"],
                    rows=[[r.key, _text(r.value), _text(r.default)] for r in unusual],
                    code=["key", "value", "class default"],
                ),
            )
        if self.config is not None:
            unread = [r.key for r in rows if r.use == "unread"]
            counts = {kind: sum(r.use.startswith(kind) for r in rows) for kind in ("read", "default", "irrelevant")}
            items.append(
                Text(
                    words=f"{counts['read']} keys are read, {counts['irrelevant']} irrelevant for a stated reason, {counts['default']} at the class's default."
                )
            )
            self.gate(
                "every config key is used or refused",
                not unread,
                len(unread),
                0,
                "keys that the slice neither reads, nor lists as irrelevant, nor finds at the class's default",
            )
        for note in self.source.notes:
            self.learned("{note}", note=note)
        self.learned(f"The config class is {{cls}}; {len(unusual)} keys that the slice reads differ from its defaults.", cls=self.source.config.class_name)
        return Section(title="Config", items=items)

    @cell
    def decoder_pattern(self) -> Section:
        """Layer kinds in order, the cycle, and the layer plan that the parameters are stacked by."""
        from labkit.hf.facts import decoder_pattern

        try:
            pattern = decoder_pattern(self.source)
        except InputError as error:
            if self.wall is None:
                raise
            return Section(title="Decoder pattern", items=[Text(words="Unknown: {what}.", values={"what": error.what})])
        labels = [kind if window is None else f"{kind} ({window})" for kind, window in zip(pattern.kinds, pattern.windows)]
        chosen = self._subset_size(pattern)
        items = [
            self.figure(figures.decoder_pattern(labels, range(chosen)), "decoder_pattern"),
            Table(
                title="Runs of equal layers",
                columns=["layers", "kind", "window"],
                rows=[[r["layers"], r["kind"], r["window"]] for r in pattern.rows()],
                code=["kind"],
                fold=len(pattern.rows()) > 12,
            ),
        ]
        if self.config is not None:
            plan = self.config.plan
            rows = [
                [plan.parameter_path(s, p), kind, plan.segments[s].repeats, f"{plan.layers_at(s, p)[0]}…{plan.layers_at(s, p)[-1]}"]
                for s, p, kind in plan.positions()
            ]
            items.append(
                Table(
                    title="Layer plan",
                    columns=["parameters at", "kind", "stacked", "HF layers"],
                    rows=rows,
                    code=["parameters at", "kind"],
                    note="Layer l of a segment is cycle position l % cycle and stack index l // cycle; scan and loop run over the same paths.",
                )
            )
            self.gate(
                "the layer plan covers every layer",
                plan.num_layers == len(pattern.kinds),
                plan.num_layers,
                len(pattern.kinds),
                "layers in the plan against layers in the config",
            )
            self.learned("Layer plan: {plan}.", plan=plan.describe())
        self.learned("Decoder: {pattern}.", pattern=str(pattern))
        return Section(title="Decoder pattern", items=items)

    @cell
    def parameters_by_component(self) -> Section:
        """Parameters and bytes by component, from headers; nothing is loaded."""
        from labkit.hf.facts import parameters_by_component

        parts, total = parameters_by_component(self.source), self.source.tensors.size
        rows = [[p.component, p.tensors, p.parameters, f"{p.parameters / total:.1%}", f"{p.bytes / 2**20:,.1f}", ", ".join(p.dtypes)] for p in parts]
        rows.append(["all", len(self.source.tensors), total, "100.0%", f"{self.source.tensors.nbytes / 2**20:,.1f}", ""])
        tied = self.source.config.effective.get("tie_word_embeddings")
        self.learned(
            f"{total:,} parameters in {len(self.source.tensors)} tensors, {self.source.tensors.nbytes / 1e6:,.1f} MB; "
            f"the head is {'tied to the embedding' if tied else 'a tensor of its own'}."
        )
        items = [
            self.figure(figures.parameter_share({p.component: p.parameters for p in parts}), "parameters"),
            Table(title="Parameters and bytes", columns=["component", "tensors", "parameters", "share", "MiB", "stored as"], rows=rows),
        ]
        if self.config is not None:
            from labkit.converters import audit

            report = audit(self.source, self.family, self.config)
            items.append(Text(words="Names and shapes against the slice: {report}.", values={"report": report.first()}))
            self.gate(
                "every tensor has its parameter, every parameter its tensor",
                report.passed,
                len(report.problems),
                0,
                "names and shapes, both ways, before a byte is read" if report.passed else f"first of them: {report.first()}",
            )
        return Section(title="Parameters", items=items)

    @cell
    def tokenizer(self) -> Section:
        """The tokenizer against the config's vocabulary."""
        from labkit.hf.tokenizer import tokenizer_facts

        facts = tokenizer_facts(self.source)
        if not facts.present:
            self.learned("No tokenizer comes with the checkpoint: prompts are random tokens.")
            return Section(title="Tokenizer", items=[Text(words="The checkpoint brings no tokenizer; prompts are random tokens.")])
        rows = [
            ["class", facts.kind],
            ["tokens", facts.size],
            ["of which added", facts.added],
            ["config vocab_size", facts.vocab_size],
            ["embedding rows", facts.rows],
        ]
        rows += [[f"{name} id", id_] for name, id_ in facts.special.items()]
        rows += [["chat template", facts.template], ["plain encoding adds BOS", facts.adds_bos], ["plain encoding adds EOS", facts.adds_eos]]
        for words in facts.findings:
            self.finding("tokenizer", words)
        self.gate(
            "no token id lies beyond the embedding",
            facts.rows is None or facts.size <= facts.rows,
            facts.size,
            facts.rows,
            "tokens of the tokenizer against rows of the embedding",
        )
        self.learned("Tokenizer {kind}, {size} tokens, chat template: {template}.", kind=facts.kind, size=facts.size, template=facts.template)
        return Section(
            title="Tokenizer",
            items=[Table(title="Tokenizer", columns=["", "value"], rows=rows), *(Text(words="Finding: {f}.", values={"f": f}) for f in facts.findings)],
        )

    @cell
    def delta(self) -> Section:
        """Every place where the reference differs from that of the nearest slice, with lines, and what in our slice answers to it."""
        from labkit.lab.deltas import delta_table, summary
        from labkit.port import delta_list

        try:
            found = delta_list(self.source, slice_folder=self.slice.folder if self.slice else None)
        except InputError as error:
            return Section(title="Delta list", items=[Text(words="None: {what}.", values={"what": error.what})])
        self.learned("The nearest slice is {donor}; " + summary(found), donor=found.donor)
        items = [Text(words="The donor is {donor}, the slice whose reference shares most statements; " + summary(found), values={"donor": found.donor})]
        if found.rows:
            items.append(delta_table(found))
        if found.has_slice and self.slice.kind == "refined":
            reasons = "; ".join(f"{row.delta.place}: {row.ours_reason}" for row in found.unanswered)[:400]
            self.gate(
                "every difference from the donor has its place in the slice",
                not found.unanswered,
                len(found.unanswered),
                0,
                reasons or "rows of the delta list without a class, config key or reason of ours; whether that code is right, phases 2 and 4 say",
            )
        return Section(title="Delta list", items=items)

    @cell
    def slice_made(self) -> Section:
        """Where the slice comes from; of a translated one, what is unusual about the family, what no configuration ran, and what could not be translated."""
        from labkit.lab.slices import describe

        if self.slice is None:
            return Section(title="Slice", items=[Text(words="There is none, and none could be made: {why}", values={"why": self.wall.what})])
        self.learned("The slice is {kind}.", kind=self.slice.kind)
        if self.slice.unproven:
            self.pitfall(f"{len(self.slice.unproven)} branches of the translated slice are unproven: no configuration of the reference ran them.")
        for refusal in self.slice.refusals:
            self.finding(refusal["component"], f"{refusal['construct']} cannot be translated", refusal["where"], refusal["advice"])
        if self.slice.kind != "refined":
            self.gate("everything that the model reaches is translated", not self.slice.refusals, len(self.slice.refusals), 0, "constructs refused by name")
        items = describe(self.slice)
        if self.slice.kind != "refined" and not self.slice.refusals and self.config is not None:
            from labkit.port.config_reads import unread_keys

            unread = unread_keys(self.family, self.config, self.source.config.defaults)
            for key, value in unread.items():
                words = "The config key {key} = {value} is not at its default, and building and calling the model never read it."
                items.append(Text(words=words, values={"key": key, "value": str(value)}))
                self.pitfall(words, key=key, value=str(value))
        return Section(title="Slice", items=items)

    @cell
    def walls(self) -> Section:
        """What the lab cannot bring up, and why."""
        from labkit.hf.facts import walls

        found = walls(self.source)
        rows = [[wall.what, wall.why, wall.next] for wall in found]
        if self.wall is not None:
            rows.append([self.wall.what, self.wall.where, self.wall.next])
        elif found:
            self.wall = BlockedError(found[0].what, found[0].why, found[0].next)
        if not rows:
            return Section(
                title="Walls",
                items=[Text(words="None: the architecture is known, the weights are plain floats, no remote code is needed, and there is a slice.")],
            )
        for what, why, next_ in rows:
            self.finding("wall", what, why, next_)
        return Section(title="Walls", items=[Table(title="What stands in the way", columns=["what", "where", "next"], rows=rows)])

    @cell
    def subset(self) -> Section:
        """The mini checkpoint: embeddings, head and the fewest leading layers that show every kind, loadable by transformers."""
        from labkit.hf.facts import decoder_pattern

        if self.wall is not None:
            return Section(title="Subset", items=[Text(words="No subset is written: a wall stands before it.")])
        size = self._subset_size(decoder_pattern(self.source))
        path = subset_of(self, size)
        from labkit.hf import open_source

        small = open_source(str(path))
        self.record.outputs["subset"] = str(path)
        total = len(decoder_pattern(self.source).kinds)
        rows = [
            ["layers", f"{size} of {total}"],
            ["tensors", len(small.tensors)],
            ["parameters", small.tensors.size],
            ["MiB", f"{small.tensors.nbytes / 2**20:,.1f}"],
            ["directory", str(path)],
        ]
        self.learned(f"The smallest representative subset is the first {f'{size} layers' if size > 1 else 'layer'} of {total}.")
        if size == total:
            self.pitfall("The subset is the whole model: no smaller run of layers shows every kind.")
        return Section(
            title="Subset",
            items=[
                Table(
                    title="What was cut",
                    columns=["", "value"],
                    rows=rows,
                    note="An ordinary safetensors directory. Its text is gibberish; both sides must produce the same gibberish.",
                )
            ],
        )

    def _subset_size(self, pattern) -> int:
        if self.subset_layers:
            return min(self.subset_layers, len(pattern.kinds))
        if self.config is not None:
            return self.config.plan.representative()
        return min(pattern.start + pattern.cycle, len(pattern.kinds))


def subset_of(phase: Phase, layers: int) -> Path:
    """The subset directory of a phase's source, written when it is not there yet."""
    from labkit.hf.subset import write_subset

    path = phase.scratch / f"subset-{layers}"
    return path if (path / "config.json").is_file() else write_subset(phase.source, layers, path)


def subset_again(phase: Phase) -> Path:
    """The subset that phase 1 chose, for a later phase; written again when the scratch was emptied."""
    return subset_of(phase, int(phase.records.read(1).outputs["subset"].rsplit("-", 1)[1]))


def _text(value) -> str:
    """A config value as config.json spells it; a long list by its runs of equal entries, other long values cut."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > 6:
        runs = [(json.dumps(entry, default=str), len(list(group))) for entry, group in itertools.groupby(value)]
        if len(runs) < len(value) or len(runs) > 12:
            shown = ", ".join(f"{count} × {entry}" if count > 1 else entry for entry, count in runs[:8])
            return f"[{shown}{', …' if len(runs) > 8 else ''}] ({len(value)} entries)"
    text = json.dumps(value, default=str)
    return text if len(text) <= 160 else text[:157] + "…"
