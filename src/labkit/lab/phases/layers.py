"""Phase 2: each component of the slice against the reference's own module, isolated and in float64."""

from concurrent.futures import ThreadPoolExecutor

from labkit.lab import figures
from labkit.lab.phases.base import Phase, cell
from labkit.lab.phases.discover import subset_again
from labkit.lab.phases.matrix import by_layer
from labkit.lab.show import Section, Table, Text, number


class Layers(Phase):
    """The component checklist on a tiny configuration and on the subset's real weights."""

    number, name, title = 2, "layers", "every component against the reference's own module, isolated, in float64"
    cells = ("measure", "tiny", "subset", "by_layer", "control", "conformance")
    floors = ("hf", "layers", "models", "converters", "train", "scale", "parity")
    helpers = ("discover.py", "matrix.py")

    def __init__(self, model: str, revision: str = "", trust_remote_code: bool = False, batch: int = 2, length: int = 24, limit: float = 1e-9):
        """batch, length: tokens of the comparison. limit: largest relative error."""
        super().__init__(model, revision, trust_remote_code, batch=batch, length=length, limit=limit)
        self.batch, self.length, self.limit = batch, length, limit
        self.results: dict[str, dict] = {}

    @cell
    def measure(self) -> Section:
        """Run both comparisons, each in a process of its own with float64 on: a tiny random configuration of the family, and the subset's real weights."""
        from labkit.parity.worker import run_job

        subset = subset_again(self)
        require_finite(self.source, subset)
        jobs = {"tiny": f"tiny:{self.source.config.model_type}", "subset": str(subset)}
        jobs = {on: {"kind": "components", "source": source, "batch": self.batch, "length": self.length, "limit": self.limit} for on, source in jobs.items()}
        with ThreadPoolExecutor(len(jobs)) as pool, self.progress("components") as progress:
            self.results = dict(zip(jobs, pool.map(lambda job: run_job(job, progress=progress), jobs.values())))
        for result in self.results.values():
            for found in result["findings"]:
                self.finding(**found)
        rows = [[on, jobs[on]["source"], f"{self.batch} x {self.length}", result["table"]["passed"], result["seconds"]] for on, result in self.results.items()]
        return Section(title="Measure", items=[Table(title="Comparisons", columns=["on", "source", "tokens", "passed", "seconds"], rows=rows, code=["source"])])

    @cell
    def tiny(self) -> Section:
        """The checklist on a tiny random configuration: no size coincides with another, no value is neutral."""
        return self._checklist("tiny")

    @cell
    def subset(self) -> Section:
        """The checklist on the subset's real weights."""
        return self._checklist("subset")

    @cell
    def by_layer(self) -> Section:
        """Relative error by layer and component on the subset: free run and isolated."""
        table = self.results["subset"]["table"]
        free, isolated, components, layers = by_layer(table["free_errors"], table["isolated_errors"])
        drawing = figures.activation_errors(free, isolated, components, layers, self.limit, "Relative error by layer and component, subset, float64")
        return Section(title="By layer", items=[self.figure(drawing, "layers_by_layer")])

    @cell
    def control(self) -> Section:
        """The negative control: the same comparison with one wrong number must fail."""
        items = []
        for on, result in self.results.items():
            control = result["control"]
            worst = max(control["isolated"].values())
            rows = [[kind, result_of(result, kind), value] for kind, value in control["isolated"].items()]
            items.append(
                Table(title=f"{on}: {control['change']}", columns=["component", "this port", "the control"], rows=rows, note="Worst isolated relative error.")
            )
            self.gate(
                f"the control is rejected, {on}",
                not control["passed"],
                worst,
                f"> {number(self.limit)}",
                f"a port with {control['change']} must exceed the limit; red: {', '.join(control['red'])}",
            )
        return Section(
            title="Negative control",
            items=[Text(words="A check that nothing fails proves nothing: the control is this port with one number changed."), *items],
        )

    @cell
    def conformance(self) -> Section:
        """The eight checks that every slice passes, on the tiny configuration, over devices that this host pretends to have."""
        from labkit.parity.conformance.suite import MEANINGS
        from labkit.parity.worker import run_job

        with self.progress("conformance") as progress:
            job = {"kind": "conformance", "source": f"tiny:{self.source.config.model_type}", "checks": list(range(1, 9))}
            checks = run_job(job, progress=progress, devices=8)["conformance"]["checks"]
        for check in checks:
            (name, value), reason = MEANINGS[check["number"]], check["reason"]
            told = f"{reason or 'tiny configuration'}; value: {value}; conformance check {check['number']}"
            self.gate(name, check["passed"], check["value"], check["limit"] or None, told)
            if not check["passed"]:
                fix = f"look at {check['place']}" if check["place"] else ""
                self.finding(check["name"], reason, f"conformance check {check['number']}, tiny configuration", fix)
        rows = [[c["number"], MEANINGS[c["number"]][0], c["passed"], c["value"], c["limit"], c["seconds"], c["note"]] for c in checks]
        columns = ["check", "what", "holds", "value", "limit", "seconds", "declared"]
        self.command("the whole suite and its perturbations", f"labkit conform {self.source.config.model_type}")
        return Section(title="Conformance", items=[Table(title="Eight checks, tiny configuration", columns=columns, rows=rows)])

    def _checklist(self, on: str) -> Section:
        table = self.results[on]["table"]
        rows = [[r["kind"], r["isolated"], r["free"], r["compared"], r["passed"], r["reference"], r["ours"]] for r in table["rows"]]
        worst = max((r["isolated"] for r in table["rows"]), default=None)
        self.gate(
            f"every component is the reference's, {on}",
            table["passed"],
            worst,
            self.limit,
            "worst isolated relative error over the checklist; a missing module fails too",
        )
        self.diagnosed(self.results[on], f"component checklist, {on}")
        items = [
            Table(
                title=f"Component checklist, {on}",
                columns=["component", "isolated", "free run", "places", "done", "reference", "ours"],
                rows=rows,
                code=["reference", "ours"],
                note="Relative errors, float64 on both sides. Isolated: fed with the reference's recorded input; free run: fed by our own previous layer.",
            )
        ]
        return Section(title=f"Checklist, {on}", items=items)


def require_finite(source, subset) -> None:
    """Read the subset's tensors where they come from: NaN and infinity are refused by name and index, as conversion does, before they pass for a fault."""
    from labkit.converters.loading import FiniteReader
    from labkit.hf import open_source

    read = FiniteReader(source.tensors, source.path)
    for name in open_source(str(subset)).tensors:
        read(name)


def result_of(result: dict, kind: str):
    return next((r["isolated"] for r in result["table"]["rows"] if r["kind"] == kind), None)
