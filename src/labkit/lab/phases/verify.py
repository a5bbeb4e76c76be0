"""Phase 4: the three verdicts, on the subset and then on the full model, from the checkpoint that phase 3 wrote."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from labkit.lab import figures
from labkit.lab.phases.base import Phase, cell
from labkit.lab.phases.discover import subset_again
from labkit.lab.phases.matrix import by_layer
from labkit.lab.phases.reach import reach
from labkit.lab.phases.rounding import rounding_table
from labkit.lab.show import Item, Section, Table, Text, number

EXACT_PARAMETERS = 1_000_000_000
SIDE_BY_SIDE = 300_000_000
LOOSE = {"a limit of 1e-3": 1e-3, "a limit of 1e-4": 1e-4}
ON = ("subset", "full")


class Verify(Phase):
    """Exact, float32 and bfloat16; greedy decoding; the cache; activations; goldens; the control that must fail."""

    number, name, title = 4, "verify", "the three verdicts, on the subset and on the full model"
    cells = (
        "exact_subset",
        "float32_subset",
        "bfloat16_subset",
        "exact_full",
        "activations",
        "cache",
        "float32_full",
        "greedy",
        "bfloat16_full",
        "goldens",
        "control",
    )
    floors = ("hf", "layers", "models", "converters", "parity")
    helpers = ("discover.py", "matrix.py", "reach.py", "rounding.py")

    def __init__(
        self, model: str, revision: str = "", trust_remote_code: bool = False, longest: int = 256, greedy_tokens: int = 16, golden: str = "", keep: bool = False
    ):
        """longest: the longest prompt at least, 200 or more. greedy_tokens: from each prompt. golden: a .jsonl from elsewhere. keep: scratch on failure."""
        super().__init__(model, revision, trust_remote_code, longest=longest, greedy_tokens=greedy_tokens, golden=golden, keep=keep)
        self.reach = reach(self.source, longest, greedy_tokens, self.records)
        self.lengths, self.greedy_tokens, self.golden, self.keep = (6, 64, self.reach.longest), greedy_tokens, golden, keep
        self._tell_reach()
        self.exact: dict[str, dict] = {}
        self.float32: dict[str, object] = {}
        self._loaded: dict[tuple[str, str], object] = {}
        self._pool, self._jobs = ThreadPoolExecutor(2), {}
        self.command("the same verdicts as one JSON object", f"labkit check {self.named} --json")

    @classmethod
    def refuse(cls, parameters: dict, source) -> None:
        """A file of goldens that is not there, or whose first line is none."""
        if parameters.get("golden"):
            from labkit.hf.goldens import check_goldens

            check_goldens(Path(parameters["golden"]).expanduser(), vocab_size=source.config.effective.get("vocab_size"))

    def _tell_reach(self) -> None:
        for words in self.reach.left:
            self.pitfall(f"{words}.")
        self.record.outcome["unreached"] = self.reach.left

    # -- what the verdicts are taken on ----------------------------------------------------------------------------------------------------------------

    def directory(self, on: str) -> Path:
        return subset_again(self) if on == "subset" else self.source.path

    def reference(self, on: str, mode: str):
        """The reference in a mode, loaded once."""
        from labkit.hf.reference import Reference

        if (on, mode) not in self._loaded:
            loaded = self._loaded[on, mode] = Reference.load(self.directory(on), mode, trust_remote_code=self.source.config.trust_remote_code)
            for text in loaded.findings:
                self.finding("reference", text)
        return self._loaded[on, mode]

    def ours(self, on: str, dtype: str):
        """Our model: the subset straight from its tensors, the full model restored from the scanned Orbax checkpoint of phase 3."""
        import jax.numpy as jnp

        from labkit.converters import load_model, restore
        from labkit.hf import open_source

        dtype = getattr(jnp, dtype)
        if on == "subset":
            return load_model(open_source(str(self.directory(on))), dtype=dtype)[0]
        return restore(self.records.read(3).outputs["scanned"], dtype=dtype, source=self.source)[0]

    def prompts(self, lengths=None) -> list[tuple[str, np.ndarray]]:
        from labkit.hf.prompts import make_prompts

        return make_prompts(self.source.path, self.source.config.effective["vocab_size"], lengths or self.lengths)

    # -- exact -------------------------------------------------------------------------------------------------------------------------------------------

    @cell
    def exact_subset(self) -> Section:
        """float64 on both sides, on the subset."""
        return self._exact("subset")

    @cell
    def exact_full(self) -> Section:
        """float64 on both sides, on the full model when it has under a billion parameters."""
        if self.source.tensors.size >= EXACT_PARAMETERS:
            words = (
                f"The model has {self.source.tensors.size:,} parameters; in float64 both sides run up to {EXACT_PARAMETERS:,}. "
                "The subset's exact verdict and the float32 verdict stand for it."
            )
            return Section(title="Exact, full model", items=[Text(words=words)])
        return self._exact("full")

    def _exact(self, on: str) -> Section:
        from labkit.parity.verdicts import exact_verdict
        from labkit.parity.worker import run_job

        with self.progress(f"exact, {on}") as progress:
            if on not in self._jobs:
                # Each job is a process of its own; where both models fit in memory together they run side by side, one core each.
                both = ON if self.source.tensors.size < SIDE_BY_SIDE else (on,)
                for name in both:
                    job = {"kind": "exact", "source": str(self.directory(name)), "lengths": list(self.lengths)}
                    self._jobs[name] = self._pool.submit(run_job, job, progress=progress)
            result = self.exact[on] = self._jobs[on].result()
        verdict = exact_verdict(result)
        places = len(result["table"]["free_errors"])
        self.verdict(
            "exact",
            on,
            verdict.passed,
            verdict.value,
            verdict.limit,
            "largest relative error, float64 on both sides",
            f"{places} names, {len(result['prompts'])} prompts of up to {self.reach.longest} tokens, cache and padding",
        )
        self.record.outcome.setdefault("exact", {"passed": True, "max_rel_error": 0.0})
        self.record.outcome["exact"]["passed"] &= verdict.passed
        self.record.outcome["exact"]["max_rel_error"] = max(self.record.outcome["exact"]["max_rel_error"], verdict.value)
        for found in result["findings"]:
            self.finding(**found)
        self.diagnosed(result, f"exact, {on}")
        rows = [[p["length"], p["rel_error"], p["max_kl"], f"{p['top_1']:.0%}"] for p in result["prompts"]]
        tables = [
            Table(title="Logits by prompt", columns=["tokens", "relative error", "max KL, nats", "first choice agrees"], rows=rows),
            Table(
                title="Other ways through the same function",
                columns=["check", "relative error"],
                rows=[[name, value] for name, value in result["checks"].items()],
            ),
        ]
        told = [Text(words=f"{words}.") for words in self.reach.told]
        return Section(title=f"Exact, {'full model' if on == 'full' else on}", items=[*tables, *told])

    @cell
    def activations(self) -> Section:
        """Relative error of every recorded name by layer and component, free run and isolated, float64."""
        on = "full" if "full" in self.exact else "subset"
        table = self.exact[on]["table"]
        free, isolated, components, layers = by_layer(table["free_errors"], table["isolated_errors"])
        rows = [[r["kind"], r["isolated"], r["free"], r["compared"], r["passed"]] for r in table["rows"]]
        if table["first_divergence"]:
            fault = table["first_divergence"]
            self.finding(
                fault["place"],
                f"the free run leaves the limit here first ({fault['kind']})",
                f"relative error {fault['error']:.2e}, {on}",
                "run phase 2 on a subset with this layer",
            )
        drawing = figures.activation_errors(free, isolated, components, layers, table["limit"], f"Relative error by layer and component, {on} model, float64")
        worst = Table(title="Worst place of each component", columns=["component", "isolated", "free run", "places", "passed"], rows=rows)
        return Section(title="Activations", items=[self.figure(drawing, "activations"), worst])

    @cell
    def cache(self) -> Section:
        """Decoding with the KV cache against the full forward at every step, in float64."""
        rows = []
        for on, result in self.exact.items():
            own = {name: error for name, error in result["checks"].items() if name.startswith("cache")}
            rows += [[on, name.removeprefix("cache: "), error] for name, error in own.items()]
            self.gate(
                f"decode with cache equals the full forward, {on}",
                bool(own) and max(own.values()) <= 1e-9,
                max(own.values(), default=None),
                1e-9,
                "every step, prefill in one and two pieces, with and without left padding",
            )
        note = "steps: one prefill, then single tokens; pieces: prefill in two pieces; padded: one row moved right by masked tokens."
        return Section(title="KV cache", items=[Table(title="Cache against full forward", columns=["on", "fed as", "relative error"], rows=rows, note=note)])

    # -- float32 -----------------------------------------------------------------------------------------------------------------------------------------

    @cell
    def float32_subset(self) -> Section:
        """What float32 hardware computes, on the subset: KL per position, teacher-forced, and greedy tokens."""
        return self._float32("subset")

    @cell
    def float32_full(self) -> Section:
        """The same on the full model, restored from its Orbax checkpoint."""
        return self._float32("full")

    def _float32(self, on: str) -> Section:
        from labkit.parity.verdicts import float32_verdict

        prompts = self.prompts()
        model, references = self.ours(on, "float32"), (self.reference(on, "float32"), self.reference(on, "exact"))
        with self.progress(f"float32, {on}") as progress:
            verdict = self.float32[on] = float32_verdict(model, *references, [tokens for _, tokens in prompts], steps=self.greedy_tokens, progress=progress)
        self._loaded.pop((on, "exact"))
        greedy = verdict.details["greedy"]
        said = f"{greedy['matched']} of {greedy['tokens']} greedy tokens identical" + (f", {len(greedy['ties'])} ties" if greedy["ties"] else "")
        self.verdict("float32", on, verdict.passed, verdict.value, verdict.limit, "largest KL of any position, nats", said)
        if on == "full" or "float32" not in self.record.outcome:
            self.record.outcome["float32"] = {
                "passed": verdict.passed,
                "max_kl": verdict.value,
                "greedy": {"tokens": greedy["tokens"], "matched": greedy["matched"], "ties": len(greedy["ties"])},
            }
        rows = [[p["length"], p["max"], p["mean"], f"{p['top_1']:.1%}", p["max_difference"], p["noise"]] for p in verdict.details["prompts"]]
        series = {f"{len(tokens)} tokens": verdict.details["arrays"][f"kl/{i}"] for i, (_, tokens) in enumerate(prompts)}
        drawing = figures.kl_by_position(series, verdict.limit, LOOSE, f"KL per position, float32, {on} model")
        columns = ["tokens", "max KL, nats", "mean KL, nats", "first choice agrees", "largest logit difference", "noise"]
        note = f"Matmul precision: {verdict.details['matmul_precision']}. Noise: ten times the reference's own float32 error, in logits."
        table = Table(title="By prompt", columns=columns, rows=rows, note=note)
        return Section(title=f"float32, {'full model' if on == 'full' else on}", items=[self.figure(drawing, f"kl_float32_{on}"), table])

    @cell
    def greedy(self) -> Section:
        """Greedy decoding on both sides, with the KV cache on ours."""
        items: list[Item] = []
        for on in ON:
            result = self.float32[on].details["greedy"]
            count, matched, ties = result["tokens"], result["matched"], len(result["ties"])
            self.gate(
                f"greedy tokens are the reference's, {on}",
                matched + ties == count and not result["splits"],
                matched,
                count,
                f"{self.greedy_tokens} tokens from each prompt; {ties} ties, where the reference's own two best are closer than the noise",
            )
            for split in result["splits"]:
                self.finding(
                    "greedy decoding",
                    f"split at step {split['step']}: ours {split['ours']}, the reference's {split['reference']}",
                    f"gap {split['gap']:.2e}, noise {split['noise']:.2e}, {on}",
                )
        shown = self.float32["full"].details["greedy"]["prompts"]
        longest = shown[-1]
        words = self._words(longest["reference"])
        drawing = figures.greedy_strip(
            longest["ours"], longest["reference"], [t["step"] for t in longest["ties"]], words or (), f"Greedy tokens after {longest['length']} tokens of text"
        )
        items.append(self.figure(drawing, "greedy"))
        rows = [
            [r["length"], r["matched"], r["tokens"], len(r["ties"]), "".join(self._words(r["reference"])) or " ".join(map(str, r["reference"]))] for r in shown
        ]
        items.append(
            Table(
                title="Full model",
                columns=["prompt tokens", "identical", "decoded", "ties", "the reference's continuation"],
                rows=rows,
                code=["the reference's continuation"],
            )
        )
        if ties_ := [[r["length"], t["step"], t["gap"], t["noise"]] for r in shown for t in r["ties"]]:
            items.append(Table(title="Ties", columns=["prompt tokens", "step", "gap", "noise"], rows=ties_))
        return Section(title="Greedy decoding", items=items)

    def _words(self, tokens) -> list[str]:
        from labkit.hf.tokenizer import decode, has_tokenizer

        return [decode(self.source, [token]) for token in tokens] if has_tokenizer(self.source) else []

    # -- bfloat16, goldens, control ------------------------------------------------------------------------------------------------------------------------

    @cell
    def bfloat16_subset(self) -> Section:
        """bfloat16 on the subset: our distance from the reference's float32, held to the reference's own."""
        return self._bfloat16("subset")

    @cell
    def bfloat16_full(self) -> Section:
        """bfloat16 on the full model."""
        return self._bfloat16("full")

    def _bfloat16(self, on: str) -> Section:
        from labkit.parity.verdicts import BFLOAT16_RATIO_LIMIT, bfloat16_verdict

        tokens = np.stack([tokens for _, tokens in self.prompts((256, 256))])
        ours = self.ours(on, "bfloat16")
        verdict = bfloat16_verdict(ours, self.reference(on, "bfloat16"), self.reference(on, "float32"), tokens)
        rounding = [rounding_table(self, ours)] if on == "subset" else []
        self._loaded.pop((on, "bfloat16"))
        details = verdict.details
        ratio = details["ratio"] if np.isfinite(details["ratio"]) else "inf"
        self.verdict(
            "bfloat16",
            on,
            verdict.passed,
            ratio,
            BFLOAT16_RATIO_LIMIT,
            "our mean KL as a multiple of the reference's own bfloat16",
            f"{details['positions']} positions, ours {number(verdict.value)} nats",
        )
        if on == "full" or "bfloat16" not in self.record.outcome:
            self.record.outcome["bfloat16"] = {
                "passed": verdict.passed,
                "mean_kl": verdict.value,
                "limit": verdict.limit,
                "ratio": ratio,
                "positions": details["positions"],
            }
        sides = {"ours": details["ours"], "the reference's own": details["reference"]}
        rows = [[side, s["mean"], s["median"], s["p99"], s["max"], f"{s['top_1']:.1%}"] for side, s in sides.items()]
        columns = ["bfloat16 against float32", "mean KL, nats", "median", "99th percentile", "max", "first choice agrees"]
        note = "No fixed limit can gate bfloat16: the reference itself is this far from its float32."
        return Section(
            title=f"bfloat16, {'full model' if on == 'full' else on}",
            items=[Table(title=f"{details['positions']} positions", columns=columns, rows=rows, note=note), *rounding],
        )

    @cell
    def goldens(self) -> Section:
        """Write goldens, and verify against them (and against a golden from elsewhere) as a machine without PyTorch would."""
        from labkit.hf.goldens import make_goldens, read_goldens, write_goldens
        from labkit.parity.verdicts import golden_verdict

        path = self.records.folder / "goldens.jsonl"
        made = make_goldens(
            self.reference("full", "float32"), self.prompts(), steps=self.greedy_tokens, fingerprint=self.source.fingerprint, model=self.source.name
        )
        write_goldens(path, made)
        self._loaded.clear()
        vocab, model, rows = self.source.config.effective["vocab_size"], self.ours("full", "float32"), []
        for name, file in {"our own": path, **({"given": Path(self.golden).expanduser()} if self.golden else {})}.items():
            verdict = golden_verdict(model, read_goldens(file, vocab_size=vocab))
            self.gate(
                f"goldens hold, {name}",
                verdict.passed,
                verdict.value,
                verdict.limit,
                "largest KL at the stored positions, and the stored greedy tokens; no PyTorch needed",
            )
            rows += [
                [name, row["length"], row["max_kl"], row.get("greedy_matched"), row.get("greedy_tokens"), row["dtype"]] for row in verdict.details["prompts"]
            ]
        self.command("verify against goldens, also those made elsewhere", f"labkit check {self.named} --golden FILE.jsonl")
        table = Table(title="Goldens", columns=["goldens", "tokens", "max KL, nats", "greedy identical", "greedy stored", "reference in"], rows=rows)
        where = f"handovers/{path.parent.name}/{path.name}"
        words = Text(words="One JSON object per line with prompt, tokens and logits, in {path}.", values={"path": where})
        return Section(title="Goldens", items=[table, words])

    @cell
    def control(self) -> Section:
        """The negative control: a port with one wrong number, which the exact verdict must reject, and what looser limits would have said."""
        rows = []
        for on, result in self.exact.items():
            control = result["control"]
            self.gate(
                f"the control is rejected, {on}",
                not control["passed"],
                control["rel_error"],
                f"> {number(result['limit'])}",
                f"a port with {control['change']} and everything else right must exceed the limit",
            )
            rows.append(
                [
                    on,
                    control["change"],
                    result["max_rel_error"],
                    control["rel_error"],
                    control["max_kl"],
                    *("passes" if control["max_kl"] <= limit else "rejects" for limit in LOOSE.values()),
                ]
            )
            if on == list(self.exact)[-1]:
                loose = [name for name, limit in LOOSE.items() if control["max_kl"] <= limit]
                # Beside a port that failed, what a loose limit lets pass proves nothing: the port itself is the example.
                if loose and result["passed"]:
                    self.pitfall(
                        f"A port with {control['change']} has a KL of {control['max_kl']:.1e} nats on {control['length']} tokens, which {' and '.join(loose)} "
                        f"would pass; in float64 it is {control['rel_error']:.1e} away, and this port {result['max_rel_error']:.1e}."
                    )
        columns = ["on", "what is wrong in the control", "this port", "the control", "the control's max KL", *(f"KL, {name}" for name in LOOSE)]
        note = "This port and the control: largest relative error, float64. The limit of the exact verdict is 1e-9."
        return Section(title="The control that must fail", items=[Table(title="Control", columns=columns, rows=rows, note=note)])

    def finish(self) -> Section:
        """Close the phase; what a failed verification leaves in the scratch is removed unless `keep`."""
        section = super().finish()
        self._loaded.clear()
        if not self.record.passed and not self.keep:
            shutil.rmtree(self.scratch, ignore_errors=True)
            section.items.append(Text(words="The verification failed: subset and checkpoints were removed from the scratch. `--keep` keeps them."))
        return section
