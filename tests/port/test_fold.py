"""Simplification: what no configuration can change goes, across calls; what one chooses stays."""

import ast

import pytest

from labkit.hf.source_record import SourceRecord
from labkit.port.values import GIVEN, VARIES, Const, join
from tests.port import toy

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom transformers.utils import logger, is_torchdynamo_compiling\n"


SIGNATURE = "self, input_ids, attention_mask=None, labels=None, output_attentions=None, **kwargs"


def folded(tmp_path, body: str, more: str = "", record=None, signature=SIGNATURE) -> str:
    """The entry's forward after folding."""
    return toy.text_of(functions(tmp_path, body, more, record, signature)[f"{toy.ENTRY}.forward"])


def functions(tmp_path, body, more="", record=None, signature=SIGNATURE):
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    text = f"{HEAD}{more}\nclass {toy.ENTRY}(nn.Module):\n    def forward({signature}):\n{lines}\n"
    return toy.fold(tmp_path, text, record)[0]


def statements(text: str) -> str:
    return "\n".join(ast.unparse(s) for s in ast.parse(text).body[0].body)


GONE = {
    "dropout": ("x = F.dropout(input_ids, p=0.1, training=self.training)\nreturn x", "x = input_ids\nreturn x"),
    "dropout by name": ("return nn.functional.dropout(p=0.1, input=input_ids)", None),
    "training": ("if self.training:\n    input_ids = input_ids * 2\nreturn input_ids", "return input_ids"),
    "training in a condition": ("if self.training and labels is not None:\n    input_ids = input_ids * 2\nreturn input_ids", "return input_ids"),
    "gradient checkpointing": ("if self.gradient_checkpointing:\n    return None\nelse:\n    return input_ids", "return input_ids"),
    "an argument nobody gives": (
        "loss = None\nif labels is not None:\n    loss = self.loss(labels)\nreturn input_ids if loss is None else loss",
        "loss = None\nreturn input_ids",
    ),
    "output capture": (
        "outputs = () if output_attentions else None\nif outputs is not None:\n    outputs += (1,)\nreturn input_ids",
        "outputs = None\nreturn input_ids",
    ),
    "a check": ("if input_ids.shape[0] > 3:\n    raise ValueError('no')\nreturn input_ids", "return input_ids"),
    "a check otherwise": (
        "if self.config.n == 1:\n    x = input_ids\nelse:\n    message = 'no'\n    raise ValueError(message)\nreturn x",
        "if self.config.n == 1:\n    x = input_ids\nreturn x",
    ),
    "asserts, warnings, docstrings": ("'doc'\nassert input_ids is not None\nlogger.warning_once('x')\nreturn input_ids", "return input_ids"),
    "other attention": ("if self.config._attn_implementation != 'eager':\n    return self.fast(input_ids)\nreturn input_ids", "return input_ids"),
    "compiling": ("if not is_torchdynamo_compiling():\n    return input_ids\nreturn None", "return input_ids"),
    "where arrays are": ("x = input_ids\nif x.device != attention_mask.device:\n    x = x.to(attention_mask.device)\nreturn x", "x = input_ids\nreturn x"),
    "after a return": ("return input_ids\nx = 1\n", "return input_ids"),
    "keywords that arrays do not have": ("return input_ids.to(torch.long, non_blocking=True)", "return input_ids.to(torch.long)"),
    "with and try": ("with torch.no_grad():\n    x = input_ids + 1\nreturn x", "x = input_ids + 1\nreturn x"),
    "a table of module level": ("if KIND == 'b':\n    return None\nreturn input_ids * KIND_SIZE", "return input_ids * 3"),
    "kwargs that nobody gives": (
        "n = kwargs.get('n', 2)\nm = kwargs.pop('m', None)\nif m is None:\n    return input_ids * n\nreturn m",
        "n = 2\nm = None\nreturn input_ids * 2",
    ),
}


@pytest.mark.parametrize("name", GONE)
def test_what_no_configuration_changes_goes(tmp_path, name):
    body, left = GONE[name]
    assert statements(folded(tmp_path, body, "KIND = 'a'\nKIND_SIZE = 3\n")) == (left or "return input_ids")


STAYS = {
    "a branch of the config": "if self.config.use_bias:\n    x = input_ids + 1\nelse:\n    x = input_ids\nreturn x",
    "a check of arrays without raise": "if input_ids.shape[0] > 3:\n    x = input_ids\nelse:\n    x = input_ids * 2\nreturn x",
    "an attribute that varies": "return input_ids * self.scale if self.scale is not None else input_ids",
    "a loop's counter": "x = 0\nfor n in range(3):\n    if x > 1:\n        input_ids = input_ids + x\n    x = x + 1\nreturn input_ids",
    "a check that also computes": "if self.config.n == 1:\n    x = input_ids\nelse:\n    x = input_ids * 2\n    self.note(x)\nreturn x",
    "dropout of the config's own": "return self.config.dropout * input_ids",
}


@pytest.mark.parametrize("name", STAYS)
def test_what_a_configuration_chooses_stays(tmp_path, name):
    assert statements(folded(tmp_path, STAYS[name])) == STAYS[name]


