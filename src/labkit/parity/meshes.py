"""Parity on meshes: logits, gradients and cached decoding of one checkpoint over eight devices against one device; parameter bytes against the plan.

`python -m labkit.parity.meshes TYPE...` prints the table of types whose slices are there; `labkit meshes` makes them first.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from labkit.errors import InputError, LabError
from labkit.parity.compare import relative_error
from labkit.parity.components import EXACT_LIMIT
from labkit.parity.preparation import DEVICES, prepare

MESHES = ((1, 8, 1, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 8, 1), (1, 1, 1, 8))
"""Sizes of data, fsdp, tensor and expert."""

MODES = ("exact", "float32")
BATCH, LENGTH, STEPS = 8, 12, 6
FLOAT32_FACTOR, FLOAT32_EPS = 4, float(np.finfo(np.float32).eps)
ZERO = 1e-12
"""A gradient this small beside the largest one is zero by theory: nothing is left of it but rounding."""


@dataclasses.dataclass
class MeshRow:
    """One mesh in one mode. Errors are against one device in float64: relative to the largest entry (exact) or by the norm of each leaf (float32).

    limit: what `logits`, `gradients` and `decode` must not exceed; in float32 they are multiples of the single device's own error, and the limit is 4.
    leaf: the parameter with the largest gradient error. bytes, planned: of parameters on the fullest device, and by the specs; whole: of the unsharded model.
    replicated: large weights that every device holds whole. mixtures: bodies of experts that run inside shard_map in one forward, by their number in the
    program. reason: why the mesh was not tried or did not pass.
    """

    mesh: tuple[int, ...]
    mode: str
    passed: bool = False
    logits: float | None = None
    gradients: float | None = None
    leaf: str = ""
    decode: float | None = None
    limit: float = EXACT_LIMIT
    bytes: int = 0
    planned: int = 0
    whole: int = 0
    replicated: list[str] = dataclasses.field(default_factory=list)
    mixtures: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def tried(self) -> bool:
        return self.logits is not None


@dataclasses.dataclass
class MeshParity:
    """All rows of one model. kind: the slice's, "refined", "translated" or "edited"."""

    model: str
    model_type: str
    kind: str
    rows: list[MeshRow]

    @property
    def passed(self) -> bool:
        """Every mesh passed or does not divide the model, and one of more than one device was tried."""
        return any(row.tried for row in self.rows) and all(row.passed for row in self.rows if row.tried or not row.reason.startswith("not divisible"))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self) | {"passed": self.passed}

    def plain(self) -> str:
        """The table, one line per mesh."""
        number = lambda value: "-" if value is None else f"{value:.1e}"
        lines = []
        for row in self.rows:
            mark = "pass" if row.passed else "FAIL" if row.tried or not row.reason.startswith("not divisible") else "none"
            share = f"{row.bytes / row.whole:6.1%}" if row.whole else "     -"
            figures = f"{number(row.logits):>8} {number(row.gradients):>8} {number(row.decode):>8}"
            where = f"({','.join(map(str, row.mesh))})"
            rest = f"{len(row.replicated):3d} whole  {row.mixtures:2d} mixtures"
            lines.append(
                f"{mark}  {self.model_type:16} {self.kind:10} {row.mode:7} {where:10} {figures} {share} {rest} {row.seconds:6.1f} s  {row.reason}".rstrip()
            )
        return "\n".join(lines)


HEAD = f"{'':4}  {'type':16} {'slice':10} {'mode':7} {'mesh':10} {'logits':>8} {'grads':>8} {'decode':>8} {'bytes':>6}"


def mesh_parity(
    source, *, meshes: Iterable[tuple[int, ...]] = MESHES, mode: str = "exact", decode: bool = True, say: Callable[[MeshRow], None] = lambda row: None
) -> MeshParity:
    """A source's model on each mesh against the same on one device; random tokens [8, 12], a fixed linear loss of the logits.

    mode: "exact", both in float64, limit 1e-9; "float32", per leaf by norm, at most 4 x the error of one device against float64 (which is taken to be at least
    one rounding). decode: tokens one by one through the cache, of a single row, which no shard divides. Needs 8 devices; every array is made in the mode's own
    dtype, with x64 on while it lasts. Raises InputError for too few devices or an unknown mode; what a mesh cannot hold is a row that
    says so. The family must be known to the registry.
    """
    import jax

    from labkit.models import get_family

    if mode not in MODES:
        raise InputError(f"unknown mode {mode!r} of mesh parity", next=f"modes are {', '.join(MODES)}")
    if len(jax.devices()) < DEVICES:
        raise InputError(
            f"mesh parity needs {DEVICES} devices, and there are {len(jax.devices())}", next="start python -m labkit.parity.meshes, which makes them"
        )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        baseline = _Baseline(source, mode, decode)
        rows = []
        for mesh in meshes:
            rows.append(_row(baseline, tuple(mesh)))
            say(rows[-1])
    family = get_family(source.config.model_type)
    return MeshParity(source.name, source.config.model_type, family.source, rows)


