"""Modules of `torch.nn` that reference classes derive from, constructed as torch constructs them, with `build` in place of devices and dtypes."""

from flax import nnx

from labkit.layers.modules import LayerNorm as _LayerNorm
from labkit.layers.precision import wide_dtype


class Embedding(nnx.Embed):
    """`torch.nn.Embedding`: `embedding` [num_embeddings, features]."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx=None, *, build, name: str = ""):
        metadata = build._metadata((num_embeddings, embedding_dim), ("vocab", "embed"), f"{name}.embedding")
        more = {"embedding_init": nnx.initializers.zeros} if build.plain else {}
        super().__init__(num_embeddings, embedding_dim, dtype=build.dtype, param_dtype=build.param_dtype, embedding_metadata=metadata, rngs=build.rngs, **more)


class Linear(nnx.Linear):
    """`torch.nn.Linear`: `kernel` [in, out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, build, name: str = "", wide: bool = False):
        more = {"bias_metadata": build._metadata((out_features,), None, f"{name}.bias", wide)} if bias else {}
        more |= {"kernel_init": nnx.initializers.zeros} if build.plain else {}
        super().__init__(
            in_features,
            out_features,
            use_bias=bool(bias),
            dtype=wide_dtype(build.dtype) if wide else build.dtype,
            param_dtype=build.param_dtype,
            kernel_metadata=build._metadata((in_features, out_features), ("embed", "mlp"), f"{name}.kernel", wide),
            rngs=build.rngs,
            **more,
        )


class LayerNorm(_LayerNorm):
    """`torch.nn.LayerNorm`."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, *, build, name: str = ""):
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine, bias=bias, name=name, build=build)


class TransposedLinear(nnx.Module):
    """`transformers.pytorch_utils.Conv1D`: a linear layer whose weight is [in, out] in the reference too."""

    def __init__(self, out_features: int, in_features: int, *, build, name: str = ""):
        inner = Linear(in_features, out_features, True, build=build, name=name)
        self.kernel, self.bias, self.nf, self.nx = inner.kernel, inner.bias, out_features, in_features
        self.dtype = build.dtype

    def __call__(self, x):
        return x @ self.kernel[...].astype(self.dtype) + self.bias[...].astype(self.dtype)
