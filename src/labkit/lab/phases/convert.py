"""Phase 3: Hugging Face to Orbax and back, scanned and unscanned, from one rule table, bit for bit."""

import shutil
import time

from labkit.lab import figures
from labkit.lab.phases.base import Phase, cell
from labkit.lab.show import Section, Table, Text

LAYOUTS = {"scanned": True, "unscanned": False}


class Convert(Phase):
    """Both layouts, audited both ways, exported and compared with the source tensor by tensor."""

    number, name, title = 3, "convert", "to Orbax and back, bit for bit"
    cells = ("audit", "to_orbax", "restore", "back", "bit_for_bit", "timeline")
    floors = ("hf", "layers", "models", "converters")

    def __init__(self, model: str, revision: str = "", trust_remote_code: bool = False):
        super().__init__(model, revision, trust_remote_code)
        self.seconds: dict[str, float] = {}
        self.command("to Orbax, scanned layers", f"labkit convert {self.named} CKPT")
        self.command("to Orbax, one entry per layer", f"labkit convert {self.named} CKPT_UNSCANNED --no-scan")
        self.command("back to safetensors", "labkit export CKPT OUT")

    def _folder(self, layout: str):
        return self.scratch / f"orbax-{layout}"

    @cell
    def audit(self) -> Section:
        """Names and shapes both ways, from the rule table alone."""
        from labkit.converters import audit

        report = audit(self.source, self.family, self.config)
        kinds = ("unread", "missing", "unfilled", "doubled", "mismatched", "mixed")
        rows = [[kind, len(getattr(report, kind)), "; ".join(getattr(report, kind)[:3])] for kind in kinds]
        self.gate(
            "audit, both ways",
            report.passed,
            len(report.problems),
            0,
            "tensors unread, absent or read twice; parameters unfilled or filled twice; shapes that differ",
        )
        rules = [
            [", ".join(a.rule.targets), ", ".join(a.layout.sources), len([b for b in report.expansion.assignments if b.rule == a.rule])]
            for a in {id(a.rule): a for a in report.expansion.assignments}.values()
        ]
        return Section(
            title="Audit",
            items=[
                Text(words="{report}.", values={"report": str(report)[:600]}),
                Table(title="Problems by kind", columns=["kind", "count", "first"], rows=rows),
                Table(
                    title="Rules",
                    columns=["parameter", "tensor", "times"],
                    rows=rules,
                    code=["parameter", "tensor"],
                    note="One table per family; the way back is its inverse.",
                    fold=True,
                ),
            ],
        )

    @cell
    def to_orbax(self) -> Section:
        """Convert twice, with stacked parameters and with one entry per layer; streamed, one tensor in memory at a time."""
        from labkit.converters import convert

        rows = []
        for layout, scan in LAYOUTS.items():
            start = time.perf_counter()
            done = convert(self.source, self._folder(layout), scan=scan, force=True)
            self.seconds[f"convert, {layout}"] = time.perf_counter() - start
            rows.append([layout, done.tensors, done.parameters, f"{done.nbytes / 2**20:,.1f}", round(self.seconds[f"convert, {layout}"], 2), str(done.path)])
            self.record.outputs[layout] = str(done.path)
            for finding in done.findings:
                self.finding(**finding)
            self.gate(f"nothing was rounded, {layout}", not done.narrowed, len(done.narrowed), 0, "tensors stored with fewer bits than on disk")
        return Section(
            title="To Orbax",
            items=[Table(title="Checkpoints", columns=["layout", "tensors", "arrays", "MiB", "seconds", "directory"], rows=rows, code=["directory"])],
        )

    @cell
    def restore(self) -> Section:
        """The checkpoint restores by its own metadata; a wrong belief about it is refused, not obeyed."""
        from labkit.converters import read_metadata
        from labkit.converters.restore import check_belief
        from labkit.errors import InputError

        rows = []
        for layout, scan in LAYOUTS.items():
            metadata = read_metadata(self._folder(layout))
            try:
                check_belief(self._folder(layout), metadata, not scan)
                refusal = ""
            except InputError as error:
                refusal = error.what
            ours = metadata["fingerprint"] == self.source.fingerprint and metadata["scan"] == scan and metadata["family"] == self.family.name
            rows.append([layout, metadata["family"], metadata["scan"], metadata["fingerprint"][:12], refusal])
            self.gate(
                f"metadata tells the layout, {layout}",
                ours and bool(refusal),
                ours and bool(refusal),
                True,
                "family, layout and source fingerprint are stored, and the opposite layout is refused",
            )
        return Section(
            title="Metadata",
            items=[Table(title="What each checkpoint says of itself", columns=["layout", "family", "scan", "source", "asked for the other layout"], rows=rows)],
        )

    @cell
    def back(self) -> Section:
        """Export both checkpoints to safetensors directories."""
        from labkit.converters import export

        rows = []
        for layout in LAYOUTS:
            out = self.scratch / f"export-{layout}"
            shutil.rmtree(out, ignore_errors=True)
            start = time.perf_counter()
            done = export(self._folder(layout), out)
            self.seconds[f"export, {layout}"] = time.perf_counter() - start
            self.dropped = done.dropped
            rows.append(
                [layout, done.tensors, f"{done.nbytes / 2**20:,.1f}", len(done.shards), round(self.seconds[f"export, {layout}"], 2), "; ".join(done.notes)]
            )
        return Section(
            title="Back to safetensors", items=[Table(title="Exports", columns=["layout", "tensors", "MiB", "files", "seconds", "notes"], rows=rows)]
        )

    @cell
    def bit_for_bit(self) -> Section:
        """Every tensor of both exports against the source's bytes; and a control with one bit flipped, which must be seen."""
        from labkit.converters import compare_safetensors

        different: dict[str, dict[str, str]] = {}
        for layout in LAYOUTS:
            out, start = self.scratch / f"export-{layout}", time.perf_counter()
            found = compare_safetensors(self.source.tensors, out, ignore=set(self.dropped))
            self.seconds[f"compare, {layout}"] = time.perf_counter() - start
            different[layout] = {sentence.split()[0].rstrip(":"): sentence for sentence in found}
            self.gate(
                f"round trip is bit-exact, {layout}",
                not found,
                len(found),
                0,
                f"tensors of {len(self.source.tensors)} that differ in a bit, a dtype, a shape or by absence",
            )
        control = self._one_bit()
        self.gate(
            "a flipped bit is seen",
            control == 1,
            control,
            1,
            "control: one bit of one exported tensor is flipped, and the comparison must name that tensor and no other",
        )
        rows = [
            [
                name,
                info.dtype,
                "x".join(map(str, info.shape)),
                *("dropped" if name in self.dropped else "differs" if name in different[layout] else "equal" for layout in LAYOUTS),
            ]
            for name, info in self.source.tensors.items()
        ]
        for layout in LAYOUTS:
            shutil.rmtree(self.scratch / f"export-{layout}", ignore_errors=True)
        return Section(
            title="Bit for bit", items=[Table(title="Tensors", columns=["tensor", "dtype", "shape", *LAYOUTS], rows=rows, code=["tensor"], fold=True)]
        )

    def _one_bit(self) -> int:
        """Flip the lowest bit of the first byte of the last tensor in a copy of the scanned export's last shard, and count what the comparison names."""
        from labkit.converters import compare_safetensors
        from labkit.hf.tensors import TensorTable, read_table

        table = read_table(self.scratch / "export-scanned")
        name, info = min(table.items(), key=lambda item: item[1].nbytes)
        with open(info.shard, "r+b") as file:
            file.seek(info.begin)
            byte = file.read(1)
            file.seek(info.begin)
            file.write(bytes([byte[0] ^ 1]))
        one = TensorTable({name: self.source.tensors[name]})
        found = compare_safetensors(one, TensorTable({name: info}))
        return len([sentence for sentence in found if sentence.startswith(name)])

    @cell
    def timeline(self) -> Section:
        """How long each step took."""
        nbytes = self.source.tensors.nbytes / 1e6
        drawing = figures.durations(self.seconds, f"Round trip of {nbytes:,.1f} MB", "Conversion and export stream; the comparison reads both sides whole.")
        return Section(title="Timeline", items=[self.figure(drawing, "round_trip")])
