"""Torch expressions through the rewriter, evaluated by jax.numpy in float64 against torch; what has no translation is refused by name and line."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from labkit.hf.exact import exact_mode
from labkit.port.facts import Facts
from labkit.port.refusal import CannotTranslate
from tests.port import toy

# Inputs: x, y [2, 3, 4], w [4, 5] and v [4] of floats; i [2, 3, 4] of integers within 0..3, j [3] of positions; m [2, 3, 4] of booleans; p > 0; e a list of
# pieces; q [2, 4, 6] and k [4, 1, 3] for convolutions.
EXPRESSIONS = """
nn.Softmax(dim=-1)(x)
nn.GELU(approximate="tanh")(x)
torch.nn.SiLU()(x)
x.detach() * 2
i.detach() + 1
x.view(2, 12)
x.view(x.shape[0], -1)
x.reshape(*x.shape[:-1], 2, 2)
x.view((6, 4))
x.reshape(-1)
x.transpose(1, 2)
x.transpose(-1, -2).contiguous().view(2, -1)
x.permute(2, 0, 1)
x.permute((0, 2, 1))
x.flatten(1)
x.flatten(0, 1)
x.flatten()
x.unflatten(-1, (2, 2))
x.unsqueeze(1)
x[:, :1].squeeze(1)
x.squeeze(1)
x[:, None, :, 1:].expand(2, 5, 3, -1)
v.expand(3, 4)
v.expand_as(x)
x.repeat(1, 2, 1)
v.repeat(2, 1)
torch.tile(v, (2, 2))
x.repeat_interleave(2, dim=1)
torch.repeat_interleave(x, repeats=3, dim=-1)
x.swapaxes(0, 1)
w.t()
w.T
x.mT
torch.movedim(x, 0, -1)
x.roll(1, 2)
x.flip(-1)
x.flip((0, 1))
x.narrow(2, 1, 2)
x.select(1, 2)
x.index_select(1, j)
x.tril()
x.triu(diagonal=1)
torch.diagonal(x, dim1=1, dim2=2)
x.unfold(2, 2, 1)
x.sum()
x.sum(-1)
x.sum(dim=(0, 2), keepdim=True)
x.mean(-1, keepdim=True)
x.mean(dim=[0, 1])
x.prod(dim=1)
x.var(-1, keepdim=True)
x.var(-1, unbiased=False)
x.std(dim=1)
x.std(1, correction=0)
x.max()
x.max(dim=-1)[0]
x.max(dim=-1, keepdim=True).values
x.min(dim=1).indices
torch.max(x, y)
torch.maximum(x, y)
x.amax(dim=(1, 2))
x.amin(-1, keepdim=True)
x.argmax(dim=-1)
x.norm(dim=-1, keepdim=True)
x.norm(p=2, dim=-1)
torch.linalg.vector_norm(x, dim=(1, 2))
torch.norm(w, p=2)
x.logsumexp(dim=1)
m.any(dim=-1)
m.all(dim=1, keepdim=True)
m.sum(-1)
m.float().sum(dim=0)
x.cumsum(dim=1)
i.cumsum(-1)
m.cumsum(dim=-1)
x.cumprod(dim=-1)
x.cumsum(-1, dtype=torch.float32)
x.topk(2, dim=-1)
torch.topk(x, k=3, dim=-1, sorted=False)[1].sort(-1)[0]
x.sort(dim=1)
x.sort(dim=-1, descending=True)[1]
x.argsort(dim=-1)
torch.argsort(x, dim=1, descending=True)
x.split(2, dim=-1)
x.split(3, dim=2)
x.split([1, 3], dim=-1)
torch.split(x, e, dim=1)
x.chunk(2, dim=-1)
x.chunk(3, 1)
x.unbind(1)
torch.cat([x, y], dim=-1)
torch.cat((x, i), dim=1)
torch.stack([x, y], dim=1)
torch.stack((x, y))
F.pad(x, (1, 2))
F.pad(x, (0, 0, 2, 0), value=-1.5)
F.pad(x, (-1, 0, 0, 1))
x.masked_fill(m, -2.5)
x.masked_fill(i == 2, float("-inf")).softmax(-1)
x.exp().masked_fill(~m, 0)
torch.where(m, x, y)
torch.where(m, x, 0.0)
torch.where(x > 0, x, i)
torch.clamp(x, min=-0.5, max=0.5)
x.clamp(min=0.25)
x.clip(-1, 1)
x.clamp_min(0.1)
x.gather(-1, i)
x.gather(1, i[:, :2] % 3)
x.gather(1, i[:1, :, :2] % 3)
torch.take_along_dim(x, i, dim=-1)
x.scatter(-1, i[..., :1], y)
x.scatter(1, i[:, :1] % 3, 7.0)
torch.zeros_like(x).scatter_add(-1, i, y)
torch.zeros_like(x).index_add(1, j, y)
x.index_copy(1, j[:2], y[:, :2])
torch.einsum("bij,bkj->bik", x, y)
torch.einsum("bij,jk->bik", x, w)
x @ w
torch.matmul(x, y.transpose(1, 2))
torch.bmm(x, y.mT)
torch.baddbmm(x[:, :, :3], x, y.mT, beta=0.5, alpha=2.0)
torch.outer(v, v)
F.linear(x, w.T)
F.linear(x, w.T, w[0])
i.float()
i.to(torch.float32) / 3
x.to(torch.float32) * x.float()
i.to(x.dtype) + x
m.to(x) * x
m.long().cumsum(-1) - 1
i.type_as(x)
x.int()
i.bool()
x.type(torch.int64)
x * i
i + x
1 / (i + 1)
torch.sqrt(i)
i.exp()
(i + 1).log()
i.sin()
x / i.sum()
i / 2
i / (i + 1)
i * 0.5
i // 2
i % 3
-i % 3
x % 0.7
torch.remainder(x, 0.3)
torch.div(i, 2, rounding_mode="floor")
torch.div(-i, 2, rounding_mode="trunc")
torch.div(x, 0.3, rounding_mode="trunc")
i > 0.5
x > i
(i == 1) & m
m | (x > 0)
m ^ (i > 1)
~m
i & 1
i << 2
x ** 2
x.pow(3)
p ** -0.5
p.pow(0.5)
2 ** i
i ** 2
10000.0 ** (torch.arange(0, 4, 2).float() / 4)
torch.add(x, y)
torch.add(x, y, alpha=2)
x.sub(y, alpha=0.5)
x.mul(y).add(1)
torch.rsqrt(p)
p.log()
x.expm1() + p.log1p()
x.exp().sqrt().abs().neg()
x.floor() + x.ceil() + x.round()
x.sin() * x.cos() + x.tan()
torch.atan2(x, y)
x.sign()
torch.erf(x)
x.reciprocal()
torch.isinf(x / 0.0)
torch.logical_and(m, x > 0)
F.relu(x) ** 2
F.silu(x) + x.sigmoid() + x.tanh()
F.gelu(x)
F.gelu(x, approximate="tanh")
F.softplus(x)
F.softplus(x * 30)
F.softplus(x * 3, beta=2.0, threshold=1.0)
F.logsigmoid(x)
F.glu(x, dim=-1)
F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)
torch.softmax(x, 1)
F.log_softmax(x, dim=-1)
F.one_hot(i, num_classes=4)
F.one_hot(i, 5).permute(3, 0, 1, 2).float()
F.normalize(x, dim=-1)
F.normalize(x, p=2.0, dim=1, eps=1e-5)
F.layer_norm(x, (4,), v, p[0, 0], 1e-5)
F.layer_norm(x, x.shape[-1:], eps=1e-3)
F.rms_norm(x, (4,), v, 1e-6)
F.conv1d(q, k, groups=4)
F.conv1d(q, k, v, padding=2, groups=4)[..., :6]
F.conv1d(q, torch.cat([k, k], dim=1), stride=2, groups=2)
F.embedding(i, w)
F.dropout(x, p=0.5, training=False)
torch.zeros(2, 3) + x.sum()
torch.ones((2, 4), dtype=x.dtype)
torch.full((2, 4), 0.5)
torch.full_like(x, 3)
x.new_zeros(3, 2)
x.new_ones((2,))
torch.arange(4)
torch.arange(1, 7, 2)
torch.arange(x.shape[1], device=x.device)[:, None] >= torch.arange(3)
torch.arange(3, dtype=torch.float32) * 0.5
torch.linspace(0, 1, 5)
torch.eye(3)
torch.tensor([1.5, 2.0]) + x[0, :, :2]
torch.tensor(3) * i
torch.finfo(x.dtype).min * m
torch.bincount(i.flatten(), minlength=6)
torch.searchsorted(j, i)
torch.view_as_complex(x.reshape(2, 3, 2, 2)).real
torch.view_as_real(torch.polar(p, x))
torch.linalg.solve_triangular(x[:, :, :3].tril() + 3 * torch.eye(3), y, upper=False)
torch.isin(i, j)
torch.diff(x, dim=-1)
x.numel() + x.dim() * x.size(-1) + len(x)
x.shape
x[..., ::2]
x[..., 1::2]
x[:, :, 1::3]
x[:, 1::2]
x[:, -1:, 1:3]
x[0, ..., None]
x[:, j]
x[:, [2, 0]]
x[torch.arange(2), j[:2]]
""".strip().splitlines()

STATEMENTS = {
    "an element": "x = x.clone(); x[:, 0] = 1.5; return x",
    "a slice": "z = torch.zeros_like(x); z[:, 1:, ::2] = y[:, 1:, ::2]; return z",
    "gathered places": "z = x.clone(); z[:, j] = y; return z",
    "a last place": "z = x.clone(); z[..., -1] = i[..., 0]; return z",
    "by a mask": "z = x.clone(); z[m] = 0; return z",
    "by a mask of rows": "z = w[:, :4].clone(); z[v > 0] = 0.5; return z",
    "by a comparison": "z = x.clone(); z[x > 0.5] = -1.0; return z",
    "added to an element": "z = x.clone(); z[:, 1] += y[:, 0]; return z",
    "subtracted from an element": "z = x.clone(); z[:, 1] -= y[:, 0] * 2; return z",
    "an element scaled": "z = x.clone(); z[0] *= 2; return z",
    "an element divided": "z = x.clone(); z[0] /= y[0]; return z",
    "augmented names": "z = x * 1; z += y; z *= 0.5; z -= i; z /= 3; return z",
    "augmented integers": "z = i * 1; z += 2; z //= 2; return z",
    "in place within an expression": "z = x.clone(); a = z.mul_(2).sum(); return a",
    "in place, many": "z = x.clone(); z.add_(y); z.clamp_(min=0); return z",
    "in place, given on": "z = x.clone().mul_(y); return z",
    "in place on a part": "z = x.clone(); z[:, 0].mul_(3); return z",
    "filled in place": "z = x.clone(); z.masked_fill_(m, 0.25); return z",
    "copied in place": "z = torch.zeros_like(x); z.copy_(y[:1]); return z",
    "zeroed in place": "z = x.clone(); z[:, 1].zero_(); z[0].fill_(4); return z",
    "scattered in place": "z = torch.zeros_like(x); z.scatter_(-1, i, 1.0); return z",
    "added by index in place": "z = torch.zeros_like(x); z.index_add_(1, j, y); return z",
    "unpacked": "a, b = x.chunk(2, dim=-1); return a * b",
    "unpacked pairs": "weights, places = torch.topk(x, 2, dim=-1); return weights * places",
    "a swap": "a, b = x, y; a, b = b, a; return a - 2 * b",
    "a loop": "z = x; \nfor n in range(3): z = z * y + n\nreturn z",
    "a branch on numbers": "z = x\nif x.shape[1] > 2: z = x + 1\nelse: z = x - 1\nreturn z",
    "a choice": "return x if x.shape[-1] == 4 else y",
    "a comprehension": "return torch.cat([part * n for n, part in enumerate(x.split(e, dim=1))], dim=1)",
    "a lambda": "f = lambda a: a * 2 + x; return f(y)",
    "an inner function": "def turn(a): return torch.cat((-a[..., 2:], a[..., :2]), dim=-1)\nreturn turn(x) * y",
}

REFUSED = {
    "nonzero": ("x.nonzero()", "nonzero"),
    "torch.nonzero": ("torch.nonzero(x)", "nonzero"),
    "mask index": ("x[m]", "boolean mask"),
    "comparison as index": ("x[:, j > 0]", "boolean mask"),
    "item": ("x.sum().item()", r"item\(\)"),
    "tolist": ("j.tolist()", r"tolist\(\)"),
    "where of one": ("torch.where(m)", "torch.where with one argument"),
    "unknown function": ("torch.cosine_similarity(x, y)", "operation cosine_similarity"),
    "unknown method": ("x.median()", "array method median"),
    "unknown argument": ("x.sort(dim=-1, stable=True)", "argument stable"),
    "smallest": ("x.topk(2, largest=False)", "topk of the smallest"),
    "topk elsewhere": ("x.topk(2, dim=0)", "topk along axis 0"),
    "view as bits": ("x.view(torch.int64)", "view as another dtype"),
    "padding that reflects": ("F.pad(x, (1, 1), mode='reflect')", "pad"),
    "masked rows of values": ("z = x.clone(); z[m] = y.flatten()[: m.sum()]; return z", "mask"),
    "mask and index": ("z = x.clone(); z[m[:, 0, 0], 0] = 1.0; return z", "mask and other indices"),
    "search from the right": ("torch.searchsorted(j, i, right=True)", "argument right"),
    "in place within an expression": ("z = x.clone(); a = z.mul_(2).sum(); return z + a", "in place within an expression"),
    "a chain in place": ("z = x.clone(); z.mul_(2).add_(1); return z", "in place within an expression"),
    "branch on a value": ("z = x\nif x.sum() > 0: z = y\nreturn z", "branch on an array's value"),
    "choice by a value": ("return x if (x > 0).all() else y", "branch on an array's value"),
    "element of an element": ("z = x.clone(); z[0][1] = 2.0; return z", "element of an element"),
}

PARAMETERS = "x, y, w, v, p, i, j, m, e, q, k"


def _body(text: str) -> list[str]:
    if "return" not in text:
        return [f"return {text}"]
    lines = [[line] if line.startswith(("def", "for", "if", "else")) else line.split(";") for line in text.split("\n")]
    return [part.strip() for parts in lines for part in parts if part.strip()]


def _cases() -> dict[str, list[str]]:
    texts = [*EXPRESSIONS, *STATEMENTS.values(), *(text for text, _ in REFUSED.values())]
    return {f"case_{number}": _body(text) for number, text in enumerate(texts)}


CASES = _cases()
NAMES = dict(zip([*EXPRESSIONS, *STATEMENTS, *(f"refused {n}" for n in REFUSED)], CASES))


def _source() -> str:
    lines = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", f"class {toy.ENTRY}(nn.Module):"]
    lines += ["    def forward(self, input_ids):", "        return input_ids"]
    for name, body in CASES.items():
        lines += ["", f"def {name}({PARAMETERS}):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n"


def _inputs() -> dict:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape) for name, shape in {"x": (2, 3, 4), "y": (2, 3, 4), "w": (4, 5), "v": (4,)}.items()}
    made["p"] = rng.uniform(0.1, 2, (2, 3, 4))
    made |= {"i": rng.integers(0, 4, (2, 3, 4)), "j": np.array([0, 1, 2]), "m": rng.uniform(size=(2, 3, 4)) > 0.4, "e": [1, 2]}
    return made | {"q": rng.normal(size=(2, 4, 6)), "k": rng.normal(size=(4, 1, 3))}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(context, torch's results by function, line of each function): all functions recorded by one run in exact mode."""
    folder, results = tmp_path_factory.mktemp("ops"), {}

    def call(module):
        with exact_mode(), torch.no_grad():
            for name in CASES:
                given = {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in _inputs().items()}
                with contextlib.suppress(RuntimeError) if CASES[name] == ["return x.view(torch.int64)"] else contextlib.nullcontext():
                    results[name] = _plain(getattr(module, name)(*given.values()))

    made = toy.program(folder, _source())
    record = toy.observe(folder, _source(), call)
    lines = {name: made.function(f"{toy.FILE}::{name}").lineno for name in CASES}
    return toy.context(made, record, CASES), results, lines


