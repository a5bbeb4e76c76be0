"""What exact jobs do. They work on a source by name or directory, in float64 on both sides.

`components`: the checklist, isolated and free, on one batch. `exact`: teacher-forced logits at several lengths, by scan and by loop, captures at every name,
decoding with the cache against the full forward, left padding against the reference's mask. Each runs a control that must fail. `perturb`: the attack.
`conformance`: the eight checks, on a mesh of devices that the worker pretends to have, and what stands beside them.
"""

import contextlib
import time

import numpy as np

from labkit.errors import InputError
from labkit.parity.compare import error_per_position, kl_per_position, relative_error, top_k_agreement
from labkit.parity.components import EXACT_LIMIT, compare_components
from labkit.parity.scale_jobs import gradients_job, meshes_job


def execute(job: dict, *, progress=None) -> dict:
    """Run a job in this process, with x64 and strict promotion on while it lasts. Returns plain data, arrays under `arrays`."""
    kinds = {
        "components": components_job,
        "exact": exact_job,
        "perturb": perturb_job,
        "conformance": conformance_job,
        "gradients": gradients_job,
        "meshes": meshes_job,
        "frozen_topk": _frozen_topk_job,
    }
    arguments = {key: value for key, value in job.items() if key != "kind"}
    if job.get("kind") not in kinds:
        raise InputError(f"unknown exact job {job.get('kind')!r}", next=f"kinds are {', '.join(kinds)}")
    import jax

    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        if jax.default_backend() != "cpu":
            stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
        result = kinds[job["kind"]](progress=progress or (lambda fraction, text: None), **arguments)
    return result | {"kind": job["kind"], "seconds": round(time.perf_counter() - start, 2)}


def _frozen_topk_job(source, *, progress, **arguments) -> dict:
    from labkit.parity.frozen_topk import frozen_topk_job

    return frozen_topk_job(source, progress=progress, **arguments)


def _both(source, progress):
    """(source, reference, model, config): both sides in float64."""
    import jax.numpy as jnp

    from labkit.converters import load_model
    from labkit.hf.reference import Reference
    from labkit.hf.source import open_source

    source = open_source(source)
    progress(0.0, "loading the reference in float64")
    reference = Reference.load(source.path, "exact")
    progress(0.1, "loading our model in float64")
    model, config, findings = load_model(source, dtype=jnp.float64)
    told = [{"component": "reference", "cause": text, "evidence": "", "fix": ""} for text in reference.findings]
    return source, reference, model, config, [*told, *findings]


def _table(model, tokens, captured, limit):
    from labkit.parity.capture import capture

    return compare_components(capture(model, tokens), capture(model, tokens, inject=captured), captured, limit=limit)


def _diagnosis(model, source, config, tokens, captured, table, progress) -> list[dict]:
    """Findings that name each fault of a table that is not green, [] for one that is."""
    from labkit.parity.diagnose import diagnose

    if table.passed:
        return []
    progress(0.75, "naming the faults")
    return [finding.as_dict() for finding in diagnose(model, source.config.model_type, config, tokens, captured, table)]


def _other_ways(model, reference, probe, captured, table, limit, progress) -> tuple[dict[str, float], list[dict], list[dict]]:
    """(relative error by check, findings, diagnosis): tokens [batch, length] through the cache against the full forward, and left-padded against the reference.

    captured: the reference's `Capture` of any tokens; table: the checklist without padding, whose faults are not named again. diagnosis: the first place that
    leaves the full forward, for each way of feeding that does.
    """
    from labkit.parity.cached import cached_against_reference, ways_of_feeding
    from labkit.parity.cached_faults import name_cached_faults, name_padding_fault

    progress(0.7, "decoding with the cache against the full forward")
    ways = ways_of_feeding(model, probe)
    errors, told = cached_against_reference(model, reference, probe, limit=limit, ways=ways)
    checks = {f"cache: {name}": error for name, error in errors.items()}
    padded, mask = _padded(model, reference, probe)
    checks["left padding against the reference"] = padded
    if all(error <= limit for error in checks.values()):
        return checks, told, []
    progress(0.72, "naming what the cache does")
    found = name_cached_faults(model, probe, ways, errors, captured, limit=limit)
    if not padded <= limit and errors["padded"] <= limit:
        found += name_padding_fault(model, reference, probe, mask, table, limit=limit)
    return checks, told, [finding.as_dict() for finding in found]


def components_job(
    source, *, progress, batch: int = 2, length: int = 24, seed: int = 0, limit: float = EXACT_LIMIT, control: bool = True, cache_length: int = 0
) -> dict:
    """The component checklist of tokens [batch, length], random by `seed`. cache_length: how many of them are also fed through the cache, 0 for none."""
    source, reference, model, config, findings = _both(source, progress)
    tokens = np.random.default_rng(seed).integers(3, config.vocab_size, (batch, length))
    progress(0.3, "recording the reference")
    captured = reference.capture(tokens)
    progress(0.5, "recording our model, free and isolated")
    table = _table(model, tokens, captured, limit)
    result = {"tokens": [batch, length], "table": table.as_dict(), "passed": table.passed, "findings": findings, "arrays": {}}
    result["diagnosis"] = _diagnosis(model, source, config, tokens, captured, table, progress)
    if cache_length:
        result["checks"], told, named = _other_ways(model, reference, tokens[:, :cache_length], captured, table, limit, progress)
        result["findings"] = [*findings, *told]
        result["diagnosis"] += named
        result["passed"] = bool(table.passed and all(error <= limit for error in result["checks"].values()))
    if control:
        progress(0.8, "the control that must fail")
        wrong, key, right, value = _wrong(model, source, config)
        red = _table(wrong, tokens, captured, limit)
        result["control"] = {
            "change": f"{key} {right:g} -> {value:g}",
            "red": sorted({fault.kind for fault in red.isolated_faults}),
            "passed": red.passed,
            "isolated": {row.kind: row.isolated for row in red.rows},
            "free": {row.kind: row.free for row in red.rows},
        }
    return result


