"""Torch operations and what they are in jax.numpy. One table serves `torch.f(x)`, `F.f(x)` and `x.f()`; a method's receiver is its first argument.

A template names its arguments in braces: `{input}` is required, `{dim|-1}` has a default, `{, axis=dim}` appears only when the argument was given.
`{wide:input}` is the argument in at least float32 when the call asks for float32. Signatures are torch's; `*size` takes what is left.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Op:
    """signature: torch's parameter names in order. template: the expression, or the name of a method of the rewriter that writes it ("@name")."""

    signature: tuple[str, ...]
    template: str


def _op(signature: str, template: str) -> Op:
    return Op(tuple(signature.split()), template)


_UNARY = {
    **{
        n: f"jnp.{n}"
        for n in "exp log log2 log1p expm1 sin cos tan tanh sqrt abs floor ceil round sign square isnan isinf isfinite sinh cosh conj real imag".split()
    },
    "rsqrt": "jax.lax.rsqrt",
    "sigmoid": "jax.nn.sigmoid",
    "relu": "jax.nn.relu",
    "silu": "jax.nn.silu",
    "logsigmoid": "jax.nn.log_sigmoid",
    "erf": "jax.lax.erf",
    "logical_not": "jnp.logical_not",
    "reciprocal": "jnp.reciprocal",
    "atan": "jnp.arctan",
}
FLOATING = set("exp log log2 log1p expm1 sin cos tan tanh sqrt sinh cosh rsqrt sigmoid erf reciprocal atan".split())
"""Functions of one argument that make floats of integers."""

_BINARY = {
    "mul": "({input} * {other})",
    "multiply": "({input} * {other})",
    "floor_divide": "({input} // {other})",
    "remainder": "({input} % {other})",
    "fmod": "jnp.fmod({input}, {other})",
    "matmul": "({input} @ {other})",
    "bmm": "({input} @ {other})",
    "mm": "({input} @ {other})",
    "mv": "({input} @ {other})",
    "dot": "({input} @ {other})",
    "pow": "@pow",
    "maximum": "jnp.maximum({input}, {other})",
    "minimum": "jnp.minimum({input}, {other})",
    "eq": "({input} == {other})",
    "ne": "({input} != {other})",
    "lt": "({input} < {other})",
    "le": "({input} <= {other})",
    "gt": "({input} > {other})",
    "greater": "({input} > {other})",
    "ge": "({input} >= {other})",
    "logical_and": "jnp.logical_and({input}, {other})",
    "logical_or": "jnp.logical_or({input}, {other})",
    "logical_xor": "jnp.logical_xor({input}, {other})",
    "bitwise_and": "({input} & {other})",
    "bitwise_or": "({input} | {other})",
    "bitwise_xor": "({input} ^ {other})",
    "outer": "jnp.outer({input}, {other})",
    "atan2": "jnp.arctan2({input}, {other})",
}

