"""Torch's dtypes by name, and what stands for them in the slice."""

DTYPES = {
    **{n: "jnp.int32" for n in ("torch.long", "torch.int64", "torch.int32", "torch.int", "torch.int16", "torch.int8")},
    **{"torch.uint8": "jnp.uint8", "torch.bool": "bool", "torch.bfloat16": "jnp.bfloat16", "torch.float16": "jnp.float16", "torch.half": "jnp.float16"},
}
WIDE_DTYPES = {"torch.float32", "torch.float", "torch.float64", "torch.double"}
