"""Where the decoder's layers are, and their loop as a step that the stack runner runs."""

import pytest

from labkit.port.context import Context
from labkit.port.facts import Facts
from labkit.port.fold import Folder
from labkit.port.refusal import CannotTranslate
from labkit.port.spine import find_spine, runs_apart
from labkit.port.trim import Trimmer
from tests.port import toy

SOURCE = """
import torch
from torch import nn
class ToyLayer(nn.Module):
    def forward(self, hidden_states, past_key_values=None):
        return hidden_states
class ToyTower(nn.Module):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
class ToyModel(nn.Module):
    def forward(self, hidden_states, past_key_values=None, position_ids=None):
{body}
class ToyForCausalLM(nn.Module):
    def forward(self, input_ids, past_key_values=None, position_ids=None):
        return self.head(self.model(self.tower(input_ids), past_key_values, position_ids))
"""
LOOP = "for layer in self.layers:\n    hidden_states = layer(hidden_states, past_key_values=past_key_values)\nreturn hidden_states"


def _modules(layers: int, blocks: int = 2) -> dict:
    names = {"": "ToyForCausalLM", "model": "ToyModel", "tower": "ToyTower", "head": None}
    names |= {f"model.layers.{i}": "ToyLayer" for i in range(layers)} | {f"tower.blocks.{i}": "ToyLayer" for i in range(blocks)}
    return {path: f"{toy.FILE}::{name}" if name else "external::torch.nn.Linear" for path, name in names.items()}


def context(tmp_path, body=LOOP, layers=3, kinds=None, config=None) -> Context:
    text = SOURCE.format(body="\n".join(f"        {line}" for line in body.splitlines()))
    record = toy.known(tmp_path, text, kinds, modules=[_modules(layers)], config=[config or {"num_hidden_layers": 3}])
    program, facts = toy.program(tmp_path, text), Facts(record)
    folder = Folder(program, facts)
    for name in ("ToyForCausalLM.forward", "ToyModel.forward", "ToyTower.forward"):
        folder.add(f"{toy.FILE}::{name}", {})
    spine = find_spine(program, facts, folder.functions)
    trimmer = Trimmer(folder.functions, facts, {f"{toy.FILE}::ToyForCausalLM.forward", f"{toy.FILE}::ToyModel.forward", f"{toy.FILE}::ToyTower.forward"})
    trimmer.run()
    return toy.ready(Context(program, facts, folder.functions, spine, trimmer))


def test_the_spine_leads_from_the_causal_lm_to_the_list_of_as_many_layers_as_the_config_says(tmp_path):
    spine = context(tmp_path).spine
    assert [level.path for level in spine.levels] == ["", "model"] and spine.layers == "layers"
    assert spine.last.symbol.name == "ToyModel" and spine.prefix() == "model.layers"
    tower = context(tmp_path, config={"num_hidden_layers": 2}).spine
    assert tower.prefix() == "tower.blocks"


def test_a_list_of_another_length_is_no_stack(tmp_path):
    spine = context(tmp_path, config={"num_hidden_layers": 7}).spine
    assert spine.layers is None and spine.last.path == "model"


def test_a_list_that_runs_in_parts_is_no_stack(tmp_path):
    body = LOOP.replace("self.layers", "self.layers[1:]")
    found = context(tmp_path, body, kinds={"self.layers": ["modulelist"]})
    assert runs_apart(found.program, found.facts) and found.spine.layers is None
    whole = context(tmp_path, LOOP.replace("self.layers", "self.layers[:3]"), kinds={"self.layers": ["modulelist"]})
    assert not runs_apart(whole.program, whole.facts) and whole.spine.layers == "layers"


class Runner:
    """The stack runner as a loop; a handle for each layer is the runner with the layer's index."""

    def __init__(self, index=None):
        self.index = self.layer_idx = index

    def run(self, layers, step, *carry):
        for index, layer in enumerate(layers):
            carry = step(layer, Runner(index), *carry)
            carry = carry if isinstance(carry, tuple) else (carry,)
        return carry if len(carry) > 1 else carry[0]


class Layers:
    def __init__(self):
        self.layers = [lambda x, past_key_values, n=n: x * (n + 2) + (past_key_values.index or 0) for n in range(3)]
        self.scales = [3, 5, 7]


BODIES = {
    "one value": (LOOP, (((1 * 2) * 3 + 1) * 4 + 2)),
    "two values": (
        "total = hidden_states\nfor layer in self.layers[: self.config.n]:\n    hidden_states = layer(hidden_states, past_key_values=past_key_values)\n"
        "    total = total + hidden_states\nreturn total - hidden_states",
        1 + 2 + 7,
    ),
    "a value of the round alone": (
        "for layer in self.layers:\n    twice = hidden_states + hidden_states\n"
        "    hidden_states = layer(twice, past_key_values=past_key_values)\nreturn hidden_states",
        ((1 * 2 * 2) * 2 * 3 + 1) * 2 * 4 + 2,
    ),
    "the index picks from an array": (
        "for i, layer in enumerate(self.layers):\n    hidden_states = layer(hidden_states, past_key_values=past_key_values)\n"
        "    hidden_states = hidden_states * self.scales[i]\nreturn hidden_states",
        ((1 * 2 * 3) * 3 + 1) * 5 * 4 * 7 + 2 * 7,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_loop_is_a_step_that_the_runner_runs(tmp_path, name):
    body, result = BODIES[name]
    found = context(tmp_path, body, kinds={"self.scales": ["buffer:f:1"], "self.scales[i]": ["array:f:0"]})
    text = toy.translated(found, "ToyModel.forward")
    assert "past_key_values.run(self.layers, layer_step, " in text and "for " not in text.split("def forward")[1]
    text = text.replace("read(self.scales)", "self.scales").replace("from labkit.layers.building import read\n", "")
    scope = {}
    exec(text, scope)
    assert scope["forward"](Layers(), 1, Runner()) == result
    wrong = text.replace("layer_step, hidden_states", "layer_step, 2 * hidden_states")
    exec(wrong, scope)
    assert wrong != text and scope["forward"](Layers(), 1, Runner()) != result


@pytest.mark.parametrize(
    "body, construct",
    [
        (LOOP.replace("return", "    if hidden_states is None:\n        break\nreturn"), "stops early"),
        (LOOP.replace("return hidden_states", "    last = hidden_states * 2\nreturn last"), "first defines last"),
    ],
)
def test_loops_that_cannot_be_steps_are_refused(tmp_path, body, construct):
    with pytest.raises(CannotTranslate, match=construct) as refused:
        toy.translated(context(tmp_path, body), "ToyModel.forward")
    assert refused.value.where.startswith(f"{toy.FILE}:")


def test_other_loops_stay_loops(tmp_path):
    text = toy.translated(context(tmp_path), "ToyTower.forward")
    assert "for block in self.blocks:" in text and ".run(" not in text
