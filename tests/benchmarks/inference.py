"""Forward and greedy decoding of SmolLM2-135M in float32 against PyTorch, both sides in one run, in turn; medians.

`python tests/benchmarks/inference.py` prints the table. The reference runs as users run it: transformers with its default attention, `generate` for decoding.
Ours keeps weights that bfloat16 holds exactly as bfloat16 while it decodes and computes in float32: the same function, and the tokens of both must be equal.
"""

import statistics
import sys
import time

ROUNDS = 5
FORWARD_ROUNDS = 15  # a forward takes a second: more of them, since the machine is shared
FORWARD_TOKENS, PROMPT, STEPS = 512, 16, 64
FORWARD_LIMIT = 1.1
DECODE_LIMIT = 1.8


def sides(model: str = "smollm2-135m"):
    """Ours and the reference's (forward, greedy) as calls without arguments that return arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from labkit.converters import load_model
    from labkit.hf.reference import Reference
    from labkit.hf.source import open_source
    from labkit.parity.greedy import GreedyDecoder

    source = open_source(model)
    ours, config, _ = load_model(source, dtype=jnp.float32)
    theirs = Reference.load(source.path, "float32", attention="sdpa", verify=False)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (1, FORWARD_TOKENS))
    graphdef, state = nnx.split(ours)
    forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
    device_tokens = jnp.asarray(tokens, jnp.int32)
    prompt, decode = tokens[:, :PROMPT], GreedyDecoder(ours, unroll=True)
    return {
        "forward": (lambda: forward(state, device_tokens).block_until_ready(), lambda: theirs.logits(tokens)),
        "greedy": (lambda: decode(prompt, STEPS), lambda: theirs.greedy(prompt, STEPS)),
    }


def measure(pair, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of both sides, run in turn after one warm-up each."""
    times: tuple[list, list] = ([], [])
    for call in pair:
        call()
    for _ in range(rounds):
        for side, call in zip(times, pair):
            start = time.perf_counter()
            call()
            side.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def rows(model: str = "smollm2-135m") -> list[dict]:
    """One row per measure: name, ours, theirs (seconds), ratio, limit, holds."""
    both = sides(model)
    ours, theirs = measure(both["forward"], FORWARD_ROUNDS)
    table = [
        {
            "name": f"forward, {FORWARD_TOKENS} tokens, float32",
            "ours": ours,
            "theirs": theirs,
            "ratio": ours / theirs,
            "limit": f"time at most {FORWARD_LIMIT} x",
            "holds": ours / theirs <= FORWARD_LIMIT,
        }
    ]
    chosen = [call() for call in both["greedy"]]
    assert (chosen[0] == chosen[1]).all(), "both sides decode the same tokens"
    ours, theirs = measure(both["greedy"])
    table.append(
        {
            "name": f"greedy decode, {STEPS} tokens, float32",
            "ours": ours,
            "theirs": theirs,
            "ratio": theirs / ours,
            "limit": f"tokens per second at least {DECODE_LIMIT} x",
            "holds": theirs / ours >= DECODE_LIMIT,
        }
    )
    return table


def table(found: list[dict]) -> str:
    """The rows as text."""
    lines = [f"{'measure':40} {'ours, s':>9} {'PyTorch, s':>10} {'ratio':>6}  limit"]
    return "\n".join(
        lines + [f"{r['name']:40} {r['ours']:9.3f} {r['theirs']:10.3f} {r['ratio']:6.2f}  {r['limit']}{'' if r['holds'] else '  FAILS'}" for r in found]
    )


if __name__ == "__main__":
    found = rows(*sys.argv[1:2])
    print(table(found))
    sys.exit(0 if all(row["holds"] for row in found) else 1)