class _Baseline:
    """What one device gives: in float64, and in float32 how far it is from that."""

    def __init__(self, source, mode: str, decode: bool):
        from labkit.converters import load_model

        self.source, self.mode, self.decode = source, mode, decode
        model, config, _ = load_model(source, dtype=np.float64)
        self.tokens = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, LENGTH)).astype(np.int32)
        self.exact = measure(model, self.tokens, decode)
        self.whole = sum(leaf.nbytes for leaf in _leaves(model).values()) // (1 if mode == "exact" else 2)
        self.own = None
        if mode == "float32":
            self.own = compare(measure(load_model(source, dtype=np.float32)[0], self.tokens, decode), self.exact, mode)

    @property
    def dtype(self):
        return np.float64 if self.mode == "exact" else np.float32


def _row(baseline: _Baseline, sizes: tuple[int, ...]) -> MeshRow:
    import jax

    from labkit.converters import load_model
    from labkit.scale.mesh import build_mesh

    start, row = time.perf_counter(), MeshRow(sizes, baseline.mode, whole=baseline.whole, limit=EXACT_LIMIT if baseline.mode == "exact" else FLOAT32_FACTOR)
    try:
        mesh = build_mesh(**dict(zip(("data", "fsdp", "tensor", "expert"), sizes)), devices=jax.devices()[: math.prod(sizes)])
        try:
            model, _, _ = load_model(baseline.source, dtype=baseline.dtype, mesh=mesh)
        except (ValueError, InputError) as error:
            row.reason = f"not divisible: {str(error).splitlines()[0]}"
            return row
        judge(row, baseline, model)
    except Exception as error:
        text = str(error).splitlines()
        row.reason = f"{type(error).__name__}: {text[0] if text else ''}"[:200]
    finally:
        row.seconds = round(time.perf_counter() - start, 1)
    return row


def judge(row: MeshRow, baseline: _Baseline, model) -> None:
    """Fill a row from a model that lies on its mesh."""
    import jax

    row.bytes, row.planned, row.replicated = parameter_bytes(model)
    with jax.set_mesh(model.mesh):
        row.mixtures = count_dispatches(model, baseline.tokens)
        found = compare(measure(model, baseline.tokens, baseline.decode), baseline.exact, baseline.mode)
    row.logits, row.decode = (_ratio(baseline, found, name) for name in ("logits", "decode"))
    errors = {name: _ratio(baseline, found, name) for name in found if name.startswith("d ")}
    row.leaf, row.gradients = max(errors.items(), key=lambda item: item[1])
    over = [
        f"{name} {value:.1e}"
        for name, value in (("logits", row.logits), (f"gradient of {row.leaf[2:]}", row.gradients), ("decode", row.decode))
        if value and not value <= row.limit
    ]
    if row.bytes != row.planned:
        over.append(f"{row.bytes} bytes of parameters on a device, {row.planned} planned")
    row.passed, row.reason = not over, "; ".join(over)


def _ratio(baseline: _Baseline, found: dict[str, float], name: str) -> float | None:
    if name not in found:
        return None
    return found[name] if baseline.own is None else found[name] / max(baseline.own[name], FLOAT32_EPS)


def compare(ours: dict[str, np.ndarray], wanted: dict[str, np.ndarray], mode: str) -> dict[str, float]:
    """name -> error. Gradients are `d <path>`; one that is zero by theory is measured against the largest gradient."""
    if mode == "exact":
        size = lambda array: float(np.abs(array).max(initial=0.0))
    else:
        size = lambda array: float(np.linalg.norm(array.astype(np.float64).reshape(-1)))
    floor = ZERO * max(size(array) for name, array in wanted.items() if name.startswith("d "))
    out = {}
    for name, array in wanted.items():
        if not np.isfinite(ours[name]).all():
            out[name] = math.inf
        elif name.startswith("d "):
            out[name] = size(ours[name].astype(np.float64) - array) / max(size(array), floor)
        else:
            out[name] = relative_error(ours[name], array) if mode == "exact" else size(ours[name].astype(np.float64) - array) / size(array)
    return out


