"""Logical axes of a parameter: from transformers' own tensor-parallel plan where it has one, from names and sizes elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_ATTENTION = re.compile(r"(^|[._])(self_)?(attn|attention|mixer|mamba|temporal_block)([._]|$)|(^|\.)([qkv]|qkv|query|key|value|query_key_value)(_proj)?(\.|$)")
_KEY_VALUE = re.compile(r"(^|_)(k|v|key|value)(_proj|_linear|_layer)?$")
_BACK = re.compile(r"(^|_)(o|out|down|dense|w2|wo|fc2|fc_out|c_proj|dense_4h_to_h|output)(_proj|_linear|_layer)?$")


def axes_for(
    path: str, shape: Sequence[int], hidden_size: int, vocab_size: int, plan: Mapping[str, str] | None = None, *, linear: bool | None = None
) -> tuple[str | None, ...]:
    """One logical axis per dimension: "embed", "heads", "kv_heads" (keys and values), "mlp", "vocab", "experts", "norm" or None.

    path: of the module or the parameter, numbers and a leading `model.` or not, a last `weight`, `kernel` or `bias` or not. shape: as the slice keeps it.
    linear: the shape is [in, out], as `build.linear` has it (the default for two dimensions); otherwise it is [.., out, in], as transformers has it. plan:
    `hf.parallel_plan.tensor_parallel_plan(model_type)`. Every result with two or more dimensions names at least one axis that can be sharded.
    """
    module = re.sub(r"\.(weight|kernel|bias|embedding)$", "", path)
    rank = len(shape)
    if rank == 0:
        return ()
    inner = "mlp" if not _ATTENTION.search(module) else "kv_heads" if _KEY_VALUE.search(module.split(".")[-1]) else "heads"
    style = _style(module, plan or {})
    if "experts" in module.split(".") and rank >= 2 and not re.search(r"experts\.(\d+|\*|\{\w+\})(\.|$)", module):
        return expert_axes(path, shape, hidden_size, plan)
    if vocab_size in shape and rank == 2:
        other = "embed" if style is None or not style.startswith("replicate") else None
        return ("vocab", other) if shape[0] == vocab_size else (other, "vocab")
    if rank == 1:
        wide = shape[0] != hidden_size and style is not None and style.endswith(("colwise", "colwise_gather_output"))
        return (inner if wide else "norm",)
    if rank == 2:
        return _matrix(shape, hidden_size, inner, style, module, linear is not False)
    largest = max(range(rank), key=lambda dim: shape[dim])
    return tuple("embed" if size == hidden_size and dim != largest else inner if dim == largest else None for dim, size in enumerate(shape))


def expert_axes(path: str, shape: Sequence[int], hidden_size: int, plan: Mapping[str, str] | None = None) -> tuple[str | None, ...]:
    """The axes of a parameter [experts, ...] that holds one matrix, or one bias, per expert."""
    module = re.sub(r"\.(weight|kernel|bias|embedding)$", "", path)
    return ("experts", *_matrix(shape[1:], hidden_size, "mlp", _style(module, plan or {}), module, linear=False))


def _matrix(shape: Sequence[int], hidden_size: int, inner: str, style: str | None, module: str, linear: bool) -> tuple[str | None, ...]:
    """The axes of [in, out] (or [out, in]): the hidden side is "embed". Where both or neither side has its size, the plan and then the name decide."""
    if len(shape) == 1:
        return ("embed" if shape[0] == hidden_size else inner,)
    if len(shape) > 2:
        return tuple("embed" if size == hidden_size else inner if size == max(shape) else None for size in shape)
    hidden = [size == hidden_size for size in shape]
    if hidden[0] != hidden[1]:
        return ("embed", inner) if hidden[0] else (inner, "embed")
    back = "rowwise" in style if style is not None and "wise" in style else bool(_BACK.search(module.split(".")[-1]))
    return (inner, "embed") if back == linear else ("embed", inner)


def _style(module: str, plan: Mapping[str, str]) -> str | None:
    """The plan's entry for a module: paths are compared without their numbers and without what comes before the plan's first part."""
    wanted = _plain(module)
    found = [pattern for pattern in plan if f".{wanted}".endswith(f".{_plain(pattern)}")]
    return plan[max(found, key=len)] if found else None


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if not re.fullmatch(r"\d+|\*|\{\w+\}", part))
