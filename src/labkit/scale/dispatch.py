"""Two ways to run a mixture on a mesh, side by side: the lab's dispatch, and a plain einsum over all experts that the compiler partitions.

`python -m labkit.scale.dispatch JOB.json RESULT.json`: one layer's experts, no router; routing is given. Both compute the same function of the same arrays.
"""

import io
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import BaseModel

from labkit.layers.activations import activation
from labkit.layers.moe import apply_experts, on_local_experts
from labkit.layers.sharding import Sharding
from labkit.scale.chips import parse_topology
from labkit.scale.collectives import Role
from labkit.scale.programs import BATCH_AXES, Program, dividing
from labkit.scale.report import MemoryUse
from labkit.scale.roofline import Roofline

DISPATCHES = ("ours", "einsum")
PASSES = ("forward", "forward and backward")


class DispatchJob(BaseModel):
    """Sizes of one mixture layer, and where it runs. tokens: of the whole mesh."""

    model: str
    topology: str
    mesh: dict[str, int]
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    phases: list[str] = []


class DispatchRow(BaseModel):
    """One way, one pass. bytes by what is moved, received by one device; memory None and status "does not fit" where it does not."""

    dispatch: str
    phase: str
    status: str
    weight_bytes: int = 0
    activation_bytes: int = 0
    gradient_bytes: int = 0
    flops: float = 0.0
    memory: MemoryUse | None = None
    roofline: Roofline | None = None
    compile_seconds: float


class DispatchReport(BaseModel):
    """The comparison."""

    job: DispatchJob
    rows: list[DispatchRow]

    def row(self, dispatch: str, phase: str) -> DispatchRow:
        return next(row for row in self.rows if (row.dispatch, row.phase) == (dispatch, phase))

    def plain(self) -> str:
        """One table."""
        job, out = self.job, io.StringIO()
        shape = f"{job.tokens} tokens of {job.hidden}, {job.top_k} of {job.experts} experts, {job.intermediate} wide"
        print(f"one mixture layer of {job.model}: {shape}, on {job.topology}, mesh {', '.join(f'{k}={v}' for k, v in job.mesh.items())}", file=out)
        rows = [("dispatch", "pass", "weights MB", "tokens MB", "gradients MB", "temporaries GiB", "TFLOP", "compute ms", "HBM ms", "links ms", "at least ms")]
        for row in self.rows:
            numbers = [f"{count / 1e6:,.1f}" for count in (row.weight_bytes, row.activation_bytes, row.gradient_bytes)]
            if row.memory is None:
                rows.append((row.dispatch, row.phase, row.status, *[""] * 8))
                continue
            bound = row.roofline
            times = [f"{seconds * 1e3:,.2f}" for seconds in (bound.compute, bound.memory, bound.links, bound.overlapped)]
            rows.append((row.dispatch, row.phase, *numbers, f"{row.memory.temporaries / 2**30:.3f}", f"{row.flops / 1e12:.3f}", *times))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))).rstrip(), file=out)
        print("MB are received by one device; TFLOP and times are of one device, grouped products at balanced load", file=out)
        return out.getvalue().rstrip()


class Experts(nnx.Module):
    """gate_up_proj [experts, hidden, 2, intermediate], down_proj [experts, intermediate, hidden], cut as every mixture's."""

    def __init__(self, job: DispatchJob, sharding: Sharding):
        dtype = jnp.dtype(job.dtype)
        shapes = {
            "gate_up_proj": ((job.experts, job.hidden, 2, job.intermediate), ("experts", "embed_exp", None, "mlp")),
            "down_proj": ((job.experts, job.intermediate, job.hidden), ("experts", "mlp", "embed_exp")),
        }
        for name, (shape, axes) in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, dtype), out_sharding=sharding.weight(f"experts.{name}", axes)))

    @on_local_experts
    def ours(self, x, indices, weights):
        """The lab's: on the devices that hold the experts."""
        return apply_experts(x, indices, weights, self.gate_up_proj, self.down_proj, activation("silu"))

    def einsum(self, x, indices, weights):
        """Every expert on every token, weighted by the routing, zero for experts not chosen."""
        combine = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(indices, self.gate_up_proj.shape[0], dtype=weights.dtype))
        gate_up = jnp.einsum("th,ehgi->tegi", x, self.gate_up_proj[...])
        inner = activation("silu")(gate_up[:, :, 0]) * gate_up[:, :, 1] * combine[:, :, None]
        return jnp.einsum("tei,eih->th", inner, self.down_proj[...])


