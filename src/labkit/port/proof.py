"""`python -m labkit.port.proof TYPE [--json FILE]`: translate a tiny type where the garden lacks it, and prove the slice. What the board runs for each type."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from labkit.errors import LabError
from labkit.port.slices import ensure_slice


def configurations(model_type: str) -> dict[str, list[str]]:
    """The two configurations of a proof: shaped as the class's defaults, and without any coincidence in sizes."""
    from labkit.hf.default_shaped import default_shaped

    def distinct():
        from labkit.hf.variants import record_variants

        yield f"tiny:{model_type}"
        yield from record_variants(model_type)

    return {"default": default_shaped(model_type), "distinct": distinct()}


def prove(model_type: str, *, steps=None, configs=("default", "distinct"), translated: bool = False, force: bool = False, say=lambda step: None) -> dict:
    """Plain data: the `Proof` of `labkit.parity.proof`, with the translation of the slice as its first step.

    translated: prove what the translator writes also where the garden has a refined slice. force: translate again where the cache has the slice. Keys besides
    the proof's: translated (bool, or None for a refined slice), refusals, unproven, folder, fresh, translate_seconds.
    """
    from labkit.parity import proof as parity

    start = time.perf_counter()
    if translated:
        os.environ["LABKIT_PREFER"] = "translated"
    chosen = {name: names for name, names in configurations(model_type).items() if name in configs}
    info = None

    def translate() -> None:
        nonlocal info
        info = ensure_slice(model_type, force=force)

    first = parity.take("translate", "source", translate)
    if info is not None and info.refusals:
        first.passed, first.reason = False, f"{len(info.refusals)} refused: {info.refusals[0]['construct']} at {info.refusals[0]['where']}"
    say(first)
    result = {
        "translated": None if info is not None and info.kind == "refined" else first.passed,
        "refusals": info.refusals if info else [],
        "unproven": info.unproven if info else [],
        "folder": str(info.folder) if info else "",
        "fresh": bool(info and info.fresh),
        "translate_seconds": first.seconds,
    }
    found = parity.prove(model_type, chosen, steps=parity.STEPS if steps is None else steps, say=say) if info else parity.Proof(model_type)
    found.steps.insert(0, first)
    return found.as_dict() | result | {"seconds": round(time.perf_counter() - start, 2)}


def prepare() -> None:
    """Make this process one for proofs, before anything is computed: as every exact comparison, on one thread, with strict promotion."""
    import jax

    from labkit.hf.threads import stay_on_one_thread
    from labkit.parity import preparation

    stay_on_one_thread()  # the board runs one process per core
    preparation.prepare()
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def main(arguments: list[str] | None = None) -> int:
    """0 when every step passed, 1 otherwise. --json FILE gets one JSON line, also when the proof could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m labkit.port.proof", description=main.__doc__)
    parser.add_argument("model_type")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--steps", default=None, help="comma-separated names, e.g. prefill,decode")
    parser.add_argument("--configs", default="default,distinct")
    parser.add_argument("--translated", action="store_true", help="the translated slice, also where the garden has a refined one")
    parser.add_argument("--force", action="store_true", help="translate again even when the cache has the slice")
    given = parser.parse_args(arguments)
    prepare()

    def say(step):
        value = "" if step.value is None else f"{step.value:.1e}"
        mark = "pass" if step.passed else "FAIL"
        place = f" [{step.place}]" if step.place else ""
        print(f"{mark}  {step.on:8} {step.name:10} {value:8} {step.seconds:5.1f} s  {step.reason}{place}", flush=True)
        if step.note:
            print(f"      {step.note}", flush=True)

    try:
        steps = given.steps.split(",") if given.steps else None
        result = prove(given.model_type, steps=steps, configs=given.configs.split(","), translated=given.translated, force=given.force, say=say)
        result["error"] = None
    except LabError as error:
        result = {"model_type": given.model_type, "kind": "", "passed": False, "translated": None, "steps": [], "error": error.as_dict()}
        print(f"FAIL  {error.paragraph()}", flush=True)
    if given.json:
        temporary = given.json.with_name(f".{given.json.name}.part")
        temporary.write_text(json.dumps(result) + "\n", encoding="utf-8")
        os.replace(temporary, given.json)
    print(f"{given.model_type}: {'proven' if result['passed'] else 'NOT proven'}" + (f", {result['seconds']:.1f} s" if "seconds" in result else ""))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
