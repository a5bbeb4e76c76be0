"""What `Build` makes: dtypes, torch's modules against torch, constants; and plans read off layers."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from labkit.layers.building import Buffer, Build, Constant, value
from labkit.layers.modules import conv1d
from labkit.layers.planning import plan_layers
from labkit.layers.sharding import Sharding, construction, default_mesh


@pytest.fixture(autouse=True)
def one_device():
    with construction(default_mesh()):
        yield


def build(dtype=jnp.float64, param_dtype=None):
    return Build(nnx.Rngs(0), Sharding(), dtype, param_dtype or dtype)


def fill(module, reference):
    """The same random numbers in every parameter of both, by name."""
    random = np.random.RandomState(0)
    for name, tensor in reference.state_dict().items():
        numbers = random.randn(*tensor.shape)
        tensor.copy_(torch.from_numpy(numbers))
        getattr(module, name)[...] = jnp.asarray(numbers)


def test_values_come_in_the_dtype_that_is_computed_in():
    made = build(jnp.bfloat16, jnp.float32)
    plain, wide, buffer = made.param("normal", (3, 4)), made.param(2.5, (3,), wide=True), made.buffer((2,), init=3)
    assert (plain[...].dtype, value(plain).dtype) == (jnp.float32, jnp.bfloat16) and value(wide).dtype == wide[...].dtype == jnp.float32
    assert isinstance(buffer, Buffer) and not isinstance(buffer, nnx.Param) and value(buffer).dtype == jnp.bfloat16 and float(value(buffer)[0]) == 3
    assert value(made.buffer((2,), dtype=jnp.int32)).dtype == jnp.int32 and value(None) is None
    assert build(jnp.bfloat16).param(jnp.ones, (3,), wide=True)[...].dtype == jnp.float32
    kernel = made.linear(4, 6, bias=True).kernel
    assert kernel.shape == (4, 6) and value(kernel).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="init is a function"):
        made.param("uniform", (3,))


@pytest.mark.parametrize(
    "kernel, groups, options", [(4, 6, {"padding": 3}), (3, 6, {"dilation": 2, "stride": 2}), (9, 6, {"padding": 8}), (4, 2, {"padding": 1})]
)
def test_convolutions_equal_torch(kernel, groups, options):
    x = np.random.RandomState(1).randn(2, 6, 17)
    reference = torch.nn.Conv1d(6, 6, kernel, groups=groups, **options).double()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), torch.no_grad():
        module = build().conv1d(6, 6, kernel, groups=groups, **options)
        fill(module, reference)
        got, want = np.asarray(module(jnp.asarray(x))), reference(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
        flipped = conv1d(jnp.asarray(x), value(module.weight)[..., ::-1], value(module.bias), groups=groups, **options)
        assert np.abs(np.asarray(flipped) - want).max() > 1e-2, "control: a convolution in the other direction"
        assert build().conv1d(6, 6, (3,), bias=False, padding=(1,)).bias is None


@pytest.mark.parametrize(
    "make, reference",
    [
        (lambda b: b.layer_norm(12, eps=1e-4), lambda: torch.nn.LayerNorm(12, eps=1e-4)),
        (lambda b: b.layer_norm((3, 12), bias=False), lambda: torch.nn.LayerNorm((3, 12), bias=False)),
        (lambda b: b.layer_norm(12, elementwise_affine=False), lambda: torch.nn.LayerNorm(12, elementwise_affine=False)),
        (lambda b: b.rms_norm(12, eps=1e-3), lambda: torch.nn.RMSNorm(12, eps=1e-3)),
        (lambda b: b.rms_norm(12), lambda: torch.nn.RMSNorm(12)),
    ],
)
def test_norms_equal_torch(make, reference):
    x, reference = np.random.RandomState(1).randn(4, 3, 12) * 0.1, reference().double()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), torch.no_grad():
        module = make(build())
        fill(module, reference)
        np.testing.assert_allclose(module(jnp.asarray(x)), reference(torch.from_numpy(x)).numpy(), rtol=0, atol=1e-13)


def test_constants_are_static_and_compute_like_arrays():
    class Holder(nnx.Module):
        def __init__(self, numbers):
            self.table = Constant(numbers)

    numbers = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    graphdef, state = nnx.split(Holder(numbers))
    assert graphdef == nnx.graphdef(Holder(numbers)) and hash(graphdef) == hash(nnx.graphdef(Holder(numbers.copy())))
    assert graphdef != nnx.graphdef(Holder(numbers + 1)) and not jax.tree.leaves(state)

    @jax.jit
    def use(x):
        table = nnx.merge(graphdef, state).table
        return table[0] + x * table.astype(x.dtype) - (x @ table.T).sum() / 2 + jnp.sin(value(table)) + (1 - table) * -table

    want = numbers[0] + 2 * numbers - (np.full((1, 3), 2) @ numbers.T).sum() / 2 + np.sin(numbers) + (1 - numbers) * -numbers
    np.testing.assert_allclose(use(jnp.full((1, 3), 2.0)), want, rtol=1e-6)
    assert Constant(numbers).shape == (2, 3) and Constant(numbers).dtype == np.float32 and len(Constant(numbers)) == 2


@dataclasses.dataclass(frozen=True)
class Config:
    layer_types: tuple | None = None
    dtype: object = jnp.float32
    param_dtype: object = jnp.float32
    note: str = ""


class Layer(nnx.Module):
    def __init__(self, index, build, *, experts_from=None, types=(), keeps_index=False):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, build.linear(16, 16, bias=True, name=name))
        self.norm = build.param(jnp.ones, (16,), ("norm",), "norm")
        if types:
            self.layer_type = types[index]
        if keeps_index:
            self.layer_idx = index
        if experts_from is not None and index >= experts_from:
            self.experts = build.param("normal", (8, 16, 16), None, "experts")
            self.correction = build.buffer((8,), "correction")


def plan(count, config, labels=None, **options):
    return plan_layers(count, lambda index, build: Layer(index, build, **options), config, labels)


def test_plans_tell_layers_apart_by_what_they_are():
    types = ("sliding", "sliding", "full") * 2
    assert plan(6, Config(types)).describe() == "6 x layer", "nothing in these layers tells the types apart"
    assert plan(6, Config(types, note="typed"), types=types).kinds == types
    assert plan(6, Config(types, note="labels"), labels=types).kinds == types
    assert plan(4, Config(note="mixture"), experts_from=1).describe() == "1 x layer_0, 3 x layer_1"
    assert plan(6, Config(types, note="both"), types=types, experts_from=2).kinds == ("layer_0", "layer_0", "layer_2", "layer_3", "layer_3", "layer_2")
    assert len(plan(3, Config(note="index"), keeps_index=True).positions()) == 3


def test_a_hundred_layers_of_a_mixture_are_planned_in_time():
    start = time.process_time()
    assert plan(100, Config(note="hundred"), experts_from=3).describe() == "3 x layer_0, 97 x layer_3"
    assert time.process_time() - start < 3
