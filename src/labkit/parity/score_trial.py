"""A trial: attention scores that are a constant times the reference's. Fitted on one layer, named by the config, confirmed by an isolated forward with it."""

import dataclasses
from contextlib import contextmanager

import numpy as np

from labkit.layers import attention
from labkit.parity.capture import capture
from labkit.parity.compare import relative_error
from labkit.parity.components import ComponentTable, Fault, compare_components

FACTORS = np.geomspace(1 / 4096, 4096, 97)
STEPS, DIFFERENCE, ALIKE = 12, 1e-5, 1e-8
_LIKELY = ("scal", "multiplier", "attn", "attention", "head_dim", "query")


@dataclasses.dataclass
class _Call:
    """One call of attention on a block of queries: everything but the number that its scores are multiplied by, and that number."""

    function: object
    arrays: tuple
    scale: float
    rest: tuple

    def under(self, scale: float) -> np.ndarray:
        return np.asarray(self.function(*self.arrays, scale, *self.rest), np.float64)


@contextmanager
def watching(calls: list, scale: float | None = None):
    """Within the block each call of attention is appended to `calls`, and its scores are multiplied by `scale` instead of its own number."""
    originals = {name: getattr(attention, name) for name in ("_attend", "_eager")}

    def watched(original):
        def call(q, k, v, mask, own, *rest):
            calls.append(_Call(original, (q, k, v, mask), float(own), rest))
            return original(q, k, v, mask, own if scale is None else scale, *rest)

        return call

    for name, original in originals.items():
        setattr(attention, name, watched(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(attention, name, original)


def score_factor(fault: Fault, model, config, tokens, captured, table: ComponentTable):
    """(cause, evidence, fix, True) when with another constant on its scores the attention of `fault` is the reference's, else None.

    captured: the reference's `Capture` of tokens [batch, length]; table: the checklist that has the fault.
    """
    if fault.what != "output" or fault.place.split("#")[0].rpartition(".")[2] != "attn":
        return None
    calls: list[_Call] = []
    with watching(calls):
        isolated = capture(model, tokens, inject=captured)
    places = [name for name in isolated if name.split("#")[0].endswith(".attn")]
    blocks, odd = divmod(len(calls), len(places))
    if odd or not blocks:  # attention of the slice's own, which no call tells of
        return None
    first = places.index(fault.place) * blocks
    own, wanted = calls[first : first + blocks], np.asarray(captured.outputs[fault.place], np.float64)
    fitted = _fit(own, wanted)
    if fitted is None:
        return None
    right, keys = _named(config, fitted, own[0].arrays[0].shape[-1])
    with watching([], right):
        trial = capture(model, tokens, inject=captured)
    after = {(f.place, f.what) for f in compare_components(trial, trial, captured, limit=table.limit).isolated_faults}
    wrong = [f for f in table.isolated_faults if f.what == "output" and f.place in places]
    mended = [f for f in wrong if (f.place, f.what) not in after]
    if fault not in mended:
        return None
    error = relative_error(np.asarray(trial[fault.place]).reshape(wanted.shape), wanted)
    now, told = own[0].scale, f"{right:.12g}" + (f", which is {keys}" if keys else "")
    return (
        f"the attention scores are multiplied by {now:.12g} and must be by {told}",
        f"the scores are {now / right:.6g} x the reference's; with {right:.12g} the error falls to {error:.1e}, and {len(mended)} of {len(wrong)} layers agree",
        f"make the scale from {keys}" if keys else "find where the reference makes this number: no key of the config gives it alone",
        True,
    )


def _fit(calls: list[_Call], wanted: np.ndarray) -> float | None:
    """The number on the scores that makes the calls' output [batch, length, heads, head_dim] the wanted one, or None. Signs alone are not tried."""

    def outcome(scale):
        return np.concatenate([call.under(scale) for call in calls], 1).reshape(-1)

    wanted = wanted.reshape(-1)
    start = calls[0].scale or 1.0
    if sum(call.arrays[0].shape[1] for call in calls) == 0 or outcome(start).size != wanted.size:
        return None
    scale = min((start * factor for factor in FACTORS), key=lambda scale: np.square(outcome(scale) - wanted).sum())
    for _ in range(STEPS):
        slope = (outcome(scale * (1 + DIFFERENCE)) - outcome(scale * (1 - DIFFERENCE))) / (2 * DIFFERENCE)
        steepness = slope @ slope
        if not steepness:
            return None
        # At most a factor of two at once: far away the slope says little.
        scale *= 1 + float(np.clip(slope @ (wanted - outcome(scale)) / steepness, -0.5, 1))
    return scale if relative_error(outcome(scale), wanted) < 1e-9 else None


def _named(config, value: float, head_dim: int) -> tuple[float, str]:
    """(the exact number, how the config's keys give it, or ""). Keys that speak of scales or heads come first; at most two are told."""
    numbers = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    numbers = {key: float(n) for key, n in numbers.items() if isinstance(n, (int, float)) and not isinstance(n, bool) and n > 0}
    if {"hidden_size", "num_attention_heads"} <= numbers.keys():
        numbers["(hidden_size / num_attention_heads)"] = numbers["hidden_size"] / numbers["num_attention_heads"]
    if "head_dim" not in numbers:
        numbers["(the heads' size)"] = float(head_dim)
    likely = sorted(numbers, key=lambda key: not any(word in key for word in _LIKELY))
    forms = {"{} ** -0.5": lambda n: n**-0.5, "{}": lambda n: n, "1 / {}": lambda n: 1 / n, "{} ** 0.5": lambda n: n**0.5}
    found = {form.format(key): make(numbers[key]) for key in likely for form, make in forms.items() if abs(make(numbers[key]) / value - 1) < ALIKE}
    return (next(iter(found.values())), " or ".join(list(found)[:2])) if found else (value, "")
