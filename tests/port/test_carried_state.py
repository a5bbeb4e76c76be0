"""States that a caller carries go through the cache; a layer's index comes from its handle; what changes weights once is done to each layer where it runs."""

import ast

import jax.numpy as jnp

from labkit.port.carried_state import carry_states
from labkit.port.first_call import changes_to_layers
from labkit.port.layer_index import index_from_handle
from labkit.port.program import Symbol
from labkit.port.spine import Level, Spine
from labkit.port.values import Const
from tests.port import toy

TEXT = """
class Block(nn.Module):
    def __init__(self, config, number):
        self.number = number
        self.size = config.size

    def forward(self, x, state=None):
        if self.number == 0:
            x = x + 1
        if x.size(1) == 1 and state is not None:
            y = state[0][:, :, self.number]
        else:
            y = x * self.size
            if state is not None:
                y[:, 0] = state[0][:, :, self.number]
        state[0][:, :, self.number] = x[:, -1]
        return y, state

class Model(nn.Module):
    def __init__(self, config):
        self.blocks = nn.ModuleList([Block(config, number=i) for i in range(config.n)])
        self.rescaled = False

    def forward(self, input_ids, state=None, use_cache=None):
        x = input_ids
        if self.training == self.rescaled:
            self.rescale()
        if use_cache and state is None:
            state = [torch.zeros(2, 3, 4) for i in range(2)]
            state[1] -= 1e30
        for idx, block in enumerate(self.blocks):
            x, state = block.forward(x, state=state)
            if self.rescaled and self.config.every > 0 and (idx + 1) % self.config.every == 0:
                x = x / 2
        return x, state

    def rescale(self):
        if self.rescaled == (not self.training):
            return
        if self.config.every > 0:
            for number, block in enumerate(self.blocks):
                {change}
        self.rescaled = not self.training

class ToyForCausalLM:
    def __init__(self, config):
        self.model = Model(config)

    def forward(self, input_ids, state=None, use_cache=None):
        x, state = self.model.forward(input_ids, state=state, use_cache=use_cache)
        return ToyOutput(logits=x, {given})
"""
SPINE = Spine((Level("", Symbol("class", toy.FILE, "ToyForCausalLM")), Level("model", Symbol("class", toy.FILE, "Model"))), "blocks")


def _texts(tmp_path, given="state=state", change="block.out.weight.div_(2 ** int(number // self.config.every))"):
    text = TEXT.format(given=given, change=change)
    _, folder = toy.fold(tmp_path, text)
    entry = f"{toy.FILE}::ToyForCausalLM.forward"
    for name in ("Model.forward", "Model.__init__", "Block.__init__", "Block.forward", "Model.rescale"):
        folder.add(f"{toy.FILE}::{name}", {"use_cache": Const(True), "state": Const(None)} if name == "Model.forward" else {})
    functions = {key.partition("::")[2]: f for key, f in folder.functions.items()}
    calls = {"self.model.forward": "Model.forward", "block.forward": "Block.forward", "self.rescale": "Model.rescale"}
    for folded in functions.values():
        for node in ast.walk(folded.node):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                node.callees = [f"{toy.FILE}::{calls[ast.unparse(node.func)]}"]
    carry_states(folder.functions, entry)
    labels = index_from_handle(folder.program, folder.functions, SPINE) + changes_to_layers(folder.functions, SPINE)
    return {name: toy.text_of(f) for name, f in functions.items()}, labels


def test_the_state_goes_through_the_cache(tmp_path):
    texts, _ = _texts(tmp_path)
    model = texts["Model.forward"]
    assert model.index("state[1] -= 1e+30") < model.index("state = cache.kept_state('state', state)") < model.index("for idx")
    assert model.index("cache.keep_state('state', state)") < model.index("return")
    assert "x.size(1) == 1" not in texts["Block.forward"] and "cache=cache" in texts["ToyForCausalLM.forward"]


def test_what_the_entry_does_not_give_back_is_not_kept(tmp_path):
    texts, _ = _texts(tmp_path, given="other=state")
    assert "kept_state" not in texts["Model.forward"] and "x.size(1) == 1" in texts["Block.forward"]


def test_the_index_comes_from_the_handle(tmp_path):
    texts, labels = _texts(tmp_path)
    block = texts["Block.forward"]
    assert "if cache.layer_idx == 0:" in block and "state[0][:, :, cache.index] = x[:, -1]" in block and "self.number" not in block
    assert "layer_idx == 0" in labels and "self.size" in block


def test_weights_are_changed_where_their_layer_runs(tmp_path):
    texts, labels = _texts(tmp_path)
    model = texts["Model.forward"]
    assert "if self.config.every > 0:\n            block.out.weight.div_(2 ** int(idx // self.config.every))" in model
    assert "self.rescale()" not in model and "if self.config.every > 0 and (idx + 1) % self.config.every == 0:" in model
    assert "(2 ** int(layer_idx // self.every) if self.every > 0 else None)" in labels


def test_a_method_that_does_anything_else_is_not_moved(tmp_path):
    texts, _ = _texts(tmp_path, change="block.out.other = 3")
    assert "self.rescale()" in texts["Model.forward"]


def test_kept_states_begin_as_they_are_made_and_come_back():
    from labkit.layers.cache import DecoderCache
    from labkit.layers.decoding import DecoderCall

    tokens = jnp.ones((2, 3), jnp.int32)
    initial = [jnp.full((2, 4), -5.0), jnp.zeros((2, 1))]
    assert DecoderCall.begin(None, tokens).kept_state("state", initial) is initial
    stored = [{"state": {"0": jnp.full((1, 2, 4), 7.0), "1": jnp.full((1, 2, 1), 8.0)}}]
    cache = DecoderCache.empty(stored, 2, 8)
    call = DecoderCall.begin(None, tokens, cache=cache)
    assert float(call.kept_state("state", initial)[0][0, 0]) == -5.0
    call.keep_state("state", [jnp.full((2, 4), 1.0), jnp.full((2, 1), 2.0)])
    _, after = call.outputs(jnp.zeros((2, 3, 5)))
    again = DecoderCall.begin(None, tokens, cache=after)
    assert [float(leaf[0, 0]) for leaf in again.kept_state("state", initial)] == [1.0, 2.0]
