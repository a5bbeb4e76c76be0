"""Logical axes: what maps, what falls back, what is refused."""

import pytest
from jax.sharding import PartitionSpec as P

from labkit.layers.sharding import Sharding, TensorType

SIZES = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 1}


def test_odd_vocabulary_stays_replicated_on_vocab_and_sharded_on_embed():
    assert Sharding(SIZES, vocab_size=49155).weight("embed_tokens.embedding", ("vocab", "embed")) == P(None, ("fsdp", "expert"))
    assert Sharding(SIZES, vocab_size=49152).weight("embed_tokens.embedding", ("vocab", "embed")) == P("tensor", ("fsdp", "expert"))


def test_fewer_heads_than_the_tensor_axis_are_replicated():
    sharding = Sharding({**SIZES, "tensor": 4}, num_heads=8, num_kv_heads=2)
    assert sharding.weight("k_proj", ("embed", "kv_heads")) == P(("fsdp", "expert"), None)
    assert sharding.weight("q_proj", ("embed", "heads")) == P(("fsdp", "expert"), "tensor")


def test_experts_take_both_axes_when_they_divide():
    axes = ("experts", "embed_exp", None, "mlp")
    assert Sharding({**SIZES, "expert": 2}, num_experts=8).weight("gate_up_proj", axes) == P(("fsdp", "expert"), None, None, "tensor")
    assert Sharding({**SIZES, "expert": 2}, num_experts=6).weight("gate_up_proj", axes) == P("expert", "fsdp", None, "tensor")


def test_unknown_axis_is_refused_with_tensor_and_axis():
    with pytest.raises(KeyError, match="unknown logical axis 'hedas' on 'q_proj'"):
        Sharding(SIZES).weight("q_proj", ("embed", "hedas"))


def test_experts_that_no_axis_divides_are_cut_along_their_hidden_axis():
    sharding = Sharding({**SIZES, "expert": 4}, num_experts=6)
    assert sharding.weight("gate_up_proj", ("experts", "embed_exp", None, "mlp"), (6, 16, 2, 8)) == P(None, ("fsdp", "expert"), None, "tensor")


def test_a_dimension_that_does_not_divide_is_refused_with_tensor_axis_and_sizes():
    with pytest.raises(ValueError, match="'mlp.up_proj.kernel' has 90 of 'mlp', which does not divide over tensor=4"):
        Sharding({**SIZES, "tensor": 4}).weight("mlp.up_proj.kernel", ("embed", "mlp"), (72, 90))
    with pytest.raises(ValueError, match="'embed_tokens.embedding' has 9 of 'embed', which does not divide over fsdp=2 x expert=2"):
        Sharding({**SIZES, "expert": 2}, vocab_size=49155).weight("embed_tokens.embedding", ("vocab", "embed"), (49155, 9))
    assert Sharding(SIZES).weight("mlp.up_proj.kernel", ("embed", "mlp"), (72, 90)) == P(("fsdp", "expert"), "tensor")


def test_one_mesh_axis_twice_is_refused():
    with pytest.raises(ValueError, match="'router' with axes .* claims mesh axis tensor twice"):
        Sharding(SIZES, num_heads=4).spec("router", ("heads", "mlp"), TensorType.WEIGHT)


def test_equal_shardings_are_equal_and_hash_alike():
    a, b, c = Sharding(SIZES, vocab_size=8), Sharding(SIZES, vocab_size=8), Sharding(SIZES, vocab_size=9)
    assert a == b and hash(a) == hash(b) and a != c


@pytest.mark.parametrize(
    "axes, shape, spec",
    [
        (("embed", "heads"), (72, 60), P(("fsdp", "expert"), "tensor")),
        (("vocab", "embed"), (131, 72), P(None, ("fsdp", "expert"))),
        (("embed", "mlp"), (73, 60), P(None, "tensor")),
        (("embed", "heads"), (73, 61), P(None, None)),
        (("norm", "norm"), (40, 40), P(("fsdp", "expert", "tensor"), None)),
        (("norm", "norm"), (4, 4), P(None, None)),
        (("mlp", "mlp"), (40, 40), P("tensor", None)),
        (None, (8, 100, 30), P(None, ("fsdp", "expert"), "tensor")),
        (None, (300,), P(None)),
        (None, (17, 3, 6), P(None, None, "tensor")),
    ],
)
def test_a_weight_takes_the_axes_that_divide_it(axes, shape, spec):
    assert Sharding(SIZES).fitted("weight", axes, shape) == spec


def test_fewer_axes_where_not_all_divide():
    sharding = Sharding({**SIZES, "fsdp": 4, "expert": 2})
    assert sharding.fitted("weight", ("embed", None), (12, 9)) == P("fsdp", None)
    assert sharding.fitted("weight", ("embed", None), (6, 9)) == P("expert", None)
    assert sharding.weight("weight", ("embed", None)) == P(("fsdp", "expert"), None), "control: without a shape all are claimed"
