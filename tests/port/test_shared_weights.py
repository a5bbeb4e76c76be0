"""A constructor that fills the table of tied weights shares modules; one that only declares a tied head does not. Scans over heads start from their part of a
state."""

import ast

from labkit.port.initial_state import start_from_state
from labkit.port.shared_weights import fills_table
from tests.port import toy

CLASSES = """
class Patterns:
    def __init__(self, config):
        self._tied_weights_keys = None
        for i in range(3):
            if self._tied_weights_keys is None:
                self._tied_weights_keys = {rf"layers.(?!{i})": f"layers.{i}"}

class Updates:
    def get_layers(self):
        self._tied_weights_keys = {}
        self._tied_weights_keys.update({"a": "b"})

class Inherits(Updates):
    pass

class Plain:
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}
    def __init__(self, config):
        self._tied_weights_keys = None
        self.other.update({"a": "b"})

class ToyForCausalLM:
    def forward(self, input_ids):
        return input_ids
"""

HEADS = """
def scan(x, n):
    state = torch.zeros(x.shape)
    for t in range(n):
        state = state + x
    return x, {returned}

def step(state, x):
    state.copy_(x)
    return x

class Mixer:
    def forward(self, x, cache):
        state = cache.get_recurrent_state(0)
        if state is not None and x.shape[1] == 1:
            outs = []
            for head in range(self.heads):
                outs.append(step({argument}, x[head]))
        else:
            outs, states = [], []
            for head in range(self.heads):
                out, last = scan(x[head], 3)
                outs.append(out)
                states.append(last)
            last = torch.stack(states, dim=1)
            cache.update_recurrent_state(last, 0)
        return torch.cat(outs)

class ToyForCausalLM:
    def __init__(self, config):
        self.mixer = Mixer(config)
    def forward(self, input_ids, cache=None):
        return self.mixer.forward(input_ids, cache)
"""


def test_only_computed_entries_fill_the_table(tmp_path):
    made = toy.program(tmp_path, CLASSES)
    assert [fills_table(made, toy.FILE, name) for name in ("Patterns", "Updates", "Inherits", "Plain", None)] == [True, True, True, False, False]


def _mixed(tmp_path, **parts):
    functions, folder = toy.fold(tmp_path, HEADS.format(**parts))
    for name in ("scan", "step", "Mixer.forward"):
        folder.add(f"{toy.FILE}::{name}", {})
    functions = {key.partition("::")[2]: f for key, f in folder.functions.items()}
    call = next(n for n in ast.walk(functions["Mixer.forward"].node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "scan")
    call.callees = [f"{toy.FILE}::scan"]
    start_from_state(folder.functions)
    return toy.text_of(functions["Mixer.forward"])


def test_heads_start_from_their_part_and_the_step_in_place_goes(tmp_path):
    text = _mixed(tmp_path, returned="state", argument="state[:, head]")
    assert "initial_state=state[:, head] if state is not None else None" in text
    assert "step(" not in text


def test_another_step_stays_and_what_no_loop_made_starts_as_it_did(tmp_path):
    assert "step(state" in _mixed(tmp_path, returned="state", argument="state")
    assert "initial_state" not in _mixed(tmp_path, returned="x", argument="state[:, head]")