def measure(model, tokens: np.ndarray, decode: bool) -> dict[str, np.ndarray]:
    """Logits, every parameter's gradient under `d <path>`, and logits of decoding one token after the other under "decode"; numpy arrays by name."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from labkit.converters.filling import dotted
    from labkit.layers.token_exchange import TOKEN_AXES

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    place = lambda rows: rows
    if model.mesh.size > 1:
        place = lambda rows: jax.device_put(rows, jax.NamedSharding(model.mesh, jax.P(TOKEN_AXES if rows.shape[0] % _shards(model.mesh) == 0 else None)))
    logits, gradients = _loss_and_gradients(graphdef, params, rest, place(jnp.asarray(tokens)))
    out = {"logits": np.asarray(logits)} | {f"d {dotted(path)}": np.asarray(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(gradients)}
    if decode:
        cache, parts = model.init_cache(1, STEPS + 2), []
        for column in range(STEPS):
            step, cache = _step(graphdef, params, rest, place(jnp.asarray(tokens[:1, column : column + 1])), cache)
            parts.append(np.asarray(step))
        out["decode"] = np.concatenate(parts, 1)
    return out


def _shards(mesh) -> int:
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]


def _loss_and_gradients(graphdef, params, rest, tokens):
    """(logits, gradients) of a sum of the logits in which every one has its own weight."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    global _gradients
    if _gradients is None:

        @partial(jax.jit, static_argnums=0)
        def _gradients(graphdef, params, rest, tokens):
            def loss(params):
                logits = nnx.merge(graphdef, params, rest)(tokens)
                weights = jnp.sin(jnp.arange(logits.size, dtype=jnp.float32)).astype(logits.dtype).reshape(logits.shape)
                return jnp.sum(logits * weights), logits

            gradients, logits = jax.grad(loss, has_aux=True)(params)
            return logits, gradients

    return _gradients(graphdef, params, rest, tokens)


def _step(graphdef, params, rest, tokens, cache):
    import jax
    from flax import nnx

    global _one
    if _one is None:
        _one = jax.jit(lambda graphdef, params, rest, tokens, cache: nnx.merge(graphdef, params, rest)(tokens, cache=cache), static_argnums=0)
    return _one(graphdef, params, rest, tokens, cache)


_gradients = _one = None


def _leaves(model) -> dict:
    """path -> array of every parameter."""
    from flax import nnx

    from labkit.converters.filling import dotted

    return {dotted(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def parameter_bytes(model) -> tuple[int, int, list[str]]:
    """(bytes of parameters on the fullest device, bytes by the specs, large weights of two dimensions or more that every device holds whole)."""
    import jax
    from flax import nnx

    from labkit.converters.filling import dotted

    held, planned, whole = {device: 0 for device in model.mesh.devices.flat}, 0, []
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array, spec = leaf.get_raw_value(), leaf.get_metadata("out_sharding", None) or jax.P()
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
        planned += math.prod(jax.NamedSharding(model.mesh, spec).shard_shape(array.shape)) * array.dtype.itemsize
        shape = array.shape[1:] if path[0] == "layers" else array.shape
        if len(shape) > 1 and math.prod(shape) >= 256 and array.sharding.is_fully_replicated:
            whole.append(dotted(path))
    return max(held.values()), planned, whole


def count_dispatches(model, tokens) -> int:
    """How many `shard_map` the forward's program has: one per mixture in the body of each stack."""
    import jax
    import jax.extend.core
    import jax.numpy as jnp
    from flax import nnx

    graphdef, state = nnx.split(model)
    closed = jax.make_jaxpr(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, jnp.asarray(tokens))

    def count(jaxpr) -> int:
        inner = (part for equation in jaxpr.eqns for part in jax.extend.core.jaxprs_in_params(equation.params))
        return sum(equation.primitive.name == "shard_map" for equation in jaxpr.eqns) + sum(count(part) for part in inner)

    return count(closed.jaxpr)


def main(arguments: list[str] | None = None) -> int:
    """0 when every type passed on every mesh that divides it, 1 otherwise. --json FILE gets one JSON line per type and mode."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m labkit.parity.meshes", description=main.__doc__)
    parser.add_argument("names", nargs="+", help="model types, whose tiny models are taken, or models as `labkit` takes them")
    parser.add_argument("--mode", action="append", choices=MODES, default=None)
    parser.add_argument("--mesh", action="append", default=None, help="data,fsdp,tensor,expert; several times for several")
    parser.add_argument("--no-decode", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    meshes = [tuple(map(int, text.split(","))) for text in given.mesh] if given.mesh else MESHES
    prepare()
    from labkit.hf.source import open_source

    print(HEAD, flush=True)
    failed = 0
    for name in given.names:
        for mode in given.mode or ("exact",):
            try:
                source = open_source(name if set(name) & set(":/.") or Path(name).exists() else f"tiny:{name}")
                found = mesh_parity(source, meshes=meshes, mode=mode, decode=not given.no_decode)
            except LabError as error:
                print(f"FAIL  {name:16} {error.what}", flush=True)
                failed += 1
                continue
            print(found.plain(), flush=True)
            failed += not found.passed
            if given.json:
                with given.json.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(found.as_dict()) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
