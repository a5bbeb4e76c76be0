"""Phase 4's look at bfloat16 place by place: a missing upcast, which the KL of the logits drowns."""

import math

import numpy as np

from labkit.lab.show import Table


def rounding_table(phase, ours) -> Table:
    """Each part of the subset in bfloat16 on the reference's own inputs. phase: records the gate and its findings; ours: the subset in bfloat16."""
    from labkit.parity.rounding import RATIO_LIMIT, by_kind, compare_rounding, worst

    tokens = np.stack([tokens for _, tokens in phase.prompts((64, 64))])
    found = compare_rounding(ours, phase.ours("subset", "float32"), phase.reference("subset", "bfloat16"), tokens)
    phase.gate(
        "bfloat16 rounds where the reference rounds, subset",
        all(part.passed for part in found),
        _finite(worst(found).ratio),
        RATIO_LIMIT,
        "a part's error against float32, ours over the reference's, on the reference's bfloat16 inputs: the worst of all parts",
    )
    for part in found:
        if not part.passed:
            evidence = f"{part.place}: {part.unequal:.0%} of the bits differ, and the error against float32 is {part.ratio:.3g} times the reference's"
            fix = "widen where the reference calls .float() or names torch.float32, and round where it rounds"
            cause = "rounds more than the reference in bfloat16: an upcast is missing, or a value is rounded once more"
            phase.finding(part.kind, cause, f"{evidence}; reference {part.reference}, ours {part.cited}", fix)
    columns = ["component", "places", "worst error, ours ÷ the reference's", "at", "most other bits", "at "]
    rows = [[kind, count, _finite(far.ratio), far.place, f"{other.unequal:.1%}", other.place] for kind, count, far, other in by_kind(found)]
    note = (
        "Each place in bfloat16, on the reference's own bfloat16 inputs. Errors are root mean squares against the same place in float32, 1 where the bits "
        f"are the reference's; the limit is {RATIO_LIMIT}. An upcast that is missing shows here and nowhere else."
    )
    return Table(title="Rounding, place by place", columns=columns, rows=rows, code=["at", "at "], note=note)


def _finite(ratio: float) -> float | str:
    return ratio if math.isfinite(ratio) else "inf"
