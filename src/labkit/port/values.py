"""What folding knows of a value, and what it takes as given: arguments at the entry, dead attributes and calls."""

import ast
import dataclasses

from labkit.port.program import Symbol


class _Unknown:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


VARIES = _Unknown("VARIES")
GIVEN = _Unknown("GIVEN")
"""Any value but None."""


@dataclasses.dataclass(frozen=True)
class Const:
    value: object

    def __eq__(self, other):
        return isinstance(other, Const) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self):
        return hash((type(self.value), repr(self.value)))


@dataclasses.dataclass(frozen=True)
class Ref:
    """A function or class of the program."""

    symbol: Symbol


@dataclasses.dataclass(frozen=True)
class Dtype:
    """One of torch's dtypes, as it is written."""

    text: str


def join(a, b):
    if a == b:
        return a
    if all(v is GIVEN or isinstance(v, (Ref, Dtype)) or (isinstance(v, Const) and v.value is not None) for v in (a, b)):
        return GIVEN
    return VARIES


@dataclasses.dataclass
class Folded:
    """One function after simplification. arguments: what every caller gives; extras: keywords that reach it through **kwargs."""

    key: str
    node: ast.FunctionDef
    original: ast.FunctionDef
    file: str
    cls: str | None
    arguments: dict = dataclasses.field(default_factory=dict)
    extras: dict = dataclasses.field(default_factory=dict)
    callees: set = dataclasses.field(default_factory=set)


GIVEN_AT_ENTRY = {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "past_key_value", "cache_params", "layer_past"}
CACHE_NAMES = {"cache", "past_key_values", "past_key_value", "cache_params", "layer_past"}
DEAD_ATTRIBUTES = {
    "is_cuda": False,
    "return_dict": True,
    "use_return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "training": False,
    "gradient_checkpointing": False,
    "_attn_implementation": "eager",
    "is_gradient_checkpointing": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}
DEAD_CALLS = {
    "is_torchdynamo_compiling": False,
    "is_flash_attention_requested": False,
    "is_tracing": False,
    "torch.is_grad_enabled": False,
    "torch.jit.is_tracing": False,
    "is_torchdynamo_exporting": False,
    "is_fx_tracing": False,
    "torch.is_autocast_enabled": False,
    "is_deepspeed_zero3_enabled": False,
    "is_fsdp_managed_module": False,
    "torch.compiler.is_compiling": False,
}
_LOADING = ("self._keys_to_ignore_on_load", "self._tied_weights_keys")
_NO_EFFECT_ROOTS = ("logger", "warnings", "torch._assert", "torch._check", "warn_if", "torch._dynamo", "use_kernel", "gc")
