"""`labkit diagnose`: where a port first leaves the reference, which components are at fault alone, why, and where decoding leaves the full forward."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import BlockedError
from labkit.lab.show import Item, Section, Table, Text
from labkit.lab.slices import describe
from labkit.port.slices import SliceInfo

EXACT_PARAMETERS = 1_000_000_000
CACHE_LENGTH = 20


@dataclass
class Diagnosis:
    """result: of the `components` job on `on` ("model" or "subset"), of `slice`."""

    model: str
    family: str
    on: str
    slice: SliceInfo
    result: dict

    @property
    def exit_code(self) -> int:
        return 0 if self.result["passed"] else 1

    def as_json(self) -> dict:
        """The object of the design, and what the diagnosis adds: first divergence, isolated faults, modules without a counterpart."""
        table = self.result["table"]
        worst = max(table["free_errors"].values(), default=None)
        return {
            "model": self.model,
            "family": self.family,
            "status": "pass" if self.result["passed"] else "fail",
            "verdicts": {"components": {"passed": table["passed"], "max_rel_error": worst}},
            "gates": [],
            "findings": [*self.result["diagnosis"], *self.result["findings"]],
            "on": self.on,
            "slice": self.slice.kind,
            "slice_folder": str(self.slice.folder),
            "first_divergence": table["first_divergence"],
            "isolated_faults": table["isolated_faults"],
            "missing": list(table["missing"]),
            "checks": self.result.get("checks", {}),
            "error": None,
        }

    def plain(self) -> str:
        table = self.result["table"]
        first, items = table["first_divergence"], describe(self.slice)[:1]
        if table["passed"]:
            worst = max((row["isolated"] for row in table["rows"]), default=0.0)
            items.append(Text(words="No component leaves the reference; the largest isolated relative error is {worst}.", values={"worst": worst}))
        elif first is not None:
            words = "The free run first leaves the reference at {place} ({kind}, {what}): relative error {error}."
            items.append(Text(words=words, values={key: first[key] for key in ("place", "kind", "what", "error")}))
        checks = self.result.get("checks", {})
        # Against the reference a wrong full forward is wrong with padding too; against our own full forward the cache is judged apart from it.
        own = {name: error for name, error in checks.items() if table["passed"] or name.startswith("cache")}
        wrong = {name: error for name, error in own.items() if not error <= table["limit"]}
        if wrong:
            items.append(
                Table(title="Wrong on the way through the cache or with padding", columns=["check", "relative error"], rows=[list(w) for w in wrong.items()])
            )
        elif own:
            words = "Decoding through the cache agrees with the full forward; the largest relative error is {worst}."
            items.append(Text(words=words, values={"worst": max(own.values())}))
        items += self._faults(table)
        for found in self.result["diagnosis"]:
            sure = "" if found["certain"] else " (a hint: no trial confirmed it)"
            values = {key: found[key] for key in ("component", "cause", "evidence", "fix")} | {"lines": lines_of(found)}
            items.append(Text(words=f"{{component}}: {{cause}}{sure}. {{evidence}}. Fix: {{fix}}.{{lines}}", values=values))
        return Section(title=f"{self.model}: {self.family}, on the {self.on}", items=items).plain()

    def _faults(self, table) -> list[Item]:
        rows = [[fault["place"], fault["what"], fault["kind"], fault["error"]] for fault in table["isolated_faults"][:20]]
        items: list[Item] = []
        if rows:
            note = "Each was given the reference's own input." + (f" {len(table['isolated_faults'])} in all." if len(table["isolated_faults"]) > 20 else "")
            items.append(Table(title="Faults of their own", columns=["place", "what", "component", "relative error"], rows=rows, code=["place"], note=note))
        if table["missing"]:
            items.append(Text(words="Modules of the reference without a counterpart: {names}.", values={"names": ", ".join(table["missing"][:10])}))
        return items


def lines_of(found: dict) -> str:
    """The reference's line and ours of a finding, with the statement of the slice: one sentence that begins with a space, or nothing."""
    if not (found["reference"] or found["ours"]):
        return ""
    sides = [f"reference {found['reference']}"] if found["reference"] else []
    if found["ours"]:
        through = f" (through {found['through']})" if found["through"] else ""
        sides.append(f"ours {found['ours']}{through}" + (f": {found['statement']}" if found["statement"] else ""))
    text = ", ".join(sides)
    return f" {text[0].upper()}{text[1:]}."


def diagnose(model: str, *, revision: str = "", trust_remote_code: bool = False, say=lambda line: None) -> Diagnosis:
    """The component checklist of a model and its decoding through the cache, in float64: on all of it below 1B parameters, else on its representative subset.

    Raises BlockedError when there is no slice and none can be made; InputError for a source that cannot be opened.
    """
    from labkit.hf import open_source
    from labkit.hf.facts import walls
    from labkit.models import get_family, read_config
    from labkit.parity.worker import run_job
    from labkit.port.slices import ensure_slice

    source = open_source(model, revision or None, trust_remote_code=trust_remote_code)
    for wall in walls(source):
        raise BlockedError(wall.what, wall.why, wall.next)
    slice = ensure_slice(source, lambda fraction, text: say(text)).require()
    job = {"kind": "components", "control": False, "cache_length": CACHE_LENGTH}
    with tempfile.TemporaryDirectory(prefix="labkit-diagnose-") as folder:
        on, path = "model", source.path
        if source.tensors.size > EXACT_PARAMETERS:
            from labkit.hf.subset import write_subset

            config, _ = read_config(get_family(source.config.model_type), source.config.effective, source.config.defaults)
            on, path = "subset", write_subset(source, config.plan.representative(), Path(folder) / "subset")
        result = run_job(job | {"source": str(path)}, progress=lambda fraction, text: say(text))
    result.pop("arrays", None)
    return Diagnosis(source.name, source.config.model_type, on, slice, result)
