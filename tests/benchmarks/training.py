"""A training step of SmolLM2-135M in float32 against PyTorch's forward and backward, both sides in one run, in turn; medians.

`python tests/benchmarks/training.py [4x128 ...]` prints the table; the larger size takes minutes. Ours is the whole update that `labkit train` runs (loss,
gradients, clipping, AdamW, new parameters); the reference runs as users run it: transformers with its default attention, `loss.backward()`, no optimiser.
"""

import os
import statistics
import sys
import time

ROUNDS = 5
SIZES = ((4, 128), (8, 256))
"""Sequences and their length; the second is what `labkit train` takes unless told otherwise."""
LIMIT = 1.1


def sides(sequences: int, length: int, model: str = "smollm2-135m"):
    """(name, ours, theirs) as calls without arguments: the loss and its gradients alone, and the whole update."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from labkit.converters import load_model
    from labkit.hf.source import open_source
    from labkit.train.data import PackedData, place_batch, split_batch
    from labkit.train.engine import family_engine
    from labkit.train.loop import make_program
    from labkit.train.parts import split_model
    from labkit.train.settings import TrainSettings
    from labkit.train.step import batch_shardings

    source = open_source(model)
    ours, config, _ = load_model(source, dtype=jnp.float32)
    theirs = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, local_files_only=True).train()
    theirs.config.use_cache = False
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, sequences * length + 1)
    settings = TrainSettings(steps=10**6, batch=sequences, length=length)
    batch = split_batch(PackedData.pack([tokens], length=length, batch=sequences).at(0), 1)
    parts, params, frozen = split_model(ours)
    engine = family_engine(source.config.model_type, remat=settings.remat)
    gradients = jax.jit(lambda params, batch: jax.value_and_grad(lambda p: engine.loss(parts.merge(p, frozen), batch), has_aux=True)(params))
    placed = place_batch(batch, batch_shardings(ours.sharding, batch, ours.mesh))
    flat = {name: array[0] for name, array in placed.items()}
    program, first = make_program(parts, params, source.config.model_type, settings, ours.mesh)
    state = [first(jax.tree.map(jnp.copy, params))]
    rows = torch.from_numpy(np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(sequences)]).astype(np.int64))
    inputs, targets = rows[:, :-1], rows[:, 1:].contiguous()

    def reference():
        theirs.zero_grad(set_to_none=True)
        logits = theirs(inputs).logits
        torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).backward()

    def update():
        state[0], metrics = program.step(state[0], frozen, placed)
        jax.block_until_ready(state[0].params)

    return (
        ("loss and gradients", lambda: jax.block_until_ready(gradients(params, flat)), reference),
        ("whole update, AdamW included", update, reference),
    )


def measure(ours, theirs, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of both sides, run in turn after one warm-up each."""
    times: tuple[list, list] = ([], [])
    for call in (ours, theirs):
        call()
    for _ in range(rounds):
        for side, call in zip(times, (ours, theirs)):
            start = time.perf_counter()
            call()
            side.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def rows(sizes=SIZES, model: str = "smollm2-135m") -> list[dict]:
    """One row per measure and size: name, ours, theirs (seconds), ratio, limit, holds."""
    found = []
    for sequences, length in sizes:
        for name, ours, theirs in sides(sequences, length, model):
            a, b = measure(ours, theirs)
            limit = f"time at most {LIMIT} x"
            found.append({"name": f"{name}, {sequences} x {length} tokens", "ours": a, "theirs": b, "ratio": a / b, "limit": limit, "holds": a / b <= LIMIT})
    return found


def table(found: list[dict]) -> str:
    """The rows as text."""
    lines = [f"{'training step, SmolLM2-135M, float32':48} {'ours, s':>9} {'PyTorch, s':>10} {'ratio':>6}  limit"]
    return "\n".join(
        lines + [f"{r['name']:48} {r['ours']:9.3f} {r['theirs']:10.3f} {r['ratio']:6.2f}  {r['limit']}{'' if r['holds'] else '  FAILS'}" for r in found]
    )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = rows([tuple(map(int, size.split("x"))) for size in sys.argv[1:]] or SIZES)
    print(table(found))
    sys.exit(0 if all(row["holds"] for row in found) else 1)