def _wrong(model, source, config):
    """(model, what is wrong with it, right, wrong): the norms' eps, or one weight where the config has none."""
    from labkit.parity.controls import has_eps, rebuild, with_wrong_eps, with_wrong_weight

    if not has_eps(config):
        return with_wrong_weight(model)
    changed, key, right, value = with_wrong_eps(config)
    return rebuild(model, source.config.model_type, changed), key, right, value


def exact_job(
    source,
    *,
    progress,
    lengths=(6, 64, 256),
    seed: int = 0,
    limit: float = EXACT_LIMIT,
    capture_length: int = 64,
    control: bool = True,
    cache_length: int = 20,
    prompts=None,
) -> dict:
    """The exact comparison.

    lengths: prompts of real text where there is a tokenizer; prompts: token lists instead. capture_length: every name is compared on so many tokens of the
    longest prompt. cache_length: tokens of the cache check, 0 for none.
    """
    from labkit.hf.prompts import make_prompts
    from labkit.parity.capture import capture
    from labkit.parity.greedy import forward

    source, reference, model, config, findings = _both(source, progress)
    given = (
        [(f"given, {len(tokens)} tokens", np.asarray(tokens)) for tokens in prompts]
        if prompts
        else make_prompts(source.path, config.vocab_size, lengths, seed=seed)
    )
    rows, arrays, longest = [], {}, max((tokens for _, tokens in given), key=len)
    for index, (text, tokens) in enumerate(given):
        progress(0.2 + 0.3 * index / len(given), f"logits at {len(tokens)} tokens")
        wanted, ours = reference.logits(tokens[None]), forward(model, tokens[None])
        kl = kl_per_position(ours, wanted)[0]
        rows.append(
            {
                "length": len(tokens),
                "prompt": text[:80],
                "rel_error": relative_error(ours, wanted),
                "max_kl": float(kl.max()),
                "top_1": top_k_agreement(ours, wanted, 1),
            }
        )
        arrays |= {f"kl/{index}": kl, f"position_error/{index}": error_per_position(ours, wanted)}
    progress(0.5, "every name, free and isolated")
    tokens = longest[None, :capture_length]
    captured = reference.capture(tokens)
    table = _table(model, tokens, captured, limit)
    checks, named = {"loop against the reference": table.free_errors["logits"]}, []
    if cache_length:
        probe = np.resize(longest, (2, min(cache_length, 2 * len(longest))))
        others, told, named = _other_ways(model, reference, probe, captured, table, limit, progress)
        checks |= others
        findings += told
    worst = max([row["rel_error"] for row in rows] + list(checks.values()) + list(table.free_errors.values()) + list(table.isolated_errors.values()))
    result = {
        "max_rel_error": worst,
        "max_rel_error_logits": max(row["rel_error"] for row in rows),
        "prompts": rows,
        "checks": checks,
        "table": table.as_dict(),
        "limit": limit,
        "passed": bool(worst <= limit and table.passed),
        "findings": findings,
        "diagnosis": [*_diagnosis(model, source, config, tokens, captured, table, progress), *named],
        "parameters": int(sum(p.numel() for p in reference.model.parameters())),
        "arrays": arrays,
    }
    if control:
        progress(0.85, "the control that must fail")
        wrong, key, right, value = _wrong(model, source, config)
        wanted, ours = captured.outputs["logits"], capture(wrong, tokens)["logits"]
        kl = kl_per_position(ours, wanted)
        result["control"] = {
            "change": f"{key} {right:g} -> {value:g}",
            "length": tokens.shape[1],
            "rel_error": relative_error(ours, wanted),
            "max_kl": float(kl.max()),
            "passed": bool(relative_error(ours, wanted) <= limit),
        }
    return result


def _padded(model, reference, tokens) -> tuple[float, np.ndarray]:
    """(error, mask): row 0 left-padded by 3 tokens: our segment ids against the reference's attention mask, padding left out."""
    from labkit.parity.greedy import forward

    mask = np.ones_like(tokens)
    mask[0, :3] = 0
    return relative_error(forward(model, tokens, segment_ids=mask), reference.logits(tokens, mask), mask), mask


def perturb_job(source, *, progress, seed: int = 0, full: bool = False, controls: bool = True) -> dict:
    """The attack of `perturb.py` on a tiny model: specs that hold, and planted faults that they catch."""
    from labkit.parity.perturb import perturb

    count = 0

    def say(row):
        nonlocal count
        count += 1
        progress(1 - 0.9**count, row.plain())

    found = perturb(source, seed=seed, full=full, controls=controls, say=say)
    return {"perturbation": found.as_dict(), "passed": found.holds, "specs": {"passed": found.passed, "total": found.total}, "arrays": {}}


def conformance_job(source, *, progress, checks=None, seed: int = 0) -> dict:
    """The conformance suite on a tiny model, or those of its `checks` that are named. Four devices are needed: `run_job(job, devices=8)`."""
    from labkit.parity.conformance import NAMES, conformance

    wanted, done = list(NAMES if checks is None else checks), 0

    def say(check):
        nonlocal done
        done += 1
        progress(done / len(wanted), check.plain().strip())

    found = conformance(source, checks=wanted, seed=seed, say=say)
    return {"conformance": found.as_dict(), "passed": found.passed, "arrays": {}}
