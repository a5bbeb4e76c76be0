"""How translated modules are built: one object that makes parameters in the right dtype, with the right sharding, in Hugging Face's orientation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.linear import dot_general_by_rows
from labkit.layers.modules import Conv1d, HeadBias, LayerNorm, TorchRMSNorm
from labkit.layers.plan import LayerPlan
from labkit.layers.precision import wide_dtype
from labkit.layers.sharding import Sharding, construction, default_mesh, on_mesh
from labkit.layers.stack import make_stack
from labkit.layers.torch_modules import TransposedLinear
from labkit.layers.variables import Buffer, Constant, Table, value

read = value
"""What emitted code calls `value`, whose name modeling files give to attention's values."""

INITIAL_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class Build:
    """What a module needs to make its parameters. dtype: what is computed in; param_dtype: what parameters are kept in.

    plain: initial values are zeros where they would be random (for modules of which only shapes are wanted).
    """

    rngs: nnx.Rngs
    sharding: Sharding
    dtype: object
    param_dtype: object
    plain: bool = False

    def wide(self) -> "Build":
        """The same for a module that is kept and computed in at least float32."""
        return dataclasses.replace(self, dtype=wide_dtype(self.dtype), param_dtype=wide_dtype(self.param_dtype))

    def _metadata(self, shape, axes, name: str, wide: bool = False) -> dict:
        return {"out_sharding": self.sharding.fitted(name, axes, shape), "compute_dtype": wide_dtype(self.dtype) if wide else np.dtype(self.dtype)}

    def _kept(self, wide: bool):
        return wide_dtype(self.param_dtype) if wide else self.param_dtype

    def param(self, init, shape, axes=None, name: str = "", wide: bool = False) -> nnx.Param:
        """A parameter of `shape`, a number for a vector.

        init: `jnp.ones`, `jnp.zeros`, "normal", a number, or any function of (shape, dtype). axes: logical axes, None: chosen by
        shape. wide: kept and computed in at least float32. Raises ValueError for another `init`."""
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), self._kept(wide)
        if init == "normal":
            value = jnp.zeros(shape, dtype) if self.plain else nnx.initializers.normal(stddev=INITIAL_STDDEV)(self.rngs.params(), shape, dtype)
        elif isinstance(init, int | float):
            value = jnp.full(shape, init, dtype)
        elif callable(init):
            value = init(shape, dtype)
        else:
            raise ValueError(f"parameter {name!r}: init is a function of (shape, dtype), a number or 'normal', not {init!r}")
        return nnx.Param(on_mesh(value), **self._metadata(shape, axes, name, wide))

    def parameter(self, initial, name: str = "", axes=None, wide: bool = False) -> nnx.Param:
        """A parameter whose initial value is an array that the config determines."""
        return self.param(lambda shape, dtype: jnp.asarray(initial, dtype), np.shape(initial), axes, name, wide)

    def buffer(self, shape, name: str = "", dtype=None, init=0) -> Buffer:
        """A persistent buffer: state that a checkpoint holds and that no optimiser touches, full of `init` until it is loaded. dtype None: as a parameter."""
        shape, dtype = tuple(shape), np.dtype(self.param_dtype if dtype is None else dtype)
        metadata = self._metadata(shape, (None,) * len(shape), name)
        if not jnp.issubdtype(dtype, jnp.inexact):
            metadata["compute_dtype"] = dtype
        return Buffer(on_mesh(jnp.full(shape, init, dtype)), **metadata)

    def linear(self, in_features: int, out_features: int, bias: bool = False, axes=None, name: str = "", wide: bool = False) -> nnx.Linear:
        """`nnx.Linear` with kernel [in_features, out_features]; `axes` are the kernel's logical axes."""
        more = {"kernel_init": nnx.initializers.zeros} if self.plain else {}
        if bias:
            more["bias_metadata"] = self._metadata((out_features,), None if axes is None else axes[1:], f"{name}.bias", wide)
        return nnx.Linear(
            in_features,
            out_features,
            use_bias=bool(bias),
            dtype=wide_dtype(self.dtype) if wide else self.dtype,
            param_dtype=self._kept(wide),
            dot_general=dot_general_by_rows,
            kernel_metadata=self._metadata((in_features, out_features), axes or ("embed", "mlp"), f"{name}.kernel", wide),
            rngs=self.rngs,
            **more,
        )

    def embedding(self, num_embeddings: int, features: int, name: str = "", padding_idx: int | None = None, axes=("vocab", "embed")) -> nnx.Embed:
        """`nnx.Embed` [num_embeddings, features]. padding_idx acts on gradients of the reference only."""
        more = {"embedding_init": nnx.initializers.zeros} if self.plain else {}
        metadata = self._metadata((num_embeddings, features), axes, f"{name}.embedding")
        return nnx.Embed(num_embeddings, features, dtype=self.dtype, param_dtype=self.param_dtype, embedding_metadata=metadata, rngs=self.rngs, **more)

    def conv1d(self, in_channels, out_channels, kernel_size, groups=1, padding=0, stride=1, dilation=1, bias=True, name: str = "") -> Conv1d:
        """`torch.nn.Conv1d` over [batch, channels, length]: `weight` [out, in / groups, kernel], `bias`."""
        whole = [n[0] if isinstance(n, tuple | list) else n for n in (kernel_size, padding, stride, dilation)]
        return Conv1d(
            in_channels, out_channels, whole[0], groups=groups, padding=whole[1], stride=whole[2], dilation=whole[3], bias=bias, name=name, build=self
        )

    def layer_norm(self, shape, eps=1e-5, elementwise_affine=True, bias=True, name: str = "") -> LayerNorm:
        """`torch.nn.LayerNorm`: `weight`, `bias`."""
        return LayerNorm(shape, eps=eps, elementwise_affine=elementwise_affine, bias=bias, name=name, build=self)

    def rms_norm(self, shape, eps=None, elementwise_affine=True, name: str = "") -> TorchRMSNorm:
        """`torch.nn.RMSNorm`: `weight`."""
        return TorchRMSNorm(shape, eps=eps, elementwise_affine=elementwise_affine, name=name, build=self)

    def layers(self, plan: LayerPlan, make_layer):
        """All layers of a plan, as `labkit.layers.stack.make_decoder` lays them out. make_layer(layer_idx, build) builds one layer."""

        def stack(index, repeats):
            return make_stack(lambda rngs: make_layer(index, dataclasses.replace(self, rngs=rngs)), repeats, self.rngs)

        stacks = [[stack(segment.layer(p, 0), segment.repeats) for p in range(len(segment.cycle))] for segment in plan.segments]
        return stacks[0][0] if plan.homogeneous else nnx.List([nnx.List(segment) for segment in stacks])

    def gpt_linear(self, out_features: int, in_features: int, name: str = ""):
        """`Conv1D` of transformers: a linear layer with kernel [in_features, out_features] on both sides."""
        return TransposedLinear(out_features, in_features, build=self, name=name)

    def head_bias(self, features: int, bias=True, name: str = "") -> HeadBias:
        """The bias of a head that is tied to the embedding: `bias` [features] where there is one."""
        return HeadBias(features, bias=bias, name=name, build=self)

    def list(self, modules) -> nnx.List:
        """Modules that are not stacked: their parameters have plain paths."""
        return nnx.List(list(modules))


def create_model(model_class, config, sharding_class, *, rngs: nnx.Rngs, mesh: jax.sharding.Mesh | None = None, quant_mode_str: str | None = None):
    """`model_class(config, build=...)` with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`.

    The model gets `config`, `sharding` and `mesh` as attributes. quant_mode_str must be None or empty: raises ValueError otherwise.
    """
    if quant_mode_str:
        raise ValueError(f"quant_mode_str={quant_mode_str!r}: this slice has no quantized form")
    mesh = default_mesh() if mesh is None else mesh
    with construction(mesh):
        sharding = sharding_class.for_mesh(config, mesh)
        model = model_class(config, build=Build(rngs, sharding, config.dtype, config.param_dtype))
        model.config, model.sharding, model.mesh = config, sharding, mesh
        return model


__all__ = ["Buffer", "Build", "Constant", "Table", "create_model", "read", "value"]
