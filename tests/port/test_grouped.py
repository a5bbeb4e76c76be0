"""Loops over experts become grouped products that give what the loop gives; what is none of their kind is refused or left alone."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.port.grouped import mark_expert_loops, mark_split_loops
from labkit.port.refusal import CannotTranslate
from tests.port import toy

LOOP = """
def {name}(x, chosen, weights, up, down, bias):
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=up.shape[0] + 1).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit:
        e = e[0]
        if e == up.shape[0]:
            continue
        place, token = torch.where(mask[e])
        {body}
        out.index_add_(0, token, h.to(out.dtype))
    return out
"""
BODIES = {
    "linear": "h = F.linear(x[token], up[e]).relu(); h = F.linear(h, down[e]) * weights[token, place, None]",
    "gated": "a, b = F.linear(x[token], up[e]).chunk(2, dim=-1); h = F.linear(torch.cat((F.silu(a) * b, a), dim=-1), down[e]) * weights[token, place, None]",
    "matmul": "h = (x[token] @ up[e].transpose(0, 1)).tanh(); h = weights[token, place, None] * (h @ down[e].T)",
    "bias": "h = F.linear(x[token], up[e]) + bias[e]; h = F.linear(h, down[e]) * weights[token, place, None]",
    "unweighted": "h = F.linear(F.linear(x[token], up[e]), down[e])",
}
REFUSED = {
    "another expert's weight": ("h = F.linear(F.linear(x[token], up[e - 1]), down[e])", "an expert's weight indexed as"),
    "rows picked otherwise": ("h = x[token, 0][:, None] * F.linear(F.linear(x[token], up[e]), down[e])", "rows of an expert picked as"),
    "a part of a weight": ("h = F.linear(F.linear(x[token], up[e][:3]), down[e][:, :3])", "a part of an expert's weight"),
    "no weights": ("h = x[token] * weights[token, place, None]", "without stacked weights"),
}
SPLIT = """
def by_counts(x, counts, w):
    parts = x.split(counts.tolist(), dim=0)
    outs = []
    for n in range(w.shape[0]):
        outs.append(F.linear(parts[n], w[n]))
    out = torch.cat(outs, dim=0)
    return out

def not_by_counts(x, counts, w):
    parts = x.split(counts.tolist(), dim=0)
    outs = []
    for n in range(w.shape[0]):
        outs.append(F.linear(parts[n], w[n]) * n)
    out = torch.cat(outs, dim=0)
    return out
"""
NAMES = {name: f"loop_{n}" for n, name in enumerate([*BODIES, *REFUSED])}


def _source() -> str:
    loops = [LOOP.format(name=NAMES[name], body=body) for name, body in [*BODIES.items(), *((n, b) for n, (b, _) in REFUSED.items())]]
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    head += f"class {toy.ENTRY}(nn.Module):\n    def forward(self, input_ids):\n        return input_ids\n"
    return head + "\n".join(loops) + SPLIT


def _inputs() -> dict:
    rng = np.random.default_rng(1)
    made = {"x": rng.normal(size=(7, 5)), "chosen": np.array([[0, 2], [2, 1], [3, 0], [2, 3], [1, 2], [0, 1], [3, 3]])}
    made |= {"weights": rng.uniform(size=(7, 2)), "up": rng.normal(size=(3, 6, 5)), "down": rng.normal(size=(3, 5, 6)), "bias": rng.normal(size=(3, 6))}
    return made


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COUNTS = {"x": _inputs()["x"], "counts": np.array([2, 0, 5]), "w": _inputs()["up"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(context, torch's results by function)."""
    folder, results = tmp_path_factory.mktemp("grouped"), {}

    def call(module):
        for name in [*NAMES.values(), "by_counts", "not_by_counts"]:
            given = COUNTS if "counts" in name else _inputs()
            results[name] = getattr(module, name)(*(torch.from_numpy(v) for v in given.values())).numpy()

    made = toy.program(folder, _source())
    record = toy.observe(folder, _source(), call)

    def passes(folded, facts):
        mark_expert_loops(folded)
        mark_split_loops(folded, facts)

    return toy.context(made, record, results, passes), results


def _evaluate(context, name, text=None, inputs=None):
    scope = {}
    exec(text or toy.translated(context, name), scope)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        given = {k: jnp.asarray(v.astype(np.int32) if v.dtype == np.int64 else v) for k, v in (inputs or _inputs()).items()}
        parameters = context.functions[f"{toy.FILE}::{name}"].parameters
        function = jax.jit(lambda given: scope[name](*(given[p] for p in parameters)), compiler_options=QUICK)
        return np.asarray(function(given))


@pytest.mark.parametrize("name", BODIES)
def test_a_loop_over_experts_is_grouped_products_that_give_the_same(run, name):
    context, results = run
    text = toy.translated(context, NAMES[name])
    assert not any(isinstance(n, ast.For) for n in ast.walk(ast.parse(text))) and "group_tokens(chosen, " in text and "nonzero" not in text
    np.testing.assert_allclose(_evaluate(context, NAMES[name]), results[NAMES[name]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("old, new", [("groups.weights(weights)", "1.0"), ("groups.linear(groups.rows(x), up)", "groups.linear(groups.rows(x), up[::-1])")])
def test_a_wrong_group_is_seen(run, old, new):
    context, results = run
    text = toy.translated(context, NAMES["linear"])
    assert old in text
    assert np.abs(_evaluate(context, NAMES["linear"], text.replace(old, new)) - results[NAMES["linear"]]).max() > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_does_something_else_is_refused(run, name):
    with pytest.raises(CannotTranslate, match=REFUSED[name][1]) as refused:
        toy.translated(run[0], NAMES[name])
    assert refused.value.where.startswith(f"{toy.FILE}:")


def test_rows_split_by_counts_are_one_product(run):
    context, results = run
    assert "linear_by_counts(x, counts, w)" in toy.translated(context, "by_counts")
    np.testing.assert_allclose(_evaluate(context, "by_counts", inputs=COUNTS), results["by_counts"], rtol=0, atol=1e-12)


def test_a_loop_that_does_more_than_the_product_is_not_taken_for_it(run):
    text = toy.translated(run[0], "not_by_counts")
    assert "linear_by_counts" not in text and "for n in range" in text
