"""States that modules keep in their own attributes become the layer's states in the cache; what is used in another way stays and is refused."""

import ast

import pytest

from labkit.port.own_state import states_to_cache
from tests.port import toy

TEXT = """
class Unit(nn.Module):
    def __init__(self, config):
        self.state = None

    def forward(self, x):
        y, last = self.scan(x, start={read})
        self.state = last
        return y

    def scan(self, x, start):
        return x, x

class Block(nn.Module):
    def __init__(self, config):
        self.width = config.width
        self.conv = nn.Conv1d(4, 4, kernel_size=config.width, groups=4, padding={padding})
        self.unit = Unit(config)
        self.kept = None
        self.fixed = None

    def forward(self, x, positions):
        n = x.shape[-1]
        if self.kept is None or self.kept.shape[0] != x.shape[0]:
            self.kept = torch.zeros((x.shape[0], 4, self.width - 1))
            self.unit.state = torch.zeros((x.shape[0], 4))
        if positions.shape[1] != 1:
            self.kept = nn.functional.pad(x, (self.width - x.shape[-1] - 1, 0))
            x = self.conv(x)[..., :n]
        else:
            whole = torch.cat((self.kept, x), -1)
            x = torch.sum(whole * self.conv.weight[:, 0, :], dim=-1).unsqueeze(-1)
            self.kept = whole[:, :, 1:]
        return self.unit.forward(x)

class ToyForCausalLM:
    def __init__(self, config):
        self.block = Block(config)

    def forward(self, input_ids, position_ids=None, cache=None):
        return self.block.forward(input_ids, position_ids)
"""


def _functions(tmp_path, **parts):
    _, folder = toy.fold(tmp_path, TEXT.format(**({"read": "self.state", "padding": "config.width - 1"} | parts)))
    for name in ("Unit.__init__", "Unit.forward", "Block.__init__", "Block.forward", "ToyForCausalLM.forward"):
        folder.add(f"{toy.FILE}::{name}", {})
    functions = {key.partition("::")[2]: f for key, f in folder.functions.items()}
    for caller, callee in (("ToyForCausalLM.forward", "Block.forward"), ("Block.forward", "Unit.forward")):
        for node in ast.walk(functions[caller].node):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".forward"):
                node.callees = [f"{toy.FILE}::{callee}"]
    states_to_cache(folder.program, folder.functions)
    return {name: toy.text_of(f) for name, f in functions.items()}


def test_a_recurrent_state_and_the_columns_of_a_convolution(tmp_path):
    texts = _functions(tmp_path)
    assert (
        "start=cache.get_recurrent_state(state_idx=0)" in texts["Unit.forward"] and "cache.update_recurrent_state(last, state_idx=0)" in texts["Unit.forward"]
    )
    block = texts["Block.forward"]
    assert "x = cache.update_conv_state(x, conv_kernel_size=self.width - 1)" in block and "self.conv(x)[..., :x.shape[-1]][..., -n:]" in block
    assert "self.kept" not in block and "self.unit.state" not in block and "if" not in block
    assert "self.unit.forward(x, cache=cache)" in block and "self.block.forward(input_ids, position_ids, cache=cache)" in texts["ToyForCausalLM.forward"]


@pytest.mark.parametrize("padding", ["config.width", "0"])
def test_a_convolution_that_is_not_causal_stays(tmp_path, padding):
    assert "self.kept = nn.functional.pad" in _functions(tmp_path, padding=padding)["Block.forward"]


def test_a_state_that_is_computed_with_stays(tmp_path):
    texts = _functions(tmp_path, read="self.state + 1")
    assert "self.state = last" in texts["Unit.forward"] and "cache" not in texts["Unit.forward"]
