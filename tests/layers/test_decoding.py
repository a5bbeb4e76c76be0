"""Calls of decoders whose layers differ: states by name, several runs, layers outside the stack, reports, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from labkit.layers.attention import eager_attention
from labkit.layers.building import create_model, value
from labkit.layers.decoding import DecoderCall, empty_cache, report
from labkit.layers.masks import create_recurrent_attention_mask, create_sliding_window_causal_mask
from labkit.layers.modules import conv1d
from labkit.layers.planning import plan_layers
from labkit.layers.sharding import Sharding
from labkit.models.config import DecoderConfig
from labkit.parity.compare import relative_error
from labkit.parity.greedy import GreedyDecoder, cached_logits, forward

WIDTH, HEADS, KERNEL = 16, 4, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    layer_types: tuple = ("conv", "attention", "conv", "attention", "conv")
    runs: int = 1
    tail: int = 0
    fault: str = ""

    @functools.cached_property
    def plan(self):
        return plan_layers(len(self.layer_types), lambda layer_idx, build: HybridLayer(self, layer_idx, build=build), self)


class Attention(nnx.Module):
    def __init__(self, config, *, build):
        self.qkv = build.linear(WIDTH, 3 * WIDTH, name="qkv")

    def __call__(self, x, mask, cache):
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for part in jnp.split(self.qkv(x), 3, -1))
        k, v = cache.update(k, v)
        return eager_attention(q, k, v, mask, scaling=0.5).reshape(x.shape)


class ConvAndState(nnx.Module):
    """A causal convolution, then a running sum of what it gives, decayed."""

    def __init__(self, config, *, build):
        self.weight = build.param("normal", (WIDTH, 1, KERNEL), None, "weight")
        self.decay = build.param(0.5, (WIDTH,), None, "decay", wide=True)

    def __call__(self, x, padding, cache):
        x = x * padding[..., None].astype(x.dtype)
        length = x.shape[1]
        seen = cache.update_conv_state(x.swapaxes(1, 2), conv_kernel_size=KERNEL)
        x = conv1d(jnp.pad(seen, ((0, 0), (0, 0), (KERNEL - 1, 0))), value(self.weight) * 40, groups=WIDTH)[..., -length:].swapaxes(1, 2)
        state = cache.get_recurrent_state()
        state = jnp.zeros((x.shape[0], WIDTH), value(self.decay).dtype) if state is None else state
        decay = value(self.decay)

        def step(state, xs):
            new, real = xs
            state = jnp.where(real[:, None], state * decay + new.astype(state.dtype), state)
            return state, state

        state, out = jax.lax.scan(step, state, (x.swapaxes(0, 1), padding.swapaxes(0, 1)))
        cache.update_recurrent_state(state)
        return out.swapaxes(0, 1).astype(x.dtype)


class HybridLayer(nnx.Module):
    def __init__(self, config, layer_idx, *, build):
        self.kind = config.layer_types[layer_idx]
        self.mixer = (Attention if self.kind == "attention" else ConvAndState)(config, build=build)
        self.fault = config.fault

    def __call__(self, x, mask, padding, cache):
        y = self.mixer(x, mask if self.kind == "attention" else padding, cache)
        report("norm", jnp.sum(jnp.abs(y)))
        if self.kind == "attention":
            report("attended", jnp.mean(y))
        return (x + y).astype(jnp.bfloat16) if self.fault == "dtype" else x + y


class HybridModel(nnx.Module):
    def __init__(self, config, *, build):
        self.embed_tokens = build.embedding(29, WIDTH)
        self.layers = build.layers(config.plan, lambda layer_idx, build: HybridLayer(config, layer_idx, build=build))
        self.tail = build.list([Attention(config, build=build) for _ in range(config.tail)])

    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):
        cache = DecoderCall.begin(self, tokens, positions, segment_ids, cache, scan=scan, remat=remat)
        mask = create_sliding_window_causal_mask(cache, 6, self.embed_tokens.dtype)
        padding = create_recurrent_attention_mask(cache)
        x, count = self.embed_tokens(tokens) * 50, jnp.zeros((), jnp.int32)

        def layer(decoder_layer, cache, x, count):
            return decoder_layer(x, mask, padding, cache), count + cache.index

        for _ in range(self.config.runs):
            x, count = cache.run(self.layers, layer, x, count)
        for _ in range(2):
            for index, module in enumerate(self.tail):
                x = x + module(x, mask, cache.layer(f"tail.{index}"))
        if self.tail:
            x = cache.run(self.tail, lambda module, cache, x: x + module(x, mask, cache), x)
        report("count", count)
        return cache.outputs(self.embed_tokens.attend(x), return_aux=return_aux)

    def init_cache(self, batch, capacity):
        return empty_cache(self, batch, capacity)


LOOPED = {"layer_types": ("conv", "attention") * 2, "runs": 2, "tail": 1}
CASES = [pytest.param({}, marks=pytest.mark.slow, id="once"), pytest.param(LOOPED, id="looped, with a tail")]


@functools.cache
def made(dtype=jnp.float64, **fields):
    with jax.enable_x64(True):
        return create_model(HybridModel, HybridConfig(dtype=dtype, param_dtype=dtype, **fields), Sharding, rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


TOKENS = np.random.RandomState(0).randint(0, 29, (2, 14)).astype(np.int32)
PADDED = np.array([[0] * 5 + [1] * 9, [1] * 14], np.int32)


@pytest.mark.parametrize("fields", CASES)
def test_the_cache_equals_the_full_forward(fields):
    model = made(**fields)
    for segments in (np.ones_like(TOKENS), PADDED):
        full = forward(model, TOKENS, segment_ids=segments)
        for pieces in ([6] + [1] * 8, [6, 6, 1, 1]):
            cached = cached_logits(model, TOKENS, pieces, segment_ids=segments, capacity=17)
            assert relative_error(cached, full, segments) <= 1e-12
    alone = forward(model, TOKENS[:1, 5:])
    assert relative_error(forward(model, TOKENS, segment_ids=PADDED)[:1, 5:], alone) <= 1e-12
    assert relative_error(forward(model, TOKENS)[:1, 5:], alone) > 1e-3, "control: padding that is not masked"


def test_every_layer_keeps_its_own_kind_of_state():
    model = made()
    assert model.config.plan.describe() == "2 x (conv, attention), 1 x conv"
    cache = model.init_cache(3, 20)
    shapes = jax.tree.map(lambda leaf: leaf.shape, cache.layers)
    conv = {"conv_0": (2, 3, WIDTH, KERNEL), "recurrent_0": (2, 3, WIDTH)}
    attention = {"key": (2, 3, HEADS, 20, WIDTH // HEADS), "value": (2, 3, HEADS, 20, WIDTH // HEADS)}
    assert shapes == [[conv, attention], [{name: (1, *shape[1:]) for name, shape in conv.items()}]]
    looped = made(runs=2, tail=2).init_cache(3, 20).layers
    assert set(looped[0][1]) == {"key", "value", "run1.key", "run1.value"}
    assert {name: set(state) for name, state in looped[-1].items()} == {
        "tail.0": {"key", "value", "key#1", "value#1"},
        "tail.1": {"key", "value", "key#1", "value#1"},
        "run2.0": {"key", "value"},
        "run2.1": {"key", "value"},
    }


def test_states_are_in_the_dtype_that_was_given():
    cache = made(jnp.bfloat16).init_cache(1, 4)
    assert {name: str(leaf.dtype) for name, leaf in cache.layers[0][0].items()} == {"conv_0": "bfloat16", "recurrent_0": "float32"}


@pytest.mark.parametrize("fields", CASES)
def test_scan_loop_remat_and_greedy_agree(fields):
    model = made(**fields)
    graphdef, state = nnx.split(model)
    run = lambda **options: jax.jit(lambda state: nnx.merge(graphdef, state)(jnp.asarray(TOKENS), return_aux=True, **options))(state)
    want, aux = run()
    count, runs = len(model.config.layer_types), model.config.runs
    for options in ({"scan": False}, {"scan": False, "remat": "attention"}):
        got, other = run(**options)
        assert relative_error(np.asarray(got), np.asarray(want)) <= 1e-12
        assert set(other) == set(aux) and all(np.allclose(other[name], aux[name], rtol=1e-12) for name in aux)
    assert aux["norm"].shape == (count * runs,) and aux["attended"].shape == (2 * runs,) and aux["count"] == sum(range(count)) * runs
    greedy = GreedyDecoder(model)(TOKENS[:, :5], 5)
    assert np.array_equal(greedy, GreedyDecoder(model, unroll=True)(TOKENS[:, :5], 5))
    for length in range(5, 10):
        assert np.array_equal(forward(model, greedy[:, :length])[:, -1].argmax(-1), greedy[:, length])


def test_layers_of_a_plain_list_are_computed_anew_too():
    """The tail is one layer more that the program computes anew."""
    anew = {}
    for tail in (0, 1):
        graphdef, state = nnx.split(made(**LOOPED | {"tail": tail}))
        for policy in (None, "full"):
            program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(jnp.asarray(TOKENS), remat=policy))(state)
            anew[tail, policy] = str(program).count("remat")
    assert anew[0, None] == anew[1, None] == 0 and anew[1, "full"] == anew[0, "full"] + 1


@pytest.mark.slow
def test_gradients_pass_through_remat():
    graphdef, state = nnx.split(made())
    loss = lambda state, remat: jnp.sum(jnp.sin(nnx.merge(graphdef, state)(jnp.asarray(TOKENS), remat=remat)))
    plain, remat = (jax.jit(jax.grad(functools.partial(loss, remat=policy)))(state) for policy in (None, "full"))
    assert all(relative_error(np.asarray(a), np.asarray(b)) <= 1e-12 for a, b in zip(jax.tree.leaves(remat), jax.tree.leaves(plain)))


@pytest.mark.parametrize("scan", [True, False])
def test_a_step_that_changes_the_carry_is_refused(scan):
    model = made(fault="dtype")
    with pytest.raises(ValueError, match=r"kind 'conv'.*float64\[2, 14, 16\].*returned.*bfloat16\[2, 14, 16\].*keeps its shape and dtype"):
        model(jnp.asarray(TOKENS), scan=scan)


def test_reports_outside_a_call_go_nowhere():
    assert report("nothing", 3) == 3