def mixture_program(job: DispatchJob, mesh, dispatch: str, phase: str) -> Program:
    """(weights, x, indices, routing weights[, cotangent]) -> the layer's result, or its gradients with respect to weights and x."""
    sharding = Sharding(dict(mesh.shape), num_experts=job.experts)
    with nnx.use_eager_sharding(False):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Experts(job, sharding)))
    flat = dict(nnx.to_flat_state(state))
    placed = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    weights = {".".join(path): placed(v.get_raw_value().shape, v.get_raw_value().dtype, v.get_metadata("out_sharding")) for path, v in flat.items()}
    rows = PartitionSpec(dividing(BATCH_AXES, job.tokens, mesh) or None)
    x = placed((job.tokens, job.hidden), jnp.dtype(job.dtype), rows)
    routing = (placed((job.tokens, job.top_k), jnp.int32, rows), placed((job.tokens, job.top_k), jnp.dtype(job.dtype), rows))

    def forward(weights, x, indices, routed):
        leaves = [(path, variable.replace(weights[".".join(path)])) for path, variable in flat.items()]
        return getattr(nnx.merge(graphdef, nnx.from_flat_state(leaves)), dispatch)(x, indices, routed)

    def gradients(weights, x, indices, routed, cotangent):
        return jax.vjp(lambda weights, x: forward(weights, x, indices, routed), weights, x)[1](cotangent)

    roles = tuple(Role("weight", f"experts.{name}") for name in sorted(weights)) + tuple(Role("input", name) for name in ("x", "indices", "routing"))
    if phase == PASSES[0]:
        return Program(forward, (weights, x, *routing), x.sharding, (), roles)
    out = (jax.tree.map(lambda leaf: leaf.sharding, weights), x.sharding)
    return Program(gradients, (weights, x, *routing, x), out, (), (*roles, Role("input", "cotangent")))


def compare(job: DispatchJob) -> DispatchReport:
    """Both ways, both passes; inside a compiling process."""
    from labkit.scale.aot_worker import topology_devices
    from labkit.scale.inspect_program import local_share
    from labkit.scale.mesh import build_mesh
    from labkit.scale.reading import read_program

    topology = parse_topology(job.topology)
    mesh = build_mesh(**job.mesh, devices=topology_devices(topology))
    rows = []
    for phase in PASSES:
        for dispatch in DISPATCHES:
            print(f"{dispatch}, {phase} is being compiled", flush=True)
            read = read_program(mixture_program(job, mesh, dispatch, phase), mesh)
            common = dict(dispatch=dispatch, phase=phase, compile_seconds=read.compile_seconds)
            if read.compiled is None:
                rows.append(DispatchRow(**common, status="does not fit"))
                continue
            flops = sum(product.total * local_share(product, job.experts) for product in read.products)
            moved = {kind: sum(c.total for c in read.collectives if c.moves == kind) for kind in ("weights", "activations", "gradients")}
            rows.append(
                DispatchRow(
                    **common,
                    status="compiled",
                    weight_bytes=moved["weights"],
                    activation_bytes=moved["activations"],
                    gradient_bytes=moved["gradients"],
                    flops=flops,
                    memory=read.memory(topology),
                    roofline=read.roofline(topology, flops),
                )
            )
    return DispatchReport(job=job, rows=rows)


if __name__ == "__main__":
    from labkit.scale.aot_worker import main

    sys.exit(main(sys.argv[1:], lambda given: compare(DispatchJob.model_validate(given)).model_dump()))
