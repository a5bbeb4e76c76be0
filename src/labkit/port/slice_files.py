"""The files of a slice beside its model: rules, FLOPs and loss, the package's face."""

import ast
import re

from labkit.models.mapping import Deinterleave, SplitAxis, Transpose
from labkit.port.local_experts import local_experts_of
from labkit.port.rules import Parameter, memory_names, write_rules
from labkit.port.utils_text import write_utils

_KERNELS = {"Linear": "kernel", "Embedding": "embedding", "Conv1D": "kernel"}
_NUMBERS = ("i", "j", "k")


def identifier(model_type: str) -> str:
    return model_type.replace("-", "_")


def parameters_of(context) -> tuple[list[Parameter], list[tuple[str, str]], list[tuple[str, str]]]:
    """(parameters, tied pairs, ignored) of every recorded model, equal ones once."""
    spine, record = context.spine, context.facts.record
    stack = spine.prefix() if spine.layers is not None else None
    found, tied, ignored, biases = {}, {}, {}, {}
    heads = head_ties(context)
    for modules, state, config in zip(record.modules, record.state, record.config):
        for name, (_, shape) in state.items():
            owner, _, leaf = name.rpartition(".")
            memory, path = name, name
            if stack is not None and name.startswith(stack + "."):
                number, _, rest = name[len(stack) + 1 :].partition(".")
                memory, path = f"{stack}.{{layer}}.{rest}", f"layers.{rest}"
            else:
                for level in reversed(spine.levels):
                    if level.path and name.startswith(level.path + "."):
                        path = name[len(level.path) + 1 :]
                        break
            if name in heads and config.get("tie_word_embeddings", False):
                tied[(name, heads[name])] = None
                continue
            kind = context.builtin_module([modules.get(owner, "").rpartition("::")[2].rpartition(".")[2]])
            if leaf == "weight" and kind in _KERNELS:
                path = f"{path.removesuffix('weight')}{_KERNELS[kind]}"
            memory, path = _numbered(memory, path)
            steps = (Transpose(1, 0),) if kind == "Linear" and leaf == "weight" else ()
            experts = local_experts_of(context, modules.get(owner, ""))
            if experts is not None and leaf in experts.halves:
                axis = experts.halves[leaf]
                steps = (*((Deinterleave(axis),) if experts.interleaved else ()), SplitAxis(axis, 2))
            key = (path, memory, steps)
            found.setdefault(key, Parameter(path, memory, tuple(shape), steps))
            if kind == "Linear" and leaf == "weight" and _chooses_bias(context, modules, owner):
                biases[path.removesuffix(_KERNELS[kind]) + "bias", memory.removesuffix("weight") + "bias", ()] = tuple(shape[:1])
    for key, shape in biases.items():
        found.setdefault(key, Parameter(*key[:2], shape))
    return list(found.values()), list(tied), list(ignored)


def _chooses_bias(context, modules: dict, owner: str) -> bool:
    """The constructor lets the config choose the bias of this linear layer, which the recorded configurations may not have shown beside everything else."""
    parent, _, attribute = owner.rpartition(".")
    path, _, cls = modules.get(parent, "").rpartition("::")
    found = context.program.method(path, cls, "__init__") if path.endswith(".py") else None  # a container of torch has no file here
    return found is not None and any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == f"self.{attribute}"
        and any(k.arg == "bias" and not isinstance(k.value, ast.Constant) for c in ast.walk(node.value) if isinstance(c, ast.Call) for k in c.keywords)
        for node in ast.walk(found[1])
    )


def _numbered(memory: str, path: str) -> tuple[str, str]:
    """Numbers of module lists as `{i}`, `{j}`, `{k}` on both sides."""
    names = iter(_NUMBERS)
    parts, own = memory.split("."), path.split(".")
    for offset, part in enumerate(reversed(parts), start=1):
        if part.isdigit() and offset <= len(own) and own[-offset] == part:
            field = f"{{{next(names)}}}"
            parts[-offset] = own[-offset] = field
    return ".".join(parts), ".".join(own)


def head_ties(context) -> dict[str, str]:
    """In-memory names that are tied where the config says so: `lm_head.weight` -> `model.embed_tokens.weight`."""
    entry = context.program.entry
    value = context.program.class_value(entry.file, entry.name, "_tied_weights_keys")
    try:
        table = ast.literal_eval(value) if value is not None else {}
    except (ValueError, TypeError):
        return {}
    table = table if isinstance(table, dict) else {}
    names = {name for state in context.facts.record.state for name in state}
    return {k: v for k, v in table.items() if k in names or not re.search(r"[\^$*\\]", k)}


def rules_text(context, model_type: str, tree) -> str:
    """`checkpoint_mappings_<family>.py`."""
    from labkit.hf.renames import disk_names, meta_model

    parameters, tied, ignored = parameters_of(context)
    model = meta_model(context.facts.record.config[0])
    return write_rules(identifier(model_type), parameters, disk_names(model, memory_names(parameters, tied, ignored)), tied=tied, ignored=ignored)


def utils_text(context, model_type: str) -> str:
    """`utils_<family>.py`."""
    fields = context.config_attributes
    top_k = next((k for k in ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts") if k in fields), None)
    coefficient = next(
        (k for k in ("router_aux_loss_coef", "aux_loss_coef", "router_aux_loss_coefficient") if any(k in c for c in context.facts.record.config)), None
    )
    if coefficient is not None and "router_logits" in context.reports and top_k is not None:
        return write_utils(model_type, experts_per_token=top_k, router_coefficient=coefficient)
    return write_utils(model_type, experts_per_token=top_k)


def package_text(context, model_type: str, tree) -> str:
    """`__init__.py`, with FAMILY."""
    name = identifier(model_type)
    config = context.config_class or "Config"
    sharding, model = config.removesuffix("Config") + "Sharding", context.program.entry.name
    return f'''"""{model_type} slice, translated."""

from pathlib import Path

from labkit.models.registry import Family

from .checkpoint_mappings_{name} import {name}_rules
from .modeling_{name} import {config}, {sharding}, {model}, create_{name}_model
from .utils_{name} import calculate_{name}_tflops_per_device, configure_{name}_engine

FAMILY = Family(
    name="{model_type}",
    config={config},
    sharding={sharding},
    model={model},
    create=create_{name}_model,
    rules={name}_rules,
    tflops=calculate_{name}_tflops_per_device,
    configure_engine=configure_{name}_engine,
    path=Path(__file__).parent,
    source="translated",
)
'''
