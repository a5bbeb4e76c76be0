"""The three verdicts, each with the design's limit. Values that are not finite fail; nothing here can be loosened by a caller.

exact: float64 on both sides, from a worker's result. float32: full weights, teacher-forced, and greedy tokens. bfloat16: ours and the reference's own, each
against the reference in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import jax
import numpy as np

from labkit.errors import GateError, InputError
from labkit.parity.compare import kl_per_position, kl_summary, top_2_gap
from labkit.parity.components import EXACT_LIMIT
from labkit.parity.greedy import CAPACITY_STEP, forward, greedy

FLOAT32_KL_LIMIT = 1e-6
BFLOAT16_RATIO_LIMIT = 1.5
BFLOAT16_POSITIONS = 512
NOISE_FACTOR = 10.0
LONGEST_PROMPT = 200


@dataclass(frozen=True)
class Verdict:
    """value: what is judged, against limit. details: plain data for records and `--json`."""

    name: str
    passed: bool
    value: float
    limit: float
    details: dict = field(default_factory=dict)

    def as_dict(self) -> dict:
        """Plain data."""
        return asdict(self)


def _check_prompts(prompts: Sequence[np.ndarray]):
    lengths = sorted({len(p) for p in prompts})
    if len(lengths) < 3 or lengths[-1] < LONGEST_PROMPT:
        raise InputError(f"a verdict needs prompts of at least three lengths, the longest of {LONGEST_PROMPT} tokens or more; given: {lengths}")


def exact_verdict(result: dict) -> Verdict:
    """From the result of an `exact` job: every compared name, the logits and the cache checks at most 1e-9 apart, nothing missing, the control rejected."""
    value, control = result["max_rel_error"], result.get("control")
    ok = math.isfinite(value) and value <= EXACT_LIMIT and result["table"]["passed"] and result["passed"]
    details = {
        "max_rel_error": value,
        "max_rel_error_logits": result["max_rel_error_logits"],
        "prompts": result["prompts"],
        "checks": result["checks"],
        "parameters": result["parameters"],
        "control": control,
        "missing": result["table"]["missing"],
        "findings": result["findings"],
    }
    return Verdict("exact", bool(ok and (control is None or not control["passed"])), value, EXACT_LIMIT, details)


def float32_verdict(model, reference, exact_reference, prompts: Sequence[np.ndarray], *, steps: int = 16, precision: str = "highest", progress=None) -> Verdict:
    """Max KL per position at most 1e-6 over prompts (int arrays [length]), and `steps` identical greedy tokens from each.

    model: ours in float32. reference, exact_reference: `Reference` in float32 and exact mode; their distance is the noise that may excuse a greedy split.
    Raises GateError when matmuls do not run at the highest precision or a side is not float32: such a verdict would say nothing.
    """
    _check_prompts(prompts)
    if reference.mode != "float32" or exact_reference.mode != "exact":
        raise GateError(f"a float32 verdict needs references in float32 and exact mode, not {reference.mode} and {exact_reference.mode}")
    rows, greedy_rows, arrays, capacity = [], [], {}, -(-(max(len(p) for p in prompts) + steps) // CAPACITY_STEP) * CAPACITY_STEP
    with jax.default_matmul_precision(precision):
        set_to = require_highest_precision()
        for index, tokens in enumerate(prompts):
            if progress is not None:
                progress(index / len(prompts), f"float32 at {len(tokens)} tokens")
            ours, theirs, exact = forward(model, tokens[None]), reference.logits(tokens[None]), exact_reference.logits(tokens[None])
            if ours.dtype != np.float32:
                raise GateError(f"our model gives {ours.dtype} logits in a float32 verdict", type(model).__name__, "load it with dtype=jnp.float32")
            noise = NOISE_FACTOR * float(np.abs(theirs - exact).max())
            summary = kl_summary(ours, theirs)
            arrays[f"kl/{index}"] = kl_per_position(ours, theirs)[0]
            rows.append({"length": len(tokens), **asdict(summary), "noise": noise, "max_difference": float(np.abs(ours.astype(np.float64) - theirs).max())})
            greedy_rows.append({"length": len(tokens), **compare_greedy(model, reference, tokens, steps, noise, capacity)})
    value = max(row["max"] for row in rows)
    matched = all(row["matched"] + len(row["ties"]) == row["tokens"] for row in greedy_rows)
    totals = {
        "tokens": sum(r["tokens"] for r in greedy_rows),
        "matched": sum(r["matched"] for r in greedy_rows),
        "ties": [t for r in greedy_rows for t in r["ties"]],
        "splits": [s for r in greedy_rows for s in r["splits"]],
        "prompts": greedy_rows,
    }
    details = {"max_kl": value, "prompts": rows, "greedy": totals, "matmul_precision": set_to, "arrays": arrays}
    return Verdict("float32", bool(math.isfinite(value) and value <= FLOAT32_KL_LIMIT and matched), value, FLOAT32_KL_LIMIT, details)


def require_highest_precision() -> str:
    """The matmul precision in force. Raises GateError unless it is "highest": by default TPUs multiply in bfloat16 and recent GPUs in TF32."""
    precision = jax.config.jax_default_matmul_precision
    if precision != "highest":
        raise GateError(f"jax_default_matmul_precision is {precision!r}, so a float32 verdict would judge another arithmetic", next='set it to "highest"')
    return precision


def compare_greedy(model, reference, tokens: np.ndarray, steps: int, noise: float, capacity: int | None = None) -> dict:
    """Greedy tokens of both sides from prompt tokens [length].

    Returns {"tokens", "matched", "ties", "splits", "ours", "reference"}. Where the sides choose differently and the reference's own gap between its two best is
    below `noise` and ours is within it, the step is a tie, shown with its gap, and both go on from the reference's choice; otherwise it is a
    split, where the comparison ends.
    """
    theirs, trace = reference.greedy_trace(tokens[None], steps)
    theirs, start = theirs[0], len(tokens)
    ours, ties, splits, matched, done = [], [], [], 0, 0
    while done < steps:
        chosen = greedy(model, theirs[None, : start + done], steps - done, capacity=capacity)[0, start + done :]
        same = chosen == theirs[start + done :]
        run = steps - done if same.all() else int(np.argmin(same))
        matched, ours, done = matched + run, [*ours, *chosen[:run].tolist()], done + run
        if done == steps:
            break
        logits, mine = trace[done], int(chosen[run])
        entry = {"step": done, "gap": float(top_2_gap(logits)), "noise": noise, "ours": mine, "reference": int(theirs[start + done])}
        ours.append(mine)
        if not (entry["gap"] < noise and float(logits.max()) - float(logits[mine]) < noise):
            splits.append(entry)
            break
        ties.append(entry)
        done += 1
    return {"tokens": steps, "matched": matched, "ties": ties, "splits": splits, "ours": [int(t) for t in ours], "reference": theirs[start:].tolist()}


def bfloat16_verdict(model, reference, float32_reference, tokens: np.ndarray) -> Verdict:
    """Our bfloat16 model and the reference's own, each against the reference in float32, on tokens [batch, length] with 512 positions or more.

    Passes when our mean KL is at most 1.5 x the reference's own.
    """
    tokens = np.asarray(tokens)
    if tokens.size < BFLOAT16_POSITIONS:
        raise InputError(f"a bfloat16 verdict needs {BFLOAT16_POSITIONS} positions, not {tokens.size}", f"tokens {tokens.shape}")
    if reference.mode != "bfloat16" or float32_reference.mode != "float32":
        raise GateError(f"a bfloat16 verdict needs references in bfloat16 and float32, not {reference.mode} and {float32_reference.mode}")
    wanted = float32_reference.logits(tokens)
    raw = forward(model, tokens)
    computes = np.dtype(model.config.dtype).name  # some references widen their logits, so that these do not tell
    if computes != "bfloat16":
        raise GateError(f"our model computes in {computes} in a bfloat16 verdict", type(model).__name__, "load it with dtype=jnp.bfloat16")
    ours, own = kl_summary(raw.astype(np.float32), wanted), kl_summary(reference.logits(tokens), wanted)
    limit = BFLOAT16_RATIO_LIMIT * own.mean
    details = {"ours": asdict(ours), "reference": asdict(own), "ratio": ours.mean / own.mean if own.mean else math.inf, "positions": ours.positions}
    return Verdict("bfloat16", bool(math.isfinite(ours.mean) and ours.mean <= limit), ours.mean, limit, details)


def golden_verdict(model, goldens, *, limit: float = FLOAT32_KL_LIMIT, precision: str = "highest") -> Verdict:
    """Our float32 model against stored goldens (`labkit.hf.goldens`), without PyTorch: max KL at the kept positions, and greedy tokens where they are stored.

    Without the reference there is no noise to excuse a greedy split: a split fails, unless the model is as undecided at that step as its two best logits
    differing by 1e-4 or less.
    """
    if not goldens:
        raise InputError("no goldens to verify against")
    # One capacity for all, the one that the float32 verdict has when goldens are of the same prompts: they share the compiled loop.
    rows, capacity = [], -(-max(len(golden.tokens if golden.greedy is None else golden.greedy) for golden in goldens) // CAPACITY_STEP) * CAPACITY_STEP
    with jax.default_matmul_precision(precision):
        require_highest_precision()
        for golden in goldens:
            ours = forward(model, golden.tokens[None])[0]
            if ours.shape[-1] != golden.logits.shape[-1]:
                raise InputError(
                    f"a golden has {golden.logits.shape[-1]} logits per position, the model {ours.shape[-1]}", golden.prompt[:60], "use goldens of this model"
                )
            row = {
                "prompt": golden.prompt[:80],
                "length": len(golden.tokens),
                "max_kl": float(kl_per_position(ours[golden.positions], golden.logits).max()),
                "dtype": golden.dtype,
            }
            if golden.greedy is not None:
                row |= _golden_greedy(model, golden, capacity)
            rows.append(row)
    value = max(row["max_kl"] for row in rows)
    return Verdict(
        "golden", bool(math.isfinite(value) and value <= limit and all(row.get("greedy_passed", True) for row in rows)), value, limit, {"prompts": rows}
    )


def _golden_greedy(model, golden, capacity: int) -> dict:
    steps = len(golden.greedy) - len(golden.tokens)
    ours = greedy(model, golden.tokens[None], steps, capacity=capacity)[0]
    different = np.flatnonzero(ours != golden.greedy)
    if not len(different):
        return {"greedy_tokens": steps, "greedy_matched": steps, "greedy_passed": True}
    at = int(different[0])
    gap = float(top_2_gap(forward(model, ours[None, :at])[0, -1]))
    return {"greedy_tokens": steps, "greedy_matched": at - len(golden.tokens), "greedy_gap": gap, "greedy_passed": gap <= 1e-4}
