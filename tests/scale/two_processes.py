"""What two processes of four devices do, and one of eight: a sharded forward, one training step, a checkpoint and its restore.

`python two_processes.py PORT COUNT INDEX FOLDER MODE`: one of COUNT processes. Process 0 writes FOLDER/results.npz; each prints "working" and, with MODE
"linger", goes on with updates until it is ended.
"""

import os
import sys
from pathlib import Path

MODEL = os.environ.get("TWO_PROCESSES_MODEL", "tiny:llama?num_hidden_layers=2")
AXES = {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}
JOIN, SILENCE, LEAVE = 60, 20, 5


def work(folder: Path) -> dict:
    """name -> array of everything that must agree: logits, loss, gradient norm, every parameter after one update; `restored`: the state
    comes back as it was saved."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from labkit.converters import load_model
    from labkit.converters.save import on_host
    from labkit.hf import open_source
    from labkit.scale.mesh import build_mesh
    from labkit.train.checkpoints import RunCheckpoints, abstract_state
    from labkit.train.data import PackedData, split_batch
    from labkit.train.loop import make_program, train_loop
    from labkit.train.parts import split_model
    from labkit.train.settings import TrainSettings

    source, mesh = open_source(MODEL), build_mesh(**AXES)
    model, config, _ = load_model(source, dtype=jnp.float64, mesh=mesh)
    settings = TrainSettings(steps=1, batch=8, length=12, learning_rate=1e-2)
    data = PackedData.pack([np.random.RandomState(0).randint(0, config.vocab_size, 150)], length=12, batch=8, seed=2)
    parts, params, frozen = split_model(model)
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.set_mesh(mesh):
        forward = jax.jit(lambda params, frozen, tokens: parts.merge(params, frozen)(tokens), out_shardings=whole)
        logits = on_host(forward(params, frozen, split_batch(data.at(0), 1)["inputs"][0]), None)
    checkpoints = RunCheckpoints(folder / "steps", keep=1, identity={"data": data.as_dict(), "settings": settings.as_dict()})
    run = train_loop(model, source.config.model_type, data, settings, checkpoints=checkpoints)
    program, _ = make_program(parts, params, source.config.model_type, settings, mesh)
    again = checkpoints.restore(1, abstract_state(program.state, program.shardings))
    checkpoints.close()
    assert again.params["layers.mlp.up_proj.kernel" if "layers.mlp.up_proj.kernel" in again.params else "norm.weight"].sharding.mesh.size == 8
    same = [
        all(np.array_equal(a.data, b.data) for a, b in zip(one.addressable_shards, other.addressable_shards))
        for one, other in zip(jax.tree.leaves(run.state), jax.tree.leaves(again), strict=True)
    ]
    record = run.records[0]
    results = {"logits": logits, "loss": record["loss"], "gradient_norm": record["gradient_norm"], "restored": all(same)}
    return results | {f"after.{name}": on_host(array, None) for name, array in sorted(run.state.params.items())}


def linger() -> None:
    """Updates without end: sums over all devices, one after the other."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from labkit.scale.mesh import build_mesh

    mesh = build_mesh(**AXES)
    with jax.sharding.set_mesh(mesh):
        step = jax.jit(lambda x: jax.lax.with_sharding_constraint(x @ x.T / 64, PartitionSpec(("fsdp", "tensor"))))
        x = step(jnp.ones((64, 64)))
        while True:
            x = step(x).block_until_ready()


def main() -> None:
    port, count, index, folder, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    from labkit.errors import LabError
    from labkit.scale.processes import Place, finish, initialize, is_writer, leave, watched

    try:
        initialize(Place(f"127.0.0.1:{port}", count, index), join_timeout=JOIN, lost_timeout=SILENCE, leave_timeout=LEAVE)
        with watched():
            results = work(folder)
            if is_writer():
                import numpy as np

                np.savez(folder / "results.part.npz", **results)
                os.replace(folder / "results.part.npz", folder / "results.npz")
            print("working", flush=True)
            if mode == "linger":
                linger()
        finish()
    except LabError as error:
        print(f"labkit: {error.paragraph()}", file=sys.stderr, flush=True)
        leave(error.exit_code)
        sys.exit(error.exit_code)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
