"""One mixture layer, 8 of 64 experts: grouped products against the einsum over all experts, on one device and on meshes of eight host devices.

`python tests/benchmarks/mixture.py [--tokens 256]` prints one table: forward and forward-with-gradients, float32, the median of several runs taken in turn.
Host devices share the machine's cores: sharding is measured for what it costs or saves on them, not for a speed that only more hardware gives.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.moe import apply_experts, on_local_experts
from labkit.layers.sharding import Sharding, construction, default_mesh
from labkit.layers.token_exchange import TOKEN_AXES
from labkit.scale.mesh import build_mesh

EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 8, 512, 256
MESHES = {"one device": None, "expert=8": {"expert": 8}, "fsdp=8": {"fsdp": 8}, "fsdp=2,tensor=2,expert=2": {"fsdp": 2, "tensor": 2, "expert": 2}}


class Experts(nnx.Module):
    """[experts, hidden, 2, width] and [experts, width, hidden]."""

    def __init__(self, sharding, random):
        for name, shape, axes in (
            ("gate_up_proj", (EXPERTS, HIDDEN, 2, WIDTH), ("experts", "embed_exp", None, "mlp")),
            ("down_proj", (EXPERTS, WIDTH, HIDDEN), ("experts", "mlp", "embed_exp")),
        ):
            values = jnp.asarray(random.normal(size=shape, scale=shape[1] ** -0.5).astype(np.float32))
            mesh = jax.sharding.get_mesh()
            spec = sharding.weight(name, axes)
            values = values if mesh.empty else jax.device_put(values, jax.NamedSharding(mesh, spec))
            setattr(self, name, nnx.Param(values, out_sharding=spec))


class Grouped(Experts):
    @on_local_experts
    def __call__(self, x, index, weights):
        return apply_experts(x, index, weights, self.gate_up_proj, self.down_proj, jax.nn.silu)


class Einsum(Experts):
    """Every token meets every expert; what it did not choose counts nothing. On a mesh the compiler places it."""

    def __call__(self, x, index, weights):
        combine = jnp.zeros((x.shape[0], EXPERTS), x.dtype).at[jnp.arange(x.shape[0])[:, None], index].add(weights)
        gate_up = jnp.einsum("th,ehci->teci", x, self.gate_up_proj[...])
        act = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
        return jnp.einsum("tei,eih->th", act * combine[..., None], self.down_proj[...])


def compiled(kind, sizes, inputs):
    """(forward, forward with gradients, arguments) of one layer on one mesh."""
    mesh = default_mesh() if sizes is None else build_mesh(**sizes)
    with construction(mesh):
        layer = kind(Sharding(dict(mesh.shape), num_experts=EXPERTS), np.random.default_rng(1))
    graphdef, state = nnx.split(layer)
    forward = lambda state, x, index, weights: nnx.merge(graphdef, state)(x, index, weights)
    gradients = lambda *arguments: jax.grad(lambda state, x, index, weights: jnp.sum(jnp.sin(forward(state, x, index, weights))), argnums=(0, 1, 3))(*arguments)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, jax.NamedSharding(mesh, jax.P(TOKEN_AXES))) for array in inputs]
        arguments = (state, *placed)
        return [jax.jit(function).lower(*arguments).compile() for function in (forward, gradients)], arguments


def main() -> int:
    """Exit 0 when the grouped form is at least 3 x as fast as the einsum on one device and every form gives the same numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    index = np.argsort(random.random((given.tokens, EXPERTS)), -1)[:, :TOP_K].astype(np.int32)
    inputs = [random.normal(size=(given.tokens, HIDDEN)).astype(np.float32), index, random.random((given.tokens, TOP_K)).astype(np.float32)]
    cases = {(name, kind.__name__): compiled(kind, sizes, inputs) for name, sizes in MESHES.items() for kind in (Grouped, Einsum)}
    want, seconds = None, {}
    for key, (functions, arguments) in cases.items():
        got = np.asarray(functions[0](*arguments))
        want = got if want is None else want
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max(), f"{key} computes something else"
        jax.block_until_ready(functions[1](*arguments))
    for _ in range(given.runs):
        for key, (functions, arguments) in cases.items():
            for number, function in enumerate(functions):
                start = time.perf_counter()
                jax.block_until_ready(function(*arguments))
                seconds.setdefault((*key, number), []).append(time.perf_counter() - start)
    middle = {key: statistics.median(times) for key, times in seconds.items()}
    print(f"{TOP_K} of {EXPERTS} experts, hidden {HIDDEN}, width {WIDTH}, {given.tokens} tokens, float32, {os.cpu_count()} cores; ms, median of {given.runs}")
    print(f"{'':26} {'forward':>28} {'with gradients':>28}")
    print(f"{'mesh':26} " + " ".join(f"{'grouped':>9} {'einsum':>9} {'ratio':>8}" for _ in range(2)))
    for name in MESHES:
        row = [(middle[name, "Grouped", n] * 1e3, middle[name, "Einsum", n] * 1e3) for n in range(2)]
        print(f"{name:26} " + " ".join(f"{a:9.1f} {b:9.1f} {b / a:7.2f}x" for a, b in row))
    ratio = middle["one device", "Einsum", 0] / middle["one device", "Grouped", 0]
    print(f"grouped against einsum on one device: {ratio:.2f}x (at least 3 wanted)")
    return 0 if ratio >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
