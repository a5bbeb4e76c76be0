"""Rules from a parameter list: the in-memory state of any type comes out of what `save_pretrained` wrote, bit for bit, and goes back to it."""

import numpy as np
import pytest

from labkit.converters.audit import audit_table
from labkit.hf import open_source
from labkit.hf.quiet import quiet_transformers
from labkit.hf.renames import disk_names
from labkit.port.rules import live_rules, memory_names, write_rules
from tests.port.identity import identity

QUICK = ("mixtral", "qwen3_moe", "gpt2", "deepseek_v3", "granitemoe", "gpt_oss")


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


def loaded(source):
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(source.path, dtype="auto", attn_implementation="eager")


def table_of(model, state, tied, config):
    parameters, plan, shapes, rows = identity(state, tied)
    pairs = list(tied.items())
    model._weight_conversions = None
    text = write_rules("some", parameters, disk_names(model, memory_names(parameters, pairs)), tied=pairs)
    return text, live_rules("some", text)(config), plan, shapes, rows


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def differences(model_type):
    """What is not as it was, in words."""
    source = open_source(f"tiny:{model_type}")
    model = loaded(source)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    _, table, plan, shapes, rows = table_of(model, state, tied, Config(**{**vars(model.config), "tie_word_embeddings": bool(tied)}))
    audit = audit_table(table, plan, shapes, {name: info.shape for name, info in source.tensors.items()})
    if not audit.passed:
        return audit.problems
    found, seen = [], set()
    for assignment in audit.expansion.assignments:
        arrays = assignment.forward(source.tensors.read)
        for target, array in zip(assignment.targets, arrays):
            name = rows[target.path][target.index or 0]
            seen.add(name)
            found += [] if equal(array, state[name]) else [f"{name} differs in memory"]
        back = assignment.backward([state[rows[t.path][t.index or 0]] for t in assignment.targets], lambda name: source.tensors[name].shape)
        found += [f"{name} differs on disk" for name, array in back.items() if not equal(array, source.tensors.read(name))]
    return found + [f"{name} is not made" for name in state if name not in seen and name not in tied]


@pytest.mark.parametrize("model_type", QUICK)
def test_in_memory_state_and_back(model_type):
    assert not differences(model_type)
