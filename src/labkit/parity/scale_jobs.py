"""The exact jobs of phase 5: loss and gradients against the reference's, parity on meshes, routing imposed. Run by `jobs.execute`."""

import numpy as np


def gradients_job(source, *, progress, seed: int = 0) -> dict:
    """Loss, auxiliary loss and every gradient of one batch against the reference's, by parameter; the control forgets one parameter's gradient."""
    from labkit.parity.conformance import Subject
    from labkit.parity.gradients import compare_gradients

    subject = Subject(source, seed=seed)
    progress(0.1, "the reference's loss and gradients")
    wanted, mapped = subject.wanted
    progress(0.5, "our loss and gradients")
    step = subject.step()
    aux = step.aux.get("moe_lb_loss")
    compare = lambda gradients: compare_gradients(gradients, step.loss, None if aux is None else float(aux), mapped, wanted)
    table = compare(step.gradients)
    largest = max(step.gradients, key=lambda path: np.abs(step.gradients[path]).max())
    wrong = compare(step.gradients | {largest: 1.001 * step.gradients[largest]})
    return {
        "loss": table.loss,
        "aux_loss": table.aux_loss,
        "errors": table.errors,
        "zero": list(table.zero),
        "worst": list(table.worst),
        "control": {"change": f"the gradient of {largest} 0.1 percent too large", "error": wrong.worst[0]},
        "arrays": {},
    }


def meshes_job(source, *, progress, meshes=None) -> dict:
    """Parity on meshes in float64. The control: on the first mesh that was tried, one weight's parts lie on each other's devices."""
    from labkit.hf.source import open_source
    from labkit.parity.meshes import MESHES, MeshRow, mesh_parity

    chosen = MESHES if meshes is None else [tuple(sizes) for sizes in meshes]
    opened, done = open_source(source), 0

    def say(row: MeshRow) -> None:
        nonlocal done
        done += 1
        progress(0.9 * done / len(chosen), f"mesh {row.mesh}")

    found = mesh_parity(opened, meshes=chosen, say=say)
    result = found.as_dict() | {"control": None, "arrays": {}}
    tried = next((row for row in found.rows if row.passed), None)
    if tried is not None:
        progress(0.9, "the control that must fail")
        result["control"] = _swapped(opened, tried)
    return result


def _swapped(source, row) -> dict:
    """The same mesh with the largest sharded weight moved on by one device."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from labkit.converters import load_model
    from labkit.converters.filling import dotted
    from labkit.layers.token_exchange import TOKEN_AXES
    from labkit.parity.compare import relative_error
    from labkit.parity.greedy import forward
    from labkit.scale.mesh import build_mesh

    mesh = build_mesh(**dict(zip(("data", "fsdp", "tensor", "expert"), row.mesh)), devices=jax.devices()[: int(np.prod(row.mesh))])
    model, config, _ = load_model(source, dtype=jnp.float64, mesh=mesh)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (int(np.prod([mesh.shape[axis] for axis in TOKEN_AXES])), 12)).astype(np.int32)
    with jax.set_mesh(mesh):
        right = forward(model, tokens)
    graphdef, state = nnx.split(model)
    leaves = nnx.to_flat_state(state)
    cut = [(path, leaf) for path, leaf in leaves if isinstance(leaf, nnx.Param) and not leaf.get_raw_value().sharding.is_fully_replicated]
    path, leaf = max(cut, key=lambda entry: entry[1].get_raw_value().size)
    array = leaf.get_raw_value()
    part = array.sharding.shard_shape(array.shape)
    axis = next(dim for dim, (whole, piece) in enumerate(zip(array.shape, part)) if whole != piece)
    moved = jax.device_put(jnp.roll(array, part[axis], axis), array.sharding)
    wrong = nnx.merge(graphdef, nnx.from_flat_state([(p, l.replace(moved) if p == path else l) for p, l in leaves]))
    with jax.set_mesh(mesh):
        error = relative_error(forward(wrong, tokens), right)
    return {"change": f"the parts of {dotted(path)} moved on by one device", "error": error, "passed": bool(error <= row.limit)}
