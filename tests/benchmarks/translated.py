"""Translated slices against refined ones of the same family, in one run, in turn: float64 outputs, forward and greedy decoding time; medians.

`python tests/benchmarks/translated.py` prints the table: SmolLM2-135M through both slices of llama, and tiny models of the four refined families.
"""

import os
import statistics
import sys
import time

ROUNDS = 7
LIMIT = 1.10
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2")
MEDIUM = "hidden_size=480&intermediate_size=960&num_hidden_layers=8&vocab_size=8192"


def load(model: str, kind: str, dtype):
    """(model, config) through the refined or the translated slice."""
    from labkit.converters import load_model
    from labkit.hf.source import open_source
    from labkit.port.slices import ensure_slice

    os.environ["LABKIT_PREFER"] = "translated" if kind == "translated" else ""
    source = open_source(model)
    if kind == "translated":
        ensure_slice(source).require()
    ours, config, _ = load_model(source, dtype=dtype)
    assert type(ours).__module__.startswith("labkit_slices") == (kind == "translated")
    return ours, config


def forward_of(model, tokens):
    """A compiled forward pass as a call without arguments."""
    import jax
    from flax import nnx

    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    return lambda: call(state, tokens).block_until_ready()


def in_turn(calls, rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call, run in turn after one warm-up each."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for side, call in zip(times, calls):
            start = time.perf_counter()
            call()
            side.append(time.perf_counter() - start)
    return [statistics.median(side) for side in times]


def rows(models=None) -> list[dict]:
    """One row per measure: name, refined, translated (seconds), ratio, holds."""
    import jax.numpy as jnp
    import numpy as np

    from labkit.parity.greedy import GreedyDecoder

    table = []
    for name, length, steps in models or [("smollm2-135m", 256, 32), *((f"tiny:{family}?{MEDIUM}", 256, 0) for family in FAMILIES[1:])]:
        pair = [load(name, kind, jnp.float32) for kind in ("refined", "translated")]
        tokens = jnp.asarray(np.random.default_rng(0).integers(3, pair[0][1].vocab_size, (1, length)), jnp.int32)
        times = in_turn([forward_of(model, tokens) for model, _ in pair])
        table.append({"name": f"{name.split('?')[0]}, forward of {length} tokens", "refined": times[0], "translated": times[1]})
        if steps:
            decoders = [GreedyDecoder(model, unroll=True) for model, _ in pair]
            times = in_turn([lambda d=d: d(tokens[:, :16], steps) for d in decoders])
            table.append({"name": f"{name.split('?')[0]}, greedy decoding of {steps} tokens", "refined": times[0], "translated": times[1]})
    for row in table:
        row["ratio"] = row["translated"] / row["refined"]
        row["holds"] = row["ratio"] <= LIMIT
    return table


def main() -> int:
    """Print the table; 1 when a limit does not hold."""
    table = rows()
    print(f"{'':58} {'refined':>9} {'translated':>10} {'ratio':>6}   limit {LIMIT}")
    for row in table:
        print(f"{row['name']:58} {row['refined']:8.3f}s {row['translated']:9.3f}s {row['ratio']:6.2f}  {'' if row['holds'] else 'FAILS'}")
    return 0 if all(row["holds"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
