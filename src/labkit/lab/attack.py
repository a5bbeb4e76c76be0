"""`labkit attack`: parameters, config keys and inputs of tiny models changed on both sides, and the planted faults that must be caught."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from labkit.errors import LabError
from labkit.parity.perturb_spec import Perturbation, control_lines


@dataclass
class Attack:
    """What became of every model. errors: model -> why it could not be attacked."""

    results: list[Perturbation] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every spec held and every planted fault was caught."""
        return 0 if self.results and not self.errors and all(result.holds for result in self.results) else 1

    def as_json(self) -> dict:
        return {"attacks": [result.as_dict() for result in self.results], "errors": self.errors, "status": "pass" if self.exit_code == 0 else "fail"}

    def plain(self) -> str:
        """Specs passed by model, what failed, and the table of planted faults with what caught each."""
        lines = [f"{'model':36} {'slice':10} {'specs':>9} {'faults':>9} {'seconds':>8}"]
        for r in self.results:
            caught = f"{len(r.controls) - len(r.missed)}/{len(r.controls)}"
            lines.append(f"{r.source[:36]:36} {r.kind:10} {f'{r.passed}/{r.total}':>9} {caught:>9} {r.seconds:8.1f}")
            lines += [f"  {row.plain()}" for row in r.failures]
        lines += [f"{model[:36]:36} ERROR {reason}" for model, reason in self.errors.items()]
        lines += ["", "planted faults"]
        for r in self.results:
            lines += [f"{r.model_type:18} {line}" for line in control_lines(r.controls)]
        total = sum(r.total for r in self.results)
        faults = [control for r in self.results for control in r.controls]
        held = f"{sum(r.passed for r in self.results)} of {total} specs hold"
        return "\n".join([*lines, "", f"{held}; {sum(c.caught for c in faults)} of {len(faults)} planted faults caught"])


def attack(models: Iterable[str], *, full: bool = False, seed: int = 0, controls: bool = True, say: Callable[[str], None] = lambda text: None) -> Attack:
    """Attack models one after another, each in a process of its own; a bare model type stands for its tiny model.

    full: every parameter and key instead of a draw by `seed`. say: told a line per model. A model that cannot be attacked is an entry of `errors`.
    """
    from labkit.hf.source import open_source
    from labkit.parity.worker import run_job
    from labkit.port.slices import ensure_slice

    found = Attack()
    for model in models:
        name = model if ":" in model or "/" in model else f"tiny:{model}"
        try:
            ensure_slice(open_source(name)).require()
            result = run_job({"kind": "perturb", "source": name, "full": full, "seed": seed, "controls": controls})
            found.results.append(Perturbation.from_dict(result["perturbation"]))
            say(found.results[-1].plain(failures_only=True).partition("\n")[0])
        except LabError as error:
            found.errors[model] = error.paragraph()
            say(f"{model}: {error.paragraph()}")
    return found
