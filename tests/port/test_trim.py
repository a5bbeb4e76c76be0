"""Trimming: parameters, returned elements, statements and attributes that nobody uses go, across functions; what is used stays."""

import ast

import pytest

from labkit.hf.source_record import SourceRecord
from labkit.port.facts import Facts
from labkit.port.trim import impure
from tests.port import toy
from tests.port.test_fold import HEAD, statements


def trimmed(tmp_path, body: str, more: str = "", init: str = "") -> dict:
    """Trimmed functions by qualified name."""

    def indent(text):
        return "\n".join(f"        {line}" for line in text.strip("\n").splitlines())

    made = f"    def __init__(self, config):\n        super().__init__()\n{indent(init)}\n" if init else ""
    return toy.trim(tmp_path, f"{HEAD}{more}\nclass {toy.ENTRY}(nn.Module):\n{made}    def forward(self, input_ids, position_ids=None):\n{indent(body)}\n")


def body_of(functions, name=f"{toy.ENTRY}.forward") -> str:
    return statements(toy.text_of(functions[name]))


ATTEND = """
def attend(q, mask, scale, dropout=0.0, *, window=None):
    weights = q * scale
    unused = weights + 1
    debug = [unused]
    return weights + mask, weights, q
"""


def test_parameters_that_nobody_reads_go_and_their_arguments_with_them(tmp_path):
    found = trimmed(tmp_path, "noise = input_ids * 3\nreturn attend(input_ids, position_ids, 2.0, noise, window=noise)[0]", ATTEND)
    assert found["attend"].parameters == ["q", "mask"]
    assert body_of(found) == "return attend(input_ids, position_ids)"
    found = trimmed(tmp_path, "return attend(input_ids, position_ids, self.scale, window=input_ids)[0]", ATTEND.replace("* scale", "* scale + window"))
    assert found["attend"].parameters == ["q", "mask", "scale", "window"] and "self.scale, window=input_ids" in body_of(found)


def test_returned_elements_that_nobody_reads_go(tmp_path):
    found = trimmed(tmp_path, "out, _, _ = attend(input_ids, position_ids, 2.0)\nreturn out", ATTEND)
    assert body_of(found, "attend").splitlines()[-1].strip() == "return weights + mask" and "out = attend(" in body_of(found)


@pytest.mark.parametrize(
    "body, returned",
    [
        ("out, weights, _ = attend(input_ids, position_ids, 2.0)\nreturn out + weights", "return (weights + mask, weights)"),
        ("found = attend(input_ids, position_ids, 2.0)\nreturn found[0] * found[2]", "return (weights + mask, q)"),
        ("return attend(input_ids, position_ids, 2.0)[1]", "return weights"),
        ("return attend(input_ids, position_ids, 2.0)", "return (weights + mask, weights, q)"),
        ("found = attend(input_ids, position_ids, 2.0)\nreturn torch.cat(found)", "return (weights + mask, weights, q)"),
        ("out, weights, _ = attend(input_ids, position_ids, 2.0)\nagain = attend(out, position_ids, 2.0)\nreturn again", "return (weights + mask, weights, q)"),
    ],
)
def test_returned_elements_that_somebody_reads_stay(tmp_path, body, returned):
    assert body_of(trimmed(tmp_path, body, ATTEND), "attend").splitlines()[-1] == returned


def test_what_goes_in_one_function_takes_more_with_it_in_others(tmp_path):
    more = "def outer(x, table):\n    return inner(x, table)\ndef inner(x, table):\n    note = table * 2\n    return x\n"
    found = trimmed(tmp_path, "table = torch.arange(4) * input_ids\nreturn outer(input_ids, table)", more)
    assert body_of(found) == "return outer(input_ids)" and found["outer"].parameters == found["inner"].parameters == ["x"]


def test_statements_without_effect_go_and_those_that_change_something_stay(tmp_path):
    body = "a = input_ids * 2\nb = a + 1\nseen = []\nseen.append(a)\na.add_(1)\nself.log(a)\nif position_ids is None:\n    c = a\nreturn a, seen"
    assert body_of(trimmed(tmp_path, body)) == "a = input_ids * 2\nseen = []\nseen.append(a)\na.add_(1)\nreturn (a, seen)"


def test_loops_keep_what_the_next_round_reads(tmp_path):
    body = "total = 0\ncarry = input_ids\nfor n in range(3):\n    spare = n * 2\n    total = total + carry\n    carry = carry * 2\nreturn total"
    left = body_of(trimmed(tmp_path, body))
    assert "spare" not in left and "carry = carry * 2" in left
    body = "total = 0\nfor n in range(3):\n    other = n\nreturn input_ids"
    assert body_of(trimmed(tmp_path, body)) == "return input_ids"


def test_attributes_that_nobody_reads_are_not_set(tmp_path):
    found = trimmed(tmp_path, "return input_ids * self.scale", init="self.scale = 2.0\nself.spare = 3\nself.norm = nn.LayerNorm(4)")
    left = body_of(found, f"{toy.ENTRY}.__init__")
    assert "self.scale = 2.0" in left and "spare" not in left and "self.norm = nn.LayerNorm(4)" in left


def test_named_outputs_become_tuples_and_their_readings_places(tmp_path):
    more = "from transformers.modeling_outputs import BaseModelOutput\ndef model(x):\n"
    more += "    return BaseModelOutput(last_hidden_state=x * 2, attentions=None, extra=x)\n"
    found = trimmed(tmp_path, "outputs = model(input_ids)\nreturn outputs.last_hidden_state + 1", more)
    assert body_of(found, "model") == "return x * 2" and body_of(found) == "outputs = model(input_ids)\nreturn outputs + 1"
    found = trimmed(tmp_path, "outputs = model(input_ids)\nreturn outputs.last_hidden_state + outputs.extra", more)
    assert body_of(found, "model") == "return (x * 2, x)" and "outputs[0] + outputs[1]" in body_of(found)


@pytest.mark.parametrize("name", ["Toy3_5Output", "tOYOutput"])
def test_named_outputs_of_a_class_in_the_file_become_tuples_too(tmp_path, name):
    more = f"from transformers.modeling_outputs import BaseModelOutput\nclass {name}(BaseModelOutput):\n    spare: int = 0\n"
    more += f"def model(x):\n    return {name}(last_hidden_state=x * 2, spare=1)\n"
    found = trimmed(tmp_path, "outputs = model(input_ids)\nreturn outputs.last_hidden_state + 1", more)
    assert body_of(found, "model") == "return x * 2" and body_of(found) == "outputs = model(input_ids)\nreturn outputs + 1"


def test_the_entry_gives_logits_alone(tmp_path):
    more = "from transformers.modeling_outputs import CausalLMOutput\n"
    assert body_of(trimmed(tmp_path, "return CausalLMOutput(loss=position_ids, logits=input_ids)", more)) == "return input_ids"


@pytest.mark.parametrize(
    "text, changes",
    [("x.add_(1)", True), ("seen.append(x)", True), ("cache.update(k, v)", True), ("x + y", False), ("f(x).sum(-1)", False), ("x.__len__()", False)],
)
def test_what_counts_as_a_change(text, changes):
    assert impure(ast.parse(text).body[0].value, Facts(SourceRecord())) == changes
