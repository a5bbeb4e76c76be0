"""Logical axes to mesh axes. Model code speaks logical names; one `Sharding` subclass per family maps them."""

import contextlib
import enum

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

MESH_AXIS_NAMES = ("data", "fsdp", "tensor", "expert")


class TensorType(enum.Enum):
    WEIGHT = "weight"
    ACTIVATION = "activation"


class Sharding:
    """Maps logical axes to mesh axes; knows the mesh's sizes so that what does not divide stays replicated where that is documented.

    sizes: mesh axis -> size. vocab_size, num_heads, num_kv_heads, num_experts: what the guards divide.
    """

    def __init__(self, sizes: dict[str, int] | None = None, *, vocab_size: int = 0, num_heads: int = 0, num_kv_heads: int = 0, num_experts: int = 0):
        sizes = {axis: 1 for axis in MESH_AXIS_NAMES} | (sizes or {})
        self.sizes = tuple(sorted(sizes.items()))
        tensor, shards = sizes["tensor"], sizes["fsdp"] * sizes["expert"]
        self.vocab_tensor = vocab_size % tensor == 0
        self.heads_tensor = num_heads % tensor == 0
        self.kv_heads_tensor = num_kv_heads % tensor == 0
        self.compound_experts = num_experts % shards == 0

    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self):
        return hash((type(self), tuple(sorted(vars(self).items()))))

    def map_axis(self, axis: str, tensor_name: str, tensor_type: TensorType) -> str | tuple[str, ...] | None:
        """The mesh axis or axes of a logical axis, None for replicated. Raises KeyError that names axis and tensor."""
        match axis, tensor_type:
            case "batch", TensorType.ACTIVATION:
                return ("data", "fsdp", "expert")
            case "embed", TensorType.WEIGHT:
                return ("fsdp", "expert")
            case "experts", TensorType.WEIGHT:
                return ("fsdp", "expert") if self.compound_experts else "expert"
            case "embed_exp", TensorType.WEIGHT:
                return None if self.compound_experts else "fsdp"
            case "heads", _:
                return "tensor" if self.heads_tensor else None
            case "kv_heads", _:
                return "tensor" if self.kv_heads_tensor else None
            case "mlp", _:
                return "tensor"
            case "vocab", _:
                return "tensor" if self.vocab_tensor else None
            case (("length" | "embed" | "head_dim" | "norm"), _):
                return None
            case _:
                raise KeyError(f"unknown logical axis {axis!r} on {tensor_name!r}")

    def spec(self, tensor_name: str, axes: tuple[str | None, ...], tensor_type: TensorType) -> PartitionSpec:
        """The partition spec of a tensor with these logical axes. Raises ValueError when one mesh axis is claimed twice."""
        entries = [None if axis is None else self.map_axis(axis, tensor_name, tensor_type) for axis in axes]
        claimed = [name for entry in entries if entry is not None for name in ((entry,) if isinstance(entry, str) else entry)]
        doubled = sorted({name for name in claimed if claimed.count(name) > 1})
        if doubled:
            raise ValueError(f"{tensor_name!r} with axes {axes} claims mesh axis {', '.join(doubled)} twice")
        return PartitionSpec(*entries)

    def weight(self, tensor_name: str, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The spec of a stored weight, set once at construction."""
        return self.spec(tensor_name, axes, TensorType.WEIGHT)

    def constrain(self, x, tensor_name: str, axes: tuple[str | None, ...]):
        """An activation held to its spec under the ambient mesh; outside a mesh, or where a dimension does not divide, that axis is left to the compiler."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return x
        entries = []
        for size, entry in zip(x.shape, self.spec(tensor_name, axes, TensorType.ACTIVATION)):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            shards = 1
            for name in names:
                shards *= mesh.shape[name]
            entries.append(entry if size % shards == 0 else None)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def tracing() -> bool:
    """True inside eval_shape, jit or vmap."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def default_mesh() -> jax.sharding.Mesh:
    """One device under all four axis names."""
    return jax.make_mesh((1, 1, 1, 1), MESH_AXIS_NAMES, axis_types=(jax.sharding.AxisType.Auto,) * 4, devices=jax.devices()[:1])


@contextlib.contextmanager
def construction(mesh: jax.sharding.Mesh):
    """Where parameters are made: sharded eagerly on `mesh`, or abstract while tracing (m3 specification, invariant 6)."""
    with contextlib.ExitStack() as stack:
        if tracing():
            stack.enter_context(nnx.use_eager_sharding(False))
        else:
            stack.enter_context(jax.sharding.set_mesh(mesh))
            stack.enter_context(nnx.use_eager_sharding(True))
        yield


def stack_metadata(variable: nnx.Variable) -> nnx.Variable:
    """A variable of a stacked layer with the layer axis in front of its spec, placed on the ambient mesh unless it is being traced."""
    spec = variable.get_metadata("out_sharding", None)
    if spec is None:
        return variable
    spec = PartitionSpec(None, *spec)
    value = variable.get_raw_value()
    if not tracing() and not (mesh := jax.sharding.get_mesh()).empty:
        value = jax.device_put(value, NamedSharding(mesh, spec))
    return variable.replace(value, out_sharding=spec)
