"""The layer plan: fewest stacked modules, remainders last, Hugging Face's indices kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.layers.plan import LayerPlan


def shape(kinds):
    return [(segment.cycle, segment.repeats, segment.start) for segment in LayerPlan.from_kinds(kinds).segments]


def test_homogeneous_layers_are_one_stack():
    plan = LayerPlan.from_kinds("aaaaa")
    assert shape("aaaaa") == [(("a",), 5, 0)]
    assert plan.homogeneous and plan.parameter_path(0, 0) == "layers" and plan.representative() == 1


def test_alternation_is_one_cycle_and_the_rest_a_segment_of_its_own():
    assert shape("ababab") == [(("a", "b"), 3, 0)]
    assert shape("abababa") == [(("a", "b"), 3, 0), (("a",), 1, 6)]


def test_repeating_block_with_remainder():
    """Catalogue C11: eight layers, pattern of three, two left over."""
    plan = LayerPlan.from_kinds(["local", "local", "global"] * 2 + ["local", "local"])
    assert [(s.cycle, s.repeats) for s in plan.segments] == [(("local", "local", "global"), 2), (("local",), 2)]
    assert plan.locate(5) == (0, 2, 1) and plan.locate(7) == (1, 0, 1)
    assert plan.layers_at(0, 1) == [1, 4] and plan.parameter_path(1, 0) == "layers.1.0"


def test_dense_layers_before_mixtures():
    plan = LayerPlan.from_kinds(["dense"] * 3 + ["moe"] * 58)
    assert plan.describe() == "3 x dense, 58 x moe" and plan.representative() == 4


def test_variants_need_their_own_representative_layer_but_no_stack():
    plan = LayerPlan.from_kinds(["decoder"] * 4, variants=["window", "window", "full", "window"])
    assert plan.homogeneous and plan.representative() == 3


def test_a_layer_outside_the_plan_is_refused():
    with pytest.raises(IndexError, match="layer 3 is outside a plan of 3 layers"):
        LayerPlan.from_kinds("aab").locate(3)


@given(st.text("abc", min_size=1, max_size=24))
def test_every_layer_stands_in_exactly_one_place(kinds):
    plan = LayerPlan.from_kinds(kinds)
    assert "".join(plan.kinds) == kinds
    places = {(s, p): plan.layers_at(s, p) for s, p, _ in plan.positions()}
    assert sorted(layer for layers in places.values() for layer in layers) == list(range(len(kinds)))
    for layer in range(len(kinds)):
        segment, position, index = plan.locate(layer)
        assert places[segment, position][index] == layer
        assert plan.segments[segment].cycle[position] == kinds[layer]
    runs = 1 + sum(a != b for a, b in zip(kinds, kinds[1:]))
    assert len(plan.positions()) <= runs
