"""The attack: parameters, config keys and inputs of a tiny model changed on both sides, and planted faults that the same specs must catch."""

import contextlib
import time
from collections.abc import Callable, Iterable

import numpy as np

from labkit.errors import LabError
from labkit.parity.perturb_config import check_config, check_configs, config_specs
from labkit.parity.perturb_controls import controls as planted
from labkit.parity.perturb_inputs import check_input, input_specs
from labkit.parity.perturb_parameters import check_parameter, parameter_specs, slice_attribute
from labkit.parity.perturb_shapes import OWN, check_shapes, shape_specs
from labkit.parity.perturb_spec import KINDS, Control, Perturbation, PerturbSpec, Row, control_lines
from labkit.parity.perturb_subject import Subject

__all__ = ["Control", "PerturbSpec", "Perturbation", "Row", "control_lines", "perturb"]
PARAMETERS, KEYS = 3, 6
"""Drawn by seed unless the attack is a full one."""


def perturb(
    source,
    *,
    seed: int = 0,
    full: bool = False,
    kinds: Iterable[str] = KINDS,
    controls: bool = True,
    specs: Iterable[PerturbSpec] = (),
    say: Callable[[Row], None] = lambda row: None,
) -> Perturbation:
    """Attack a model: `tiny:<type>`, a directory or a `Source`; its family must be known to the registry.

    Three parameters and six config keys drawn by `seed`, and the input probes; with `full` every parameter (of one layer where layers are stacked) and every
    key. specs: further ones, beside those that the slice brings in its `PERTURB_SPECS`. controls: plant faults too. say: told each row as it comes. Both sides
    run in float64 on this process's CPU. Raises what loading either side raises; a slice that is wrong is a row that did not pass.
    """
    import jax

    start, kinds = time.perf_counter(), set(kinds)
    rng = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        subject = stack.enter_context(Subject(source, seed))
        result = Perturbation(subject.model_type, subject.source.name, subject.family.source)

        def take(rows: Iterable[Row]) -> None:
            for row in rows:
                result.rows.append(row)
                say(row)

        own = [PerturbSpec.of_slice(values) for values in slice_attribute(subject.family, "PERTURB_SPECS", ())] + list(specs)
        own = [spec for spec in own if spec.kind in kinds]
        if "parameter" in kinds:
            chosen = parameter_specs(subject)
            if not full:
                chosen = [chosen[i] for i in sorted(rng.choice(len(chosen), min(PARAMETERS, len(chosen)), replace=False))]
            take(_tried(lambda spec: check_parameter(subject, spec, seed), chosen))
        if "config" in kinds:
            chosen, without = config_specs(subject, rng, None if full else KEYS)
            take(check_configs(subject, chosen))
            if full:
                refused = [key for key, reason in without.items() if reason.startswith("the reference refuses")]
                take(check_shapes(subject, shape_specs(subject, refused)))
        if "input" in kinds:
            take(_tried(lambda spec: check_input(subject, spec), input_specs(subject, rng, full=full)))
        checks = {"parameter": lambda spec: check_parameter(subject, spec, seed), "config": lambda spec: check_config(subject, spec)}
        take(_tried(lambda spec: checks.get(spec.kind, lambda spec: check_input(subject, spec))(spec), own))
        if controls:
            tried = [row.spec for row in result.rows if row.passed and row.spec.follows != OWN]
            result.controls.extend(planted(subject, tried, seed, full=full))
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _tried(check: Callable[[PerturbSpec], Row], specs: Iterable[PerturbSpec]) -> Iterable[Row]:
    """A row for each spec; what fails while it is tried is a row that did not pass."""
    for spec in specs:
        try:
            yield check(spec)
        except Exception as error:
            told = error.what if isinstance(error, LabError) and hasattr(error, "what") else f"{type(error).__name__}: {error}"
            yield Row(spec, False, reason=str(told).splitlines()[0][:300])
