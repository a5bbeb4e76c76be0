"""Where the reference computes without gradients the translation stops them: gradients against torch's own, and the statements that do it."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.port.refusal import CannotTranslate
from labkit.port.without_gradients import chosen, stops
from tests.port import toy

BODIES = {
    "a block": "with torch.no_grad():\n    z = x * w\nreturn (z + x * w * w).sum()",
    "a block that changes an argument": "with torch.inference_mode():\n    x = x * w\nx = x + 0\nreturn (x * w).sum()",
    "chosen per turn": "z = x\nfor n in range(3):\n    c = nullcontext() if n >= 2 else torch.no_grad()\n    with c:\n        z = z * w\nreturn (z * x).sum()",
    "chosen the other way": "z = x\nfor n in range(3):\n    with torch.no_grad() if n < 1 else nullcontext():\n        z = z * w\nreturn (z * x).sum()",
    "stored at an index": "z = torch.zeros(2, 3, dtype=x.dtype)\nwith torch.no_grad():\n    z[:, 1] = (x * w)[:, 0]\nreturn (z * w).sum()",
    "stored in place": "z = x * 1\nwith torch.no_grad():\n    y = z * w\n    y.mul_(w)\nreturn (y * x).sum()",
    "returned from the block": "return (from_block(x, w) * w).sum()",
    "switched off": "with torch.set_grad_enabled(False):\n    z = x * w\nreturn (z * w).sum()",
    "a function under the decorator": "return (apart(x, w) * w).sum()",
    "two results of one": "a, b = pair(x, w)\nreturn (a * w + b).sum()",
    "detached": "return (x.detach() * w + (x * w).detach() * x).sum()",
    "with gradients": "with torch.autocast('cpu', enabled=False):\n    z = x * w\nreturn (z * w).sum()",
    "what only inference takes": "if not self_training:\n    with torch.enable_grad():\n        x = x * w\nreturn (x * w).sum()",
}
HEAD = """
import torch
from contextlib import nullcontext
from torch import nn

self_training = False

@torch.no_grad()
def apart(x, w):
    return x * w

def from_block(x, w):
    with torch.no_grad():
        return x * w

@torch.no_grad()
def pair(x, w):
    return x * w, x + w

"""
# inference_mode makes tensors that autograd refuses to save, so torch's side of that case runs under no_grad
TORCH = {"a block that changes an argument": ("torch.inference_mode", "torch.no_grad")}


def _source(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{HEAD}class {toy.ENTRY}(nn.Module):\n    def forward(self, input_ids):\n        return input_ids\n\ndef case(x, w):\n{lines}\n"


@pytest.mark.parametrize("name", BODIES)
def test_gradients_are_torchs(tmp_path, name):
    rng, theirs = np.random.default_rng(0), []
    x, w = rng.normal(size=(2, 3)), rng.normal(size=3)

    def call(module):
        given = [torch.from_numpy(a).requires_grad_() for a in (x, w)]
        value = module.case(*given)
        value.backward()
        theirs.extend([value.item(), *(np.zeros(a.shape) if a.grad is None else a.grad.numpy() for a in given)])

    source = _source(BODIES[name])
    record = toy.observe(tmp_path, source.replace(*TORCH[name]) if name in TORCH else source, call)
    context = toy.context(toy.program(tmp_path, source), record, ["case"])
    scope = {}
    for function in [n for n in ("apart", "pair", "from_block") if f"{toy.FILE}::{n}" in context.functions] + ["case"]:
        exec(toy.translated(context, function), scope)
    with jax.enable_x64(True):
        value, gradients = jax.value_and_grad(scope["case"], argnums=(0, 1))(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(value, theirs[0], rtol=1e-14)
    for ours, wanted in zip(gradients, theirs[1:]):
        np.testing.assert_allclose(ours, wanted, rtol=1e-14)


def test_nothing_is_stopped_that_only_inference_takes(tmp_path):
    body = "if not self.training and x.shape[1] > 2:\n    with torch.no_grad():\n        x = x * 2\nreturn x"
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    source = f"import torch\nfrom torch import nn\n\nclass {toy.ENTRY}(nn.Module):\n    def forward(self, x):\n{lines}\n"
    record = toy.observe(tmp_path, source, lambda module: getattr(module, toy.ENTRY)().eval()(torch.ones(2, 3)))
    text = toy.text_of(toy.fold(tmp_path, source, record)[0][f"{toy.ENTRY}.forward"])
    assert "x = x * 2" in text and "detach" not in text
    always = source.replace("not self.training and ", "")
    record = toy.observe(tmp_path, always, lambda module: getattr(module, toy.ENTRY)().eval()(torch.ones(2, 3)))
    assert "x = x.detach()" in toy.text_of(toy.fold(tmp_path, always, record)[0][f"{toy.ENTRY}.forward"])


def test_integers_have_none_to_stop(tmp_path):
    body = "with torch.no_grad():\n    mask = torch.arange(3) > 1\nreturn (x * w * mask).sum() * mask.detach().sum()"
    record = toy.observe(tmp_path, _source(body), lambda module: module.case(torch.ones(2, 3), torch.ones(3)))
    text = toy.translated(toy.context(toy.program(tmp_path, _source(body)), record, ["case"]), "case")
    assert "stop_gradient" not in text


def test_sizes_alone_carry_no_gradient(tmp_path):
    """A rotary embedding takes hidden states for their dtype."""
    source = f"{HEAD}class {toy.ENTRY}(nn.Module):\n    @torch.no_grad()\n    def forward(self, x):\n        return torch.arange(3).to(x.dtype)\n"
    record = toy.observe(tmp_path, source, lambda module: getattr(module, toy.ENTRY)()(torch.ones(3)))
    assert "detach" not in toy.text_of(toy.fold(tmp_path, source, record)[0][f"{toy.ENTRY}.forward"])


def test_a_return_from_a_block_that_some_turns_have_gradients_in_is_refused(tmp_path):
    body = "for n in range(2):\n    with nullcontext() if n else torch.no_grad():\n        if n == 1:\n            return (x * w).sum()\nreturn x.sum()"
    record = toy.observe(tmp_path, _source(body), lambda module: module.case(torch.ones(2, 3), torch.ones(3)))
    with pytest.raises(CannotTranslate, match="a return from a block without gradients"):
        toy.context(toy.program(tmp_path, _source(body)), record, ["case"])


@pytest.mark.parametrize("text, wanted", [("a() if n >= 2 else torch.no_grad()", "n < 2"), ("torch.no_grad() if k else a()", "k"), ("a if k else b", None)])
def test_conditions(text, wanted):
    found = chosen(ast.parse(text, mode="eval").body)
    assert (found and ast.unparse(found)) == wanted
    assert not stops(ast.parse(text, mode="eval").body)