OPS: dict[str, Op] = {
    **{name: _op("input", f"{call}({{input}})") for name, call in _UNARY.items()},
    **{name: _op("input other", template) for name, template in _BINARY.items()},
    **{name: _op("input other alpha", "@plus") for name in ("add", "sub")},
    **{name: _op("input other rounding_mode", "@div") for name in ("div", "divide", "true_divide")},
    "neg": _op("input", "(-{input})"),
    "clone": _op("input", "{input}"),
    "negative": _op("input", "(-{input})"),
    "gelu": _op("input approximate", "@gelu"),
    "softplus": _op("input beta threshold", "{softplus}({input}{, beta=beta}{, threshold=threshold})"),
    "glu": _op("input dim", "jax.nn.glu({input}, axis={dim|-1})"),
    "softmax": _op("input dim dtype _stacklevel", "@softmax"),
    "log_softmax": _op("input dim dtype", "jax.nn.log_softmax({wide:input}, axis={dim|-1})"),
    "sum": _op("input dim keepdim dtype", "jnp.sum({wide:input}{, axis=dim}{, keepdims=keepdim})"),
    "mean": _op("input dim keepdim dtype", "jnp.mean({wide:input}{, axis=dim}{, keepdims=keepdim})"),
    "prod": _op("input dim keepdim dtype", "jnp.prod({wide:input}{, axis=dim}{, keepdims=keepdim})"),
    "amax": _op("input dim keepdim", "jnp.max({input}{, axis=dim}{, keepdims=keepdim})"),
    "amin": _op("input dim keepdim", "jnp.min({input}{, axis=dim}{, keepdims=keepdim})"),
    "max": _op("input dim keepdim", "@extreme"),
    "min": _op("input dim keepdim", "@extreme"),
    "any": _op("input dim keepdim", "jnp.any({input}{, axis=dim}{, keepdims=keepdim})"),
    "all": _op("input dim keepdim", "jnp.all({input}{, axis=dim}{, keepdims=keepdim})"),
    "var": _op("input dim unbiased keepdim correction", "@variance"),
    "std": _op("input dim unbiased keepdim correction", "@variance"),
    "norm": _op("input p dim keepdim", "@norm"),
    "vector_norm": _op("input ord dim keepdim", "@norm"),
    "logsumexp": _op("input dim keepdim", "jax.nn.logsumexp({input}, axis={dim}{, keepdims=keepdim})"),
    "argmax": _op("input dim keepdim", "jnp.argmax({input}{, axis=dim}{, keepdims=keepdim})"),
    "argmin": _op("input dim keepdim", "jnp.argmin({input}{, axis=dim}{, keepdims=keepdim})"),
    "cumsum": _op("input dim dtype", "jnp.cumsum({wide:input}, axis={dim})"),
    "cumprod": _op("input dim dtype", "jnp.cumprod({wide:input}, axis={dim})"),
    "view": _op("input *size", "@view"),
    "reshape": _op("input *size", "@view"),
    "view_as": _op("input other", "{input}.reshape({other}.shape)"),
    "reshape_as": _op("input other", "{input}.reshape({other}.shape)"),
    "transpose": _op("input dim0 dim1", "{input}.swapaxes({dim0}, {dim1})"),
    "swapaxes": _op("input dim0 dim1", "{input}.swapaxes({dim0}, {dim1})"),
    "t": _op("input", "{input}.T"),
    "permute": _op("input *dims", "{input}.transpose({dims})"),
    "movedim": _op("input source destination", "jnp.moveaxis({input}, {source}, {destination})"),
    "flatten": _op("input start_dim end_dim", "@flatten"),
    "unflatten": _op("input dim sizes", "{unflatten}({input}, {dim}, {sizes})"),
    "unsqueeze": _op("input dim", "jnp.expand_dims({input}, {dim})"),
    "squeeze": _op("input dim", "@squeeze"),
    "expand": _op("input *sizes", "{expand}({input}, {sizes})"),
    "expand_as": _op("input other", "jnp.broadcast_to({input}, {other}.shape)"),
    "broadcast_to": _op("input *size", "{expand}({input}, {size})"),
    "repeat": _op("input *sizes", "jnp.tile({input}, {sizes})"),
    "tile": _op("input *sizes", "jnp.tile({input}, {sizes})"),
    "repeat_interleave": _op("input repeats dim", "jnp.repeat({input}, {repeats}, axis={dim|None})"),
    "cat": _op("tensors dim", "@concatenate"),
    "concat": _op("tensors dim", "@concatenate"),
    "concatenate": _op("tensors dim", "@concatenate"),
    "stack": _op("tensors dim", "@stack"),
    "split": _op("input split_size_or_sections dim", "{split}({input}, {split_size_or_sections}, axis={dim|0})"),
    "tensor_split": _op("input sections dim", "jnp.array_split({input}, {sections}, axis={dim|0})"),
    "chunk": _op("input chunks dim", "jnp.split({input}, {chunks}, axis={dim|0})"),
    "unbind": _op("input dim", "{unbind}({input}, {dim|0})"),
    "roll": _op("input shifts dims", "jnp.roll({input}, {shifts}, axis={dims|None})"),
    "flip": _op("input *dims", "jnp.flip({input}, {dims})"),
    "narrow": _op("input dim start length", "jax.lax.dynamic_slice_in_dim({input}, {start}, {length}, axis={dim})"),
    "select": _op("input dim index", "jnp.take({input}, {index}, axis={dim})"),
    "index_select": _op("input dim index", "jnp.take({input}, {index}, axis={dim})"),
    "gather": _op("input dim index", "{gather}({input}, {dim}, {index})"),
    "take_along_dim": _op("input indices dim", "jnp.take_along_axis({input}, {indices}, axis={dim})"),
    "scatter": _op("input dim index src value", "@scatter"),
    "scatter_add": _op("input dim index src", "{scatter_add}({input}, {dim}, {index}, {src})"),
    "index_add": _op("input dim index source", "{index_add}({input}, {dim}, {index}, {source})"),
    "index_copy": _op("input dim index source", "{index_copy}({input}, {dim}, {index}, {source})"),
    "masked_fill": _op("input mask value", "@masked_fill"),
    "where": _op("condition input other", "@where"),
    "clamp": _op("input min max", "jnp.clip({input}{, min=min}{, max=max})"),
    "clip": _op("input min max", "jnp.clip({input}{, min=min}{, max=max})"),
    "clamp_min": _op("input min", "jnp.maximum({input}, {min})"),
    "clamp_max": _op("input max", "jnp.minimum({input}, {max})"),
    "tril": _op("input diagonal", "jnp.tril({input}, k={diagonal|0})"),
    "triu": _op("input diagonal", "jnp.triu({input}, k={diagonal|0})"),
    "diagonal": _op("input offset dim1 dim2", "jnp.diagonal({input}, {offset|0}, {dim1|0}, {dim2|1})"),
    "topk": _op("input k dim largest sorted", "@topk"),
    "sort": _op("input dim descending", "@sort"),
    "argsort": _op("input dim descending stable", "jnp.argsort({input}, axis={dim|-1}{, descending=descending}, stable=True)"),
    "one_hot": _op("input num_classes", "jax.nn.one_hot({input}, {num_classes}, dtype=jnp.int32)"),
    "bincount": _op("input weights minlength", "jnp.bincount({input}, weights={weights|None}, length={minlength})"),
    "histc": _op("input bins min max", "jnp.bincount({input}.astype(jnp.int32), length={bins})"),
    "pad": _op("input pad mode value", "@pad"),
    "einsum": _op("equation *operands", "@einsum"),
    "baddbmm": _op("input batch1 batch2 beta alpha", "@baddbmm"),
    "addmm": _op("input mat1 mat2 beta alpha", "@baddbmm"),
    "linear": _op("input weight bias", "@linear"),
    "conv1d": _op(
        "input weight bias stride padding dilation groups",
        "{conv1d}({input}, {weight}, {bias|None}{, stride=stride}{, padding=padding}{, dilation=dilation}{, groups=groups})",
    ),
    "embedding": _op("input weight", "{weight}[{input}]"),
    "layer_norm": _op("input normalized_shape weight bias eps", "{layer_norm}({input}, {normalized_shape}, {weight|None}, {bias|None}, {eps|1e-5})"),
    "rms_norm": _op("input normalized_shape weight eps", "{rms_norm}({input}, {normalized_shape}, {weight|None}, {eps|None})"),
    "normalize": _op("input p dim eps", "{normalize}({input}, {p|2.0}, axis={dim|1}, eps={eps|1e-12})"),
    "dropout": _op("input p training inplace", "{input}"),
    "tanhshrink": _op("input", "({input} - jnp.tanh({input}))"),
    "zeros": _op("*size dtype", "@full0"),
    "ones": _op("*size dtype", "@full1"),
    "empty": _op("*size dtype", "@full0"),
    "full": _op("size fill_value dtype", "@full"),
    "zeros_like": _op("input dtype", "jnp.zeros_like({input}{, dtype=dtype})"),
    "ones_like": _op("input dtype", "jnp.ones_like({input}{, dtype=dtype})"),
    "empty_like": _op("input dtype", "jnp.zeros_like({input}{, dtype=dtype})"),
    "full_like": _op("input fill_value dtype", "jnp.full_like({input}, {fill_value}{, dtype=dtype})"),
    "new_zeros": _op("input *size dtype", "jnp.zeros({size}, dtype={dtype|{input}.dtype})"),
    "new_ones": _op("input *size dtype", "jnp.ones({size}, dtype={dtype|{input}.dtype})"),
    "new_full": _op("input size fill_value dtype", "jnp.full({size}, {fill_value}, dtype={dtype|{input}.dtype})"),
    "new_empty": _op("input *size dtype", "jnp.zeros({size}, dtype={dtype|{input}.dtype})"),
    "new_tensor": _op("input data dtype", "jnp.asarray({data}, dtype={dtype|{input}.dtype})"),
    "arange": _op("start end step dtype", "@arange"),
    "linspace": _op("start end steps dtype", "jnp.linspace({start}, {end}, {steps}{, dtype=dtype})"),
    "eye": _op("n m dtype", "@eye"),
    "tensor": _op("data dtype", "@tensor"),
    "as_tensor": _op("data dtype", "@tensor"),
    "scalar_tensor": _op("data dtype", "@tensor"),
    "from_numpy": _op("data", "jnp.asarray({data})"),
    "finfo": _op("type", "jnp.finfo({type})"),
    "iinfo": _op("type", "jnp.iinfo({type})"),
    "numel": _op("input", "{input}.size"),
    "nelement": _op("input", "{input}.size"),
    "dim": _op("input", "{input}.ndim"),
    "ndimension": _op("input", "{input}.ndim"),
    "size": _op("input dim", "@size"),
    "to": _op("input", "@to"),
    "type": _op("input dtype", "{input}.astype({dtype})"),
    "type_as": _op("input other", "{input}.astype({other}.dtype)"),
    "float": _op("input", "{widen}({input})"),
    "double": _op("input", "{widen}({input})"),
    "half": _op("input", "{input}.astype(jnp.float16)"),
    "bfloat16": _op("input", "{input}.astype(jnp.bfloat16)"),
    "long": _op("input", "{input}.astype(jnp.int32)"),
    "int": _op("input", "{input}.astype(jnp.int32)"),
    "bool": _op("input", "{input}.astype(bool)"),
    "item": _op("input", "@item"),
    "tolist": _op("input", "@item"),
    "copy": _op("input other", "jnp.broadcast_to({other}, {input}.shape).astype({input}.dtype)"),
    "zero": _op("input", "jnp.zeros_like({input})"),
    "fill": _op("input value", "jnp.full_like({input}, {value})"),
    "unfold": _op("input dimension size step", "{unfold}({input}, {dimension}, {size}, {step})"),
    "searchsorted": _op("sorted_sequence input", "jnp.searchsorted({sorted_sequence}, {input})"),
    "view_as_complex": _op("input", "{view_as_complex}({input})"),
    "view_as_real": _op("input", "{view_as_real}({input})"),
    "polar": _op("abs angle", "jax.lax.complex({abs} * jnp.cos({angle}), {abs} * jnp.sin({angle}))"),
    "complex": _op("real imag", "jax.lax.complex({real}, {imag})"),
    "solve_triangular": _op("A B upper left unitriangular", "@solve_triangular"),
    "count_nonzero": _op("input dim", "jnp.count_nonzero({input}{, axis=dim})"),
    "isin": _op("elements test_elements", "jnp.isin({elements}, {test_elements})"),
    "diff": _op("input n dim", "jnp.diff({input}, {n|1}, axis={dim|-1})"),
    **{name: _op("loc scale", "{Normal}({loc}, {scale})") for name in ("distributions.normal.Normal", "distributions.Normal")},
    "erfinv": _op("input", "jax.lax.erf_inv({input})"),
}