HELPER = """
def helper(x, scale=1.0, flag=False, mode="plain", **kwargs):
    if flag:
        x = x * 2
    if mode == "other":
        return None
    if kwargs.get("extra") is not None:
        x = x + kwargs["extra"]
    return inner(x, scale, **kwargs)

def inner(x, scale, extra=None):
    if extra is not None:
        x = x + extra
    return x * scale
"""


def test_constants_go_across_calls(tmp_path):
    found = functions(tmp_path, "return helper(input_ids)", HELPER)
    assert statements(toy.text_of(found["helper"])) == "return inner(x, 1.0)"
    assert statements(toy.text_of(found["inner"])) == "return x * 1.0"


def test_two_callers_that_differ_keep_the_branch(tmp_path):
    found = functions(tmp_path, "return helper(input_ids, flag=True) + helper(input_ids, 2.0)", HELPER)
    text = statements(toy.text_of(found["helper"]))
    assert "if flag:" in text and "inner(x, scale)" in text and "mode" not in text
    assert found["helper"].arguments["flag"] in (GIVEN, VARIES) and found["helper"].arguments["mode"] == Const("plain")


def test_keywords_through_kwargs_become_explicit(tmp_path):
    found = functions(tmp_path, "return helper(input_ids, extra=input_ids)", HELPER)
    assert "inner(x, 1.0, extra=extra)" in statements(toy.text_of(found["helper"]))
    assert "x = x + extra" in statements(toy.text_of(found["inner"])) and list(found["helper"].extras) == ["extra"]
    alone = functions(tmp_path, "return helper(input_ids)", HELPER)
    assert "extra" not in statements(toy.text_of(alone["helper"])) and not alone["helper"].extras


def test_what_nobody_calls_is_not_reached(tmp_path):
    assert set(functions(tmp_path, "return input_ids", HELPER)) == {f"{toy.ENTRY}.forward"}
    assert set(functions(tmp_path, "return self.fast(helper(input_ids)) if self.training else input_ids", HELPER)) == {f"{toy.ENTRY}.forward"}


def test_a_table_of_attention_functions_gives_the_eager_one(tmp_path):
    more = "from ...modeling_utils import ALL_ATTENTION_FUNCTIONS\ndef eager_attention_forward(module, q):\n    return q\n"
    body = "attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)\nreturn attend(self, input_ids)"
    assert statements(folded(tmp_path, body, more)) == "return eager_attention_forward(self, input_ids)"
    body = "attend = TABLE[self.config.kind]\nreturn attend(self, input_ids)"
    assert statements(folded(tmp_path, body, more + "TABLE = {'a': eager_attention_forward}\n")) == body


def test_assignments_within_a_condition_come_before_it(tmp_path):
    body = "if (n := self.config.n) is not None:\n    return input_ids * n\nreturn input_ids"
    assert statements(folded(tmp_path, body)).splitlines()[:2] == ["n = self.config.n", "if n is not None:"]


def test_the_cache_is_always_there_and_layers_do_not_name_themselves(tmp_path):
    more = "def layer(x, past_key_values, layer_idx):\n    if past_key_values is not None:\n"
    more += "        x, _ = past_key_values.update(x, x, layer_idx, {'a': 1})\n    return x\n"
    found = functions(tmp_path, "return layer(input_ids, past_key_values, 0)", more, signature="self, input_ids, past_key_values=None")
    assert statements(toy.text_of(found["layer"])) == "x, _ = past_key_values.update(x, x)\nreturn x"


def _recorded(tmp_path, body, **facts) -> SourceRecord:
    """A record of the entry's forward by the text of its nodes."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return toy.known(tmp_path, f"{HEAD}\nclass {toy.ENTRY}(nn.Module):\n    def forward(self, input_ids):\n{lines}\n", **facts)


@pytest.mark.parametrize("kind, left", [("module:Dropout", "return input_ids"), ("module:Linear", "return self.drop(input_ids)")])
def test_a_module_is_dropped_by_what_it_is_and_not_by_its_name(tmp_path, kind, left):
    body = "return self.drop(input_ids)"
    record = _recorded(tmp_path, body, kinds={"self.drop": [kind]})
    assert statements(folded(tmp_path, body, record=record, signature="self, input_ids")) == left


@pytest.mark.parametrize("seen, left", [([True], "return input_ids"), ([False], "return input_ids * 2"), ([False, True], None)])
def test_isinstance_is_what_the_runs_saw(tmp_path, seen, left):
    body = "if isinstance(self.act, nn.SiLU):\n    return input_ids\nreturn input_ids * 2"
    record = _recorded(tmp_path, body, tests={"isinstance(self.act, nn.SiLU)": seen})
    assert statements(folded(tmp_path, body, record=record, signature="self, input_ids")) == (left or body)


def test_joining_values():
    one, none = Const(1), Const(None)
    assert join(one, Const(1)) == one and join(one, Const(2)) is GIVEN and join(one, none) is VARIES and join(GIVEN, one) is GIVEN
    assert Const(1) != Const(True) and Const(1) != Const(1.0)
