"""Phase 5: the model on a mesh of devices, in the eyes of the TPU compiler, and in training."""

import numpy as np

from labkit.errors import BlockedError, InputError
from labkit.lab import figures_scale as figures
from labkit.lab.phases.base import Phase, cell
from labkit.lab.phases.discover import subset_again
from labkit.lab.show import Item, Section, Table, Text, number

DEVICES = 8
MESHES = ((1, 8, 1, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 8, 1), (1, 1, 1, 8))
AXES = ("data", "fsdp", "tensor", "expert")


class Scale(Phase):
    """Sharding table, parity on meshes, routing imposed, the TPU compiler, a short training run."""

    number, name, title = 5, "scale", "meshes, the TPU compiler, training"
    cells = ("sharding", "meshes", "control", "routing", "compile", "gradients", "train")
    floors = ("hf", "layers", "models", "converters", "train", "scale", "parity")
    helpers = ("discover.py",)

    def __init__(
        self,
        model: str,
        revision: str = "",
        trust_remote_code: bool = False,
        topology: str = "v5e:2x4",
        mesh: str = "",
        batch: int = 8,
        length: int = 512,
        steps: int = 12,
    ):
        """topology: what is compiled for. mesh: like fsdp=4,tensor=2, chosen when empty. batch, length: of what is compiled. steps: of training."""
        super().__init__(model, revision, trust_remote_code, topology=topology, mesh=mesh, batch=batch, length=length, steps=steps)
        self.topology, self.mesh_text, self.batch, self.length, self.steps = topology, mesh, batch, length, steps

    @property
    def mixture(self) -> bool:
        """Whether any parameter belongs to an expert."""
        return any("experts" in row.path for row in self.placed)

    @cell
    def sharding(self) -> Section:
        """Where each parameter lies on a mesh of eight devices, from abstract construction."""
        from labkit.scale.sharding_table import sharding_table, spread_too_little

        sizes = dict(zip(AXES, MESHES[1]))
        self.placed = sharding_table(self.family, self.config, sizes)
        whole = spread_too_little(self.placed, sizes)
        names = ", ".join(whole[:3]) or "none is on every device whole"
        self.gate("every large weight is sharded", not whole, len(whole), 0, f"on {_named(MESHES[1])}; {names}")
        total, held = sum(row.nbytes for row in self.placed), sum(row.per_device for row in self.placed)
        rows = [[row.path, " × ".join(map(str, row.shape)), row.spec, row.shards, _mib(row.nbytes), _mib(row.per_device)] for row in self.placed]
        columns = ["parameter", "shape", "mesh axes", "shards", "MiB", "MiB per device"]
        note = f"{_mib(total)} MiB in all, {_mib(held)} per device: {total / held:.2f} of {DEVICES} times less."
        table = Table(title="Sharding by parameter", columns=columns, rows=rows, code=["parameter", "mesh axes"], note=note, fold=len(rows) > 24)
        return Section(title="Sharding", items=[self.figure(figures.mesh(sizes), "mesh"), table])

    @cell
    def meshes(self) -> Section:
        """Logits and gradients on each mesh against one device, in float64, and decoding through the cache."""
        from labkit.parity.worker import run_job

        with self.progress("meshes") as progress:
            job = {"kind": "meshes", "source": str(subset_again(self)), "meshes": [list(sizes) for sizes in MESHES]}
            self.on_meshes = run_job(job, progress=progress, devices=DEVICES)
        rows = []
        for row in self.on_meshes["rows"]:
            share = f"{row['bytes'] / row['whole']:.1%}" if row["bytes"] else None
            rows.append([_named(row["mesh"]), row["logits"], row["gradients"], row["decode"], _mib(row["bytes"]), share, row["reason"]])
            if row["reason"].startswith("not divisible"):
                continue
            errors = [error for error in (row["logits"], row["gradients"], row["decode"]) if error is not None]
            self.gate(
                f"mesh {_named(row['mesh'])} computes what one device does",
                row["passed"],
                max(errors, default=None),
                row["limit"],
                row["reason"] or "logits, every gradient, cached decoding; float64; bytes per device as planned",
            )
        columns = ["mesh", "logits", "gradients", "cached decoding", "MiB per device", "of the whole", ""]
        note = "Relative errors against one device, float64, on the subset; MiB of parameters, in float64."
        self.command("the same table, for several families", "labkit meshes TYPE ...")
        return Section(title="Parity on meshes", items=[Table(title="Meshes", columns=columns, rows=rows, note=note)])

    @cell
    def control(self) -> Section:
        """The control that must fail: the parts of one weight lie on each other's devices."""
        control = self.on_meshes["control"]
        if control is None:
            return Section(title="The control that must fail", items=[Text(words="Skipped: no mesh passed.")])
        self.gate(
            "the control is rejected, meshes",
            not control["passed"],
            control["error"],
            "> 1e-9",
            f"{control['change']} and everything else right must be seen",
        )
        words = "With {change}, everything else right, the same comparison gives {error}."
        return Section(title="The control that must fail", items=[Text(words=words, values={"change": control["change"], "error": control["error"]})])

    @cell
    def routing(self) -> Section:
        """A mixture in bfloat16 with its own routing, and with the reference's choices imposed: what is routing, what is arithmetic."""
        if not self.mixture:
            return Section(title="Frozen routing", items=[Text(words="Skipped: this model has no mixture layer.")])
        from labkit.parity.worker import run_job

        with self.progress("frozen routing") as progress:
            result = run_job({"kind": "frozen_topk", "source": str(subset_again(self))}, progress=progress)
        arrays, mean = result["arrays"], result["kl"].__getitem__
        shares = [share for _, share in result["agreement"]]
        drawing = figures.routing(shares, arrays["kl/free"].ravel(), arrays["kl/frozen"].ravel(), "bfloat16 against the reference's float32")
        experts = lambda chosen: ", ".join(map(str, chosen))
        flips = [[f["layer"], f["position"], f["margin"], f["noise"], experts(f["ours"]), experts(f["reference"])] for f in result["flips"]]
        self.learned(f"Mean KL in bfloat16 is {number(mean('free'))} nats with the model's own routing, {number(mean('frozen'))} with the reference's.")
        self.gate("imposed choices are followed", result["followed"], result["followed"], True, "every router took the recorded experts and weights")
        unknown = sum(flip["margin"] is None for flip in result["flips"])
        words = "every flip's margin is within twice the noise of its logits" + (f"; {unknown} by routers whose scores are not on record" if unknown else "")
        self.gate("flipped choices are ties", result["within_noise"] is not False, len(flips), None, words)
        kl = [[name, mean(key)] for name, key in (("our own routing", "free"), ("the reference's imposed", "frozen"), ("the reference's own bfloat16", "own"))]
        agreement = [[layer, f"{share:.2%}", f"{free:.2%}"] for (layer, share), (_, free) in zip(result["agreement"], result["free_agreement"])]
        columns = ["layer", "token", "margin", "noise", "ours instead", "the reference's"]
        note = "Margin: by how much the reference's logit of the expert left out exceeds that of the one taken instead."
        tables: list[Item] = [
            Table(title="Mean KL from the reference's float32, nats", columns=["bfloat16 with", "mean KL"], rows=kl),
            Table(title="Equal choices by layer", columns=["layer", "fed alike", "free run"], rows=agreement),
            Table(title="Flipped choices", columns=columns, rows=flips, note=note, fold=True),
        ]
        return Section(title="Frozen routing", items=[self.figure(drawing, "routing"), *tables])

    @cell
    def compile(self) -> Section:
        """The TPU compiler's view: memory, operations, collectives, a bound on time. No TPU is needed; libtpu is."""
        from labkit.scale.aot import CompileJob, check_job, compile_model

        config, mesh = self.source.config, self._mesh()
        job = CompileJob(
            model=self.source.name,
            model_type=config.model_type,
            described=config.described,
            defaults=config.defaults,
            topology=self.topology,
            mesh=mesh,
            batch=self.batch,
            length=self.length,
        )
        shown = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        self.command("the TPU compiler's report, for any slice of chips", f"labkit compile {self.named} --topology {self.topology} --mesh {shown}")
        try:
            check_job(job)
        except BlockedError as absent:
            return Section(title="TPU compiler", items=[Text(words="Skipped: {what}. {next}.", values={"what": absent.what, "next": absent.next})])
        with self.progress("TPU compiler"):
            report = compile_model(job)
        for phase, gate in report.gates:
            flops = report.phase(phase).flops
            told = "; ".join(flops.explained) if flops is not None and not gate.passed and "operations" in gate.name else ""
            self.gate(f"{gate.name}, {phase}", gate.passed, gate.detail, None, told or f"the compiled program on {self.topology}")
        return Section(title=f"TPU compiler, {self.topology}", items=_compiled(self, report))

    def _mesh(self) -> dict[str, int]:
        from labkit.lab.compile import parse_mesh
        from labkit.scale.chips import parse_topology

        if self.mesh_text:
            return parse_mesh(self.mesh_text)
        topology = parse_topology(self.topology)
        devices = topology.chips * topology.chip.devices_per_chip
        return {"fsdp": devices // 2, "expert": 2} if self.mixture and devices % 2 == 0 else {"fsdp": devices}

    @cell
    def gradients(self) -> Section:
        """The training loss and every gradient against the reference's, in float64."""
        from labkit.parity.worker import run_job

        with self.progress("gradients") as progress:
            result = run_job({"kind": "gradients", "source": str(subset_again(self))}, progress=progress)
        worst, where = result["worst"]
        wrong = result["control"]
        self.gate("the control is rejected, gradients", wrong["error"] > 1e-9, wrong["error"], "> 1e-9", f"{wrong['change']} must be seen")
        self.gate("loss and every gradient are the reference's", worst <= 1e-9, worst, 1e-9, f"largest relative error, float64, subset: {where}")
        rows = [["loss", result["loss"]], ["auxiliary loss", result["aux_loss"]], ["largest of the gradients", max(result["errors"].values())]]
        errors = sorted(result["errors"].items(), key=lambda entry: -entry[1])
        tables: list[Item] = [
            Table(title="Against the reference's backward pass", columns=["of", "relative error"], rows=rows),
            Table(title="By parameter", columns=["parameter", "relative error"], rows=[list(e) for e in errors], code=["parameter"], fold=True),
        ]
        return Section(title="Loss and gradients", items=tables)

    @cell
    def train(self) -> Section:
        """A short fine-tuning of the subset on its own prompts: the loss must fall, and routers must stay alive."""
        from labkit.hf.prompts import make_prompts
        from labkit.lab.train import train
        from labkit.train.settings import TrainSettings

        out, data = self.scratch / "training", self.scratch / "training.npy"
        prompts = make_prompts(self.source.path, self.source.config.effective["vocab_size"], (256, 256, 256, 256))
        np.save(data, np.concatenate([tokens for _, tokens in prompts]).astype(np.int32))
        _remove(out)
        settings = TrainSettings(steps=self.steps, batch=4, length=64, learning_rate=3e-3, warmup=2, checkpoint_every=self.steps)
        with self.progress("training"):
            done = train(str(subset_again(self)), data, out, settings)
        from labkit.train.metrics import read_metrics

        records = read_metrics(out / "metrics.jsonl")
        losses = [record["loss"] for record in records]
        self.gate("the loss falls", losses[-1] < losses[0], losses[-1], f"< {number(losses[0])}", f"{self.steps} updates of the subset")
        entropy = [record["router_entropy"] for record in records if "router_entropy" in record]
        if entropy:
            self.gate("routers stay finite", bool(np.isfinite(entropy).all()), entropy[-1], None, "entropy of the routers, nats, at the last update")
        _remove(out)
        columns = ["step", "loss", "gradient norm", "router entropy", "tokens/s"]
        rows = [[r["step"], r["loss"], r["gradient_norm"], r.get("router_entropy"), r["tokens_per_second"]] for r in records]
        self.command("train, and go on after a stop", f"labkit train {self.named} --data TEXT --out OUT")
        drawing = figures.loss_curve(losses, f"Training loss, {self.steps} updates of the subset")
        table = Table(title="Updates", columns=columns, rows=rows, fold=True, note=f"Compiled in {done.compile_seconds:.1f} s.")
        return Section(title="Training", items=[self.figure(drawing, "loss"), table])


def _compiled(phase: Scale, report) -> list[Item]:
    """Figures and tables of a compiler's report."""
    compiled = [p for p in report.phases if p.memory is not None]
    words = f"{report.layers}; {report.parameters:,} parameters; {report.chips} chips; " + ", ".join(f"{k} {v}" for k, v in report.versions.items())
    memory = [
        {
            "name": p.phase,
            "arguments": p.memory.arguments,
            "temporaries": p.memory.temporaries,
            "outputs": p.memory.outputs - p.memory.aliased,
            "limit": p.memory.available,
        }
        for p in compiled
    ]
    moved = [{"name": p.phase, "kind": f"{row.kind}, {row.part}", "moves": row.moves, "bytes": row.bytes} for p in compiled for row in p.collectives]
    bounds = [{"name": p.phase, "compute": p.roofline.compute, "memory": p.roofline.memory, "network": p.roofline.links} for p in compiled if p.roofline]
    rows = [
        [
            p.phase,
            p.status,
            round(p.compile_seconds, 1),
            _mib(p.memory.peak) if p.memory else None,
            f"{p.flops.total:.3e}" if p.flops else None,
            p.flops.ratio if p.flops else None,
            p.roofline.bound_by if p.roofline else None,
        ]
        for p in report.phases
    ]
    columns = ["program", "status", "compile, s", "peak MiB", "FLOP per device", "over formula", "bound by"]
    items: list[Item] = [Text(words=words), Table(title="Programs", columns=columns, rows=rows)]
    if memory:
        items.append(phase.figure(figures.memory(memory, f"Memory of one device, {report.topology}"), "hbm"))
    if moved:
        items.append(phase.figure(figures.collectives(moved, f"What moves between devices, {report.topology}"), "collectives"))
    if bounds:
        items.append(phase.figure(figures.roofline(bounds, f"Roofline, {report.topology}"), "roofline"))
    return items


def _named(sizes) -> str:
    """(1, 2, 2, 2) as people read it."""
    if len(sizes) != len(AXES):
        raise InputError(f"a mesh has the axes {', '.join(AXES)}, not {sizes}")
    return " ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes) if size > 1) or "one device"


def _mib(count: float) -> float:
    return round(count / 2**20, 3)


def _remove(folder) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
