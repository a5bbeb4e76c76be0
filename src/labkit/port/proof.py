"""`python -m labkit.port.proof TYPE [--json FILE]`: translate a tiny type where the garden lacks it, and prove the slice. What the board runs for each type."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from labkit.errors import LabError

DEVICES = 8


def configurations(model_type: str) -> dict[str, list[str]]:
    """The two configurations of a proof: shaped as the class's defaults, and without any coincidence in sizes."""
    from labkit.hf.default_shaped import default_shaped

    return {"default": default_shaped(model_type), "distinct": [f"tiny:{model_type}"]}


def prove(model_type: str, *, steps=None, configs=("default", "distinct"), say=lambda step: None) -> dict:
    """Plain data: the `Proof` of `labkit.parity.proof`, and what the translation of the slice has to report.

    Keys besides the proof's: translated (bool, or None for a slice that was written by hand), refusals, unproven, translate_seconds.
    """
    from labkit.parity import proof as parity

    start = time.perf_counter()
    chosen = {name: names for name, names in configurations(model_type).items() if name in configs}
    result = {"model_type": model_type, "translated": None, "refusals": [], "unproven": [], "translate_seconds": 0.0}
    found = parity.prove(model_type, chosen, steps=parity.STEPS if steps is None else steps, say=say)
    return found.as_dict() | result | {"seconds": round(time.perf_counter() - start, 2)}


def environment() -> dict[str, str]:
    """What must be set before jax is imported: CPU only, eight devices, float64, strict promotion, compiled code shared through the scratch folder."""
    from labkit.parity.worker import ENVIRONMENT, _compilation_cache

    return _compilation_cache() | ENVIRONMENT | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()}


def main(arguments: list[str] | None = None) -> int:
    """0 when every step passed, 1 otherwise. --json FILE gets one JSON line, also when the proof could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m labkit.port.proof", description=main.__doc__)
    parser.add_argument("model_type")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--steps", default=None, help="comma-separated names, e.g. prefill,decode")
    parser.add_argument("--configs", default="default,distinct")
    given = parser.parse_args(arguments)
    os.environ.update({key: value for key, value in environment().items() if key == "XLA_FLAGS" or key not in os.environ})

    def say(step):
        value = "" if step.value is None else f"{step.value:.1e}"
        mark = "pass" if step.passed else "FAIL"
        place = f" [{step.place}]" if step.place else ""
        print(f"{mark}  {step.on:8} {step.name:10} {value:8} {step.seconds:5.1f} s  {step.reason}{place}", flush=True)
        if step.note:
            print(f"      {step.note}", flush=True)

    try:
        result = prove(given.model_type, steps=given.steps.split(",") if given.steps else None, configs=given.configs.split(","), say=say)
        result["error"] = None
    except LabError as error:
        result = {"model_type": given.model_type, "kind": "", "passed": False, "steps": [], "error": error.as_dict()}
        print(f"FAIL  {error.paragraph()}", flush=True)
    if given.json:
        temporary = given.json.with_name(f".{given.json.name}.part")
        temporary.write_text(json.dumps(result) + "\n", encoding="utf-8")
        os.replace(temporary, given.json)
    print(f"{given.model_type}: {'proven' if result['passed'] else 'NOT proven'}" + (f", {result['seconds']:.1f} s" if "seconds" in result else ""))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