HELPERS = (
    {
        name: "labkit.layers.functional"
        for name in (
            *("softmax", "softplus", "split", "pad", "expand", "unflatten", "unbind", "gather", "scatter", "scatter_add", "index_add", "index_copy"),
            *("every", "normalize", "unfold", "Normal", "view_as_complex", "view_as_real", "flatten", "solve_triangular"),
        )
    }
    | {name: "labkit.layers.modules" for name in ("conv1d", "layer_norm", "rms_norm")}
    | {"widen": "labkit.layers.precision", "wide_dtype": "labkit.layers.precision", "constant": "labkit.layers.precision"}
    | {"scaled": "labkit.layers.precision", "divided": "labkit.layers.precision"}
)

SAME = {"contiguous", "clone", "detach", "cpu", "cuda", "requires_grad_", "pin_memory", "alias", "resolve_conj", "requires_grad", "numpy"}
"""Methods that give their receiver."""

TENSOR_METHODS = {
    *("float", "long", "bool", "to"),
    *(
        "size",
        "to",
        "float",
        "long",
        "dim",
        "view",
        "unsqueeze",
        "permute",
        "masked_fill",
        "contiguous",
        "expand",
        "repeat_interleave",
        "masked_fill_",
        "type_as",
        "swapaxes",
        "numel",
        "chunk",
    ),
    *("softmax", "sigmoid", "tanh", "sqrt", "rsqrt", "cumsum", "topk", "gather", "scatter", "clamp", "squeeze", "flatten", "transpose", "reshape", "matmul"),
}
"""Method names that only arrays have among what modeling files hold: enough where no run saw the receiver."""
