"""`nnx.Linear` and `nnx.Embed` with the slice's dtypes and logical axes filled in."""

from flax import nnx

from labkit.layers.sharding import Sharding


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
        kernel_metadata={"out_sharding": sharding.weight(f"{name}.kernel", axes, (in_features, out_features))},
        bias_metadata=bias,
        rngs=rngs,
    )


def embed(num_embeddings: int, features: int, name: str, *, config, sharding: Sharding, rngs: nnx.Rngs) -> nnx.Embed:
    """A token embedding [vocab, embed]."""
    metadata = {"out_sharding": sharding.weight(f"{name}.embedding", ("vocab", "embed"), (num_embeddings, features))}
    return nnx.Embed(num_embeddings, features, dtype=config.dtype, param_dtype=config.param_dtype, embedding_metadata=metadata, rngs=rngs)
