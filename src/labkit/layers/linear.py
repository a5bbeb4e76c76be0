"""`nnx.Linear` and `nnx.Embed` with the slice's dtypes and logical axes filled in."""

import jax
from flax import nnx

from labkit.layers.sharding import Sharding


def dot_general_by_rows(x, kernel, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
    """`jax.lax.dot_general` of x [..., in] and kernel [in, out] as one product of two matrices.

    The forward pass is the same to the bit. Backward, XLA on CPU writes a transposed copy of the gradient of an activation with more than two axes before it
    makes the kernel's gradient: a quarter of the time of a gated MLP's forward and backward.
    """
    dot = lambda x, numbers: jax.lax.dot_general(x, kernel, numbers, precision, preferred_element_type, out_sharding=out_sharding)
    if x.ndim <= 2 or kernel.ndim != 2 or out_sharding is not None or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return dot(x, dimension_numbers)
    return dot(x.reshape(-1, x.shape[-1]), (((1,), (0,)), ((), ()))).reshape(*x.shape[:-1], kernel.shape[1])


class Embed(nnx.Embed):
    """`nnx.Embed` whose `attend` is one product of two matrices (`dot_general_by_rows` says why)."""

    def attend(self, query, out_sharding=None):
        flat = super().attend(query.reshape(-1, query.shape[-1]), out_sharding)
        return flat.reshape(*query.shape[:-1], flat.shape[-1])


def linear(
    in_features: int, out_features: int, axes: tuple[str, str], name: str, *, config, sharding: Sharding, rngs: nnx.Rngs, use_bias: bool = False
) -> nnx.Linear:
    """A linear layer with kernel [in_features, out_features]; `axes` are its logical axes, `name` its parameter name in error messages."""
    bias = {"out_sharding": sharding.weight(f"{name}.bias", axes[1:], (out_features,))} if use_bias else {}
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        dot_general=dot_general_by_rows,
        kernel_metadata={"out_sharding": sharding.weight(f"{name}.kernel", axes, (in_features, out_features))},
        bias_metadata=bias,
        rngs=rngs,
    )


def embed(num_embeddings: int, features: int, name: str, *, config, sharding: Sharding, rngs: nnx.Rngs) -> Embed:
    """A token embedding [vocab, embed]."""
    metadata = {"out_sharding": sharding.weight(f"{name}.embedding", ("vocab", "embed"), (num_embeddings, features))}
    return Embed(num_embeddings, features, dtype=config.dtype, param_dtype=config.param_dtype, embedding_metadata=metadata, rngs=rngs)