@pytest.fixture(scope="module")
def ours(run):
    """What the translations give, by function: all compiled as one program. An error takes the place of the value."""
    context, outputs = run[0], {}
    with _exact_numbers():
        good = {}
        for name in CASES:
            try:
                function = _function(context, name)
                jax.eval_shape(function, *_arrays())
                good[name] = function
            except Exception as error:  # the test of that name raises it
                outputs[name] = error
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        together = jax.jit(lambda *given: {name: function(*given) for name, function in good.items()}, compiler_options=quick)
        return outputs | {name: _plain(value) for name, value in together(*_arrays()).items()}


def _plain(value):
    """Arrays and numbers as numpy, sequences as tuples."""
    if isinstance(value, (tuple, list)) or type(value).__name__ in ("max", "sort", "topk"):
        return tuple(_plain(v) for v in value)
    return np.asarray(value.resolve_conj() if isinstance(value, torch.Tensor) else value)


@contextlib.contextmanager
def _exact_numbers():
    """As in a proof."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        yield


def _arrays() -> list:
    return [jnp.asarray(v.astype(np.int32) if v.dtype == np.int64 else v) for v in _inputs().values() if isinstance(v, np.ndarray)]


def _function(context, name: str):
    """The translation of a case as a function of all arrays."""
    scope, folded = {}, context.functions[f"{toy.FILE}::{name}"]
    exec(compile(toy.translated(context, name), name, "exec"), scope)
    fixed = {k: v for k, v in _inputs().items() if not isinstance(v, np.ndarray)}
    more = {"dtype": jnp.float64} if context.takes_dtype(folded) else {}

    def function(*arrays):
        given = dict(zip([k for k in _inputs() if k not in fixed], arrays)) | fixed
        return scope[name](*(given[p] for p in folded.parameters), **more)

    return function


def evaluate(context, name: str):
    """What one translation gives in float64 under strict promotion."""
    with _exact_numbers():
        return _plain(_function(context, name)(*_arrays()))


def same(ours, theirs, limit: float = 1e-12) -> bool:
    """Equal in structure, shape and kind of number, values within `limit` (infinities and integers exactly)."""
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(same(a, b, limit) for a, b in zip(ours, theirs))
    if not isinstance(ours, np.ndarray) or ours.shape != theirs.shape or {ours.dtype.kind, theirs.dtype.kind} not in ({"f"}, {"i"}, {"b"}, {"c"}):
        return False
    if theirs.dtype.kind == "f" and (ours.dtype != theirs.dtype or not np.array_equal(np.isinf(ours), np.isinf(theirs))):
        return False
    finite = np.isfinite(theirs)
    scale = max(1.0, float(np.abs(theirs[finite]).max(initial=0)))
    return bool(np.abs(ours[finite].astype(theirs.dtype) * 1.0 - theirs[finite] * 1.0).max(initial=0) <= limit * scale)


def test_the_table_is_long_enough():
    assert len(set(EXPRESSIONS)) == len(EXPRESSIONS) >= 80


@pytest.mark.parametrize("name", [*EXPRESSIONS, *STATEMENTS])
def test_the_translation_gives_what_torch_gives(run, ours, name):
    context, results, _ = run
    found = ours[NAMES[name]]
    if isinstance(found, Exception):
        raise found
    assert same(found, results[NAMES[name]]), toy.translated(context, NAMES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_translation_is_refused_by_construct_and_line(run, name):
    context, _, lines = run
    with pytest.raises(CannotTranslate, match=REFUSED[name][1]) as refused:
        toy.translated(context, NAMES[f"refused {name}"])
    first = lines[NAMES[f"refused {name}"]]
    file, _, line = refused.value.where.rpartition(":")
    assert file == toy.FILE and first < int(line) <= first + len(CASES[NAMES[f"refused {name}"]])


@pytest.mark.parametrize(
    "expression, operation, template",
    [
        ("x.cumsum(dim=1)", "cumsum", "jnp.cumprod({wide:input}, axis={dim})"),
        ("x.sum(-1)", "sum", "jnp.sum({wide:input}, axis={dim}, keepdims=True)"),
        ("x.argsort(dim=-1)", "argsort", "jnp.argsort({input}, axis={dim|-1}, descending=True)"),
        ("i.float()", "float", "{widen}({input})"),
        ("x.tril()", "tril", "jnp.tril({input}, k=-1)"),
    ],
)
def test_a_wrong_entry_of_the_table_is_seen(run, monkeypatch, expression, operation, template):
    from labkit.port import rewrite

    context, results, _ = run
    monkeypatch.setitem(rewrite.OPS, operation, dataclasses.replace(rewrite.OPS[operation], template=template))
    name = NAMES[expression]
    if operation == "float":
        monkeypatch.setattr(Facts, "dtype", lambda self, node: "f")
    assert not same(evaluate(context, name), results[name])


def test_the_comparison_sees_a_last_digit_a_dtype_and_a_shape():
    x = np.ones((2, 3))
    assert same(x, x) and not same(x + 1e-11, x) and not same(x.astype(np.float32), x) and not same(x[None], x) and not same((x,), (x, x))
    assert not same(np.where(x > 0, np.inf, x), x)


def test_an_operation_that_no_run_saw_is_translated_only_where_the_name_says_array(run):
    """Without a record `x.view` can only be an array's; `x.update` may be anything and stays a call."""
    from labkit.hf.source_record import SourceRecord

    context, _, _ = run
    bare = toy.context(context.program, SourceRecord(), [NAMES["x.view(2, 12)"]])
    assert "x.reshape(2, 12)" in toy.translated(bare, NAMES["x.view(2, 12)"])
    bare = toy.context(context.program, SourceRecord(), [NAMES["refused unknown method"]])
    assert re.search(r"return x\.median\(\)", toy.translated(bare, NAMES["refused unknown method"]))


@pytest.mark.parametrize(("given", "wanted"), [("", "{}"), ("shared", "{}"), ("x", None)])
def test_a_dictionary_of_shared_states_is_a_plain_one_while_nobody_gives_it_anything(tmp_path, given, wanted):
    source = f"""
        from ...cache_utils import KVSharingDict
        from torch import nn

        class {toy.ENTRY}(nn.Module):
            def forward(self, input_ids):
                return input_ids

        def case(x):
            shared = None
            states = KVSharingDict({given})
            states["a"] = x
            return states["a"]
    """
    context = toy.context(toy.program(tmp_path, source), toy.known(tmp_path, source), ["case"])
    if wanted is None:
        with pytest.raises(CannotTranslate, match="KVSharingDict"):
            toy.translated(context, "case")
    else:
        assert f"states = {wanted}" in toy.translated(context, "case")
