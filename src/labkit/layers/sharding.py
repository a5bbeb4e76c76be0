"""Logical axes to mesh axes. Model code speaks logical names; one `Sharding` subclass per family maps them."""

import contextlib
import enum
import itertools
import math

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
        self.expert_experts = num_experts % sizes["expert"] == 0

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
                return ("fsdp", "expert") if self.compound_experts else "expert" if self.expert_experts else None
            case "embed_exp", TensorType.WEIGHT:
                return None if self.compound_experts else "fsdp" if self.expert_experts else ("fsdp", "expert")
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

    def weight(self, tensor_name: str, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """The spec of a stored weight, set once at construction.

        shape: of the weight, one layer of it. Raises ValueError that names the weight, the axis and both sizes where a dimension does not divide: what may
        stay whole instead is said by `map_axis` alone.
        """
        spec, sizes = self.spec(tensor_name, axes, TensorType.WEIGHT), dict(self.sizes)
        for axis, size, entry in zip(axes, shape or (), spec):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            if size % _shards(names, sizes):
                over = " x ".join(f"{name}={sizes[name]}" for name in names)
                raise ValueError(f"{tensor_name!r} has {size} of {axis!r}, which does not divide over {over}")
        return spec

    @classmethod
    def for_mesh(cls, config, mesh) -> "Sharding":
        """The mapping for a mesh. Families whose guards need the config's sizes override this."""
        return cls(dict(mesh.shape))

    def fitted(self, tensor_name: str, axes: tuple[str | None, ...] | None, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of a stored weight of known shape: a dimension takes as many of its mesh axes as divide it and are not taken yet.

        axes None: the largest dimension as "embed", the next as "mlp". A weight of two or more dimensions and 256 or more elements that this leaves whole is
        cut along the first dimension that divides; not a stack of experts, whose matrices and biases must be cut alike.
        """
        sizes = dict(self.sizes)
        if axes is None:
            order = sorted(range(len(shape)), key=lambda dim: -shape[dim]) if len(shape) > 1 else []
            axes = tuple("embed" if order[:1] == [dim] else "mlp" if order[1:2] == [dim] else None for dim in range(len(shape)))
        taken, entries = set(), []
        for size, axis in zip(shape, axes):
            mapped = None if axis is None else self.map_axis(axis, tensor_name, TensorType.WEIGHT)
            names = () if mapped is None else (mapped,) if isinstance(mapped, str) else tuple(mapped)
            free = [part for part in _subsets(names) if not taken & set(part) and (part == names or _shards(part, sizes) > 1)]
            names = next((part for part in free if size % _shards(part, sizes) == 0), ())
            taken |= set(names)
            entries.append(names)
        if _shards(taken, sizes) == 1 and len(shape) > 1 and math.prod(shape) >= 256 and "experts" not in axes:
            for names in _subsets(("fsdp", "expert", "tensor")):
                dim = next((dim for dim, size in enumerate(shape) if size % _shards(names, sizes) == 0), None)
                if _shards(names, sizes) > 1 and dim is not None:
                    entries = [names if dim == at else () for at in range(len(shape))]
                    break
        return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in entries))

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


def _shards(names, sizes: dict[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All of `names`, then fewer, in order."""
    return [subset for count in range(len(names), -1, -1) for subset in itertools.combinations(names, count)]


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


def on_mesh(value):
    """An initial value on every device of the ambient mesh: what is made of a numpy array lies on one device, and NNX shards only what lies on the mesh."""
    if isinstance(value, jax.core.Tracer) or jax.sharding.get_abstract_mesh().empty or isinstance(value.sharding, NamedSharding):
        return value
    return jnp.zeros(value.shape, value.dtype) + value


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
