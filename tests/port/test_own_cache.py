"""A modeling file's own cache of recurrent states is the layer's handle; functions held as partial ones know what they were given."""

import pytest

from labkit.layers.functional import Partial
from labkit.layers.precision import dtype_named
from labkit.port.own_cache import layer_states
from labkit.port.values import Const
from tests.port import toy

CACHE = """
class ToyCache:
    def __init__(self, config):
        self.states = {{layer: ({values}) for layer in range(config.num_hidden_layers)}}

class ToyForCausalLM:
    def forward(self, input_ids, cache=None):
        for i, block in enumerate(self.blocks):
            x, state = block(input_ids, cache.states[i] if cache is not None else None)
            if cache:
                for k in range(len(cache.states[i])):
                    new = state[k]
                    cache.states[i][k].copy_(new)
                cache.fresh = False
        return x
"""

PARTIAL = """
from functools import partial
from .configuration_toy import rounded, ToyConfig

def kernel(x, size: int = 64, eps: float = 1.0, other=None):
    return x * size * eps

class ToyForCausalLM:
    def __init__(self, config):
        self.function = kernel
        self.run = {how}(self.function, size=config.size, eps=2.0)
        self.n = rounded(3)

    def forward(self, input_ids, cache=None):
        return self.run(input_ids)
"""


def _forward(tmp_path, values):
    functions, folder = toy.fold(tmp_path, CACHE.format(values=values))
    layer_states(folder.program, folder.functions)
    return toy.text_of(functions["ToyForCausalLM.forward"])


def test_states_by_layer_become_recurrent_states(tmp_path):
    text = _forward(tmp_path, "torch.zeros([2, 3]), torch.zeros([2])")
    assert "block(input_ids, cache.get_recurrent_states(2))" in text
    assert "for k in range(2):" in text and "cache.update_recurrent_state(new, state_idx=k)" in text
    assert "cache.states" not in text and "fresh" not in text and "if" not in text


def test_what_does_not_begin_with_zeros_stays(tmp_path):
    assert "cache.states[i]" in _forward(tmp_path, "torch.ones([2, 3]), torch.zeros([2])")


def test_a_partial_function_is_given_its_keywords_and_no_defaults_in_their_place(tmp_path):
    functions, _ = toy.fold(tmp_path, PARTIAL.format(how="partial"))
    given = functions["kernel"].arguments
    assert not isinstance(given["size"], Const) and given["eps"] == Const(2.0) and "other" not in given
    assert "not_partial" in toy.text_of(toy.fold(tmp_path, PARTIAL.format(how="not_partial"))[0]["ToyForCausalLM.__init__"])


def test_functions_of_a_configuration_file_belong_to_the_program_and_its_classes_do_not(tmp_path):
    made = toy.program(tmp_path, PARTIAL.format(how="partial"))
    (tmp_path / "models/toy/configuration_toy.py").write_text("def rounded(x):\n    return x\n\nclass ToyConfig:\n    pass\n")
    assert made.resolve(toy.FILE, "rounded").kind == "function"
    assert made.resolve(toy.FILE, "ToyConfig").kind == "external"


def test_partial_functions_compare_by_what_they_hold():
    assert Partial(max, default=1) == Partial(max, default=1) and hash(Partial(max, default=1)) == hash(Partial(max, default=1))
    assert Partial(max, default=1) != Partial(max, default=2) and Partial(max, default=1) != Partial(min, default=1)
    assert Partial(dict, a=1)(b=2) == {"a": 1, "b": 2}


def test_named_dtypes():
    import jax.numpy as jnp
    import numpy as np

    assert (
        dtype_named("float32", jnp.bfloat16) == np.float32
        and dtype_named("float32", np.float64) == np.float64
        and dtype_named("bfloat16", np.float64) == jnp.bfloat16
    )
    with pytest.raises(ValueError, match="no dtype"):
        dtype_named("int8", np.float64)
