"""The rule vocabulary: every step undoes itself on every dtype, and a table refuses what it cannot mean."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.models.mapping import (
    Concat,
    Deinterleave,
    Each,
    Ignored,
    Interleave,
    Layout,
    MergeAxis,
    Reorder,
    Reverse,
    Rule,
    RuleTable,
    Split,
    SplitAxis,
    Stack,
    Tied,
    Transpose,
    Unpad,
    Unstack,
)
from labkit.models.name_patterns import fields_of, fill, pattern_regex

DTYPES = [np.float32, np.float16, np.int64, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def filled(shape, dtype, seed=0):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def equal_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@st.composite
def step_and_shapes(draw):
    """A step and shapes that it takes."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["transpose", "split_axis", "merge_axis", "reverse", "stack", "unstack", "concat", "split", "interleave", "reorder", "each"]))
    if kind == "transpose":
        return Transpose(*draw(st.permutations(range(len(shape))))), [shape] * count
    if kind == "split_axis":
        n = draw(st.integers(1, 3))
        return SplitAxis(axis, n), [(*shape[:axis], shape[axis] * n, *shape[axis + 1 :])] * count
    if kind == "merge_axis":
        return MergeAxis(min(axis, len(shape) - 2), draw(st.sampled_from([None, shape[min(axis, len(shape) - 2)]]))), [shape] * count
    if kind == "reverse":
        return Reverse(axis), [shape] * count
    if kind == "stack":
        return Stack(draw(st.integers(0, len(shape)))), [shape] * count
    if kind == "unstack":
        return Unstack(axis), [shape]
    if kind == "interleave":
        n = draw(st.integers(1, 3))
        return draw(st.sampled_from([Interleave, Deinterleave]))(axis, n), [(*shape[:axis], shape[axis] * n, *shape[axis + 1 :])] * count
    if kind == "reorder":
        return Reorder(axis, tuple(draw(st.permutations(range(shape[axis]))))), [shape] * count
    if kind == "each":
        reversal = tuple(reversed(range(len(shape))))
        return Each(*[(Transpose(*reversal), Reverse(axis)), (), (SplitAxis(axis, 1), MergeAxis(axis, 1))][:count]), [shape] * count
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    if kind == "concat":
        return Concat(axis, draw(st.sampled_from([None, sizes]))), [(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes]
    return Split(axis, sizes), [(*shape[:axis], sum(sizes), *shape[axis + 1 :])]


@settings(max_examples=300, deadline=None)
@given(step_and_shapes(), st.sampled_from(DTYPES))
def test_inverse_undoes_every_step_bit_for_bit(case, dtype):
    step, shapes = case
    arrays = [filled(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    out = step.forward(arrays)
    assert [a.shape for a in out] == step.shapes(shapes)
    back = step.inverse(shapes).forward(out)
    assert all(map(equal_bits, back, arrays)) and len(back) == len(arrays)
    if not (isinstance(step, MergeAxis) and step.n is None) and not (isinstance(step, Concat) and step.sizes is None):
        assert step.backward_shapes(step.shapes(shapes)) == list(shapes)


def test_control_a_wrong_inverse_is_not_the_identity():
    array = filled((3, 4, 5), np.float32)
    out = Transpose(1, 2, 0).forward([array])
    assert not equal_bits(Transpose(1, 2, 0).forward(out)[0], array)
    assert equal_bits(Transpose(1, 2, 0).inverse([array.shape]).forward(out)[0], array)


PUBLISHED = Layout(("l.{layer}.e.{expert}.gate", "l.{layer}.e.{expert}.up"), Transpose(0, 2, 1), Stack(2))
FUSED = Layout("l.{layer}.gate_up", SplitAxis(1, 2), Transpose(0, 3, 1, 2))


def test_published_and_fused_experts_give_one_parameter_and_return():
    gate, up = filled((3, 4, 5), ml_dtypes.bfloat16), filled((3, 4, 5), ml_dtypes.bfloat16, 1)
    both = np.concatenate([gate, up], 1)
    (one,), (other,) = PUBLISHED.forward([gate, up]), FUSED.forward([both])
    assert equal_bits(one, other) and one.shape == (3, 5, 2, 4)
    assert all(map(equal_bits, PUBLISHED.backward([one], [gate.shape, up.shape]), [gate, up]))
    assert equal_bits(FUSED.backward([one], [both.shape])[0], both)
    assert PUBLISHED.backward_shapes([one.shape]) == [gate.shape, up.shape] and FUSED.backward_shapes([one.shape]) == [both.shape]


def test_control_fused_experts_cut_the_wrong_way_differ():
    gate, up = filled((3, 4, 5), np.float32), filled((3, 4, 5), np.float32, 1)
    interleaved = Layout("l.{layer}.gate_up", SplitAxis(1, 4), Transpose(0, 3, 2, 1))
    (one,), (other,) = PUBLISHED.forward([gate, up]), interleaved.forward([np.concatenate([gate, up], 1)])
    assert one.shape == other.shape and not equal_bits(one, other)


def test_one_tensor_to_several_targets():
    layout = Layout("l.{layer}.qkv", Split(0, (8, 4, 4)), Transpose(1, 0))
    rule = Rule(("layers.q.kernel", "layers.k.kernel", "layers.v.kernel"), layout)
    qkv = filled((16, 6), np.float16)
    parts = layout.forward([qkv])
    assert [p.shape for p in parts] == [(6, 8), (6, 4), (6, 4)] and len(rule.targets) == 3
    assert equal_bits(layout.backward(parts, [qkv.shape])[0], qkv)


@pytest.mark.parametrize(
    "step, shapes",
    [
        (Transpose(1, 0), [(2, 3, 4)]),
        (SplitAxis(0, 2), [(3, 4)]),
        (SplitAxis(2, 1), [(3, 4)]),
        (MergeAxis(1), [(3, 4)]),
        (MergeAxis(0, 2), [(3, 4)]),
        (Stack(0), [(3, 4), (4, 3)]),
        (Concat(0, (1, 2)), [(1, 4), (1, 4)]),
        (Split(0, (1, 2)), [(4, 4)]),
        (Unstack(0), [(3,), (3,)]),
        (Reverse(2), [(3, 4)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_shape_and_by_value(step, shapes):
    with pytest.raises(ValueError, match=type(step).__name__):
        step.shapes(shapes)
    with pytest.raises(ValueError):
        step.forward([np.zeros(s) for s in shapes])


def test_merge_without_its_size_says_what_it_needs():
    with pytest.raises(ValueError, match="give n"):
        MergeAxis(0).backward_shapes([(6, 2)])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Transpose(0, 0), "permutation"),
        (lambda: Layout("a.{head}"), "layer"),
        (lambda: Rule("layers.a", Layout("a")), "exactly when"),
        (lambda: Rule("a", Layout("a.{layer}")), "exactly when"),
        (lambda: Rule("a", Layout("a"), kinds="moe"), "kinds"),
        (lambda: Rule("a"), "needs"),
        (lambda: RuleTable(Rule("a", "x"), Rule("a", "y")), "two rules name a"),
        (lambda: RuleTable(Rule("a", "x"), Rule("b", "x")), "two rules name x"),
        (lambda: RuleTable(Rule("a", "x"), Tied("x", to="y")), "twice"),
        (lambda: RuleTable(Rule("layers.a", "{layer}.x", kinds="p"), Rule("layers.a", "{layer}.y", kinds=("p", "q"))), "two rules"),
    ],
)
def test_tables_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rules_of_different_kinds_may_share_a_target():
    table = RuleTable(
        [Rule("layers.a", "{layer}.x", kinds="p"), Rule("layers.a", "{layer}.y", kinds="q")], Ignored("{layer}.z", reason="a buffer"), Tied("head", to="x")
    )
    assert len(table) == 4 and len(table.rules) == 2 and len(table.without("layers.a").rules) == 0


def test_sizes_of_a_split_come_from_the_targets():
    layout = Layout("fused", Transpose(1, 0), Split(0), Each((Transpose(1, 0),), ()))
    sized = layout.sized([(3, 2), (5, 3)])
    assert sized.steps[1] == Split(0, (2, 5)) and sized.sources == layout.sources
    whole = filled((3, 7), np.float32)
    one, two = sized.forward([whole])
    assert one.shape == (3, 2) and two.shape == (5, 3) and equal_bits(sized.backward([one, two], [(3, 7)])[0], whole)
    with pytest.raises(ValueError, match="meets shapes"):
        layout.forward([whole])
    assert Layout("plain", Transpose(1, 0)).sized([(1, 2)]) == Layout("plain", Transpose(1, 0))


def test_padding_is_dropped_and_comes_back_as_zeros():
    layout = Layout("x", Unpad(0), Transpose(1, 0))
    sized = Layout("x", Transpose(1, 0), Unpad(0)).sized([(3, 2)])
    assert sized.steps[1] == Unpad(0, 3)
    padded = np.concatenate([filled((3, 2), np.float32), np.zeros((2, 2), np.float32)])
    (made,) = layout.sized([(2, 3)]).forward([padded])
    assert made.shape == (2, 3) and equal_bits(layout.sized([(2, 3)]).backward([made], [(5, 2)])[0], padded)
    for shape in ((2, 2), (3,)):
        with pytest.raises(ValueError, match="meets shape"):
            Unpad(len(shape) - 1, 4).forward([np.zeros(shape)])
    with pytest.raises(ValueError, match="does not tell"):
        Unpad(0, 3).backward_shapes([(3, 2)])


def test_entries_in_a_new_order():
    assert Reorder(0, (2, 0, 1)).forward([np.arange(3)])[0].tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="meets shape"):
        Reorder(0, (1, 0)).forward([np.arange(3)])


def test_interleaved_pairs_become_halves():
    assert Deinterleave(0).forward([np.arange(6)])[0].tolist() == [0, 2, 4, 1, 3, 5]
    assert Interleave(0).forward([np.arange(6)])[0].tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(ValueError, match="meets shape"):
        Deinterleave(0).forward([np.arange(5)])


def test_patterns_shift_layers_and_refuse_other_placeholders():
    assert fill("a.{layer}.b.{layer-1}.c.{layer*2+1}.{i}", {"layer": 5, "i": 0}) == "a.5.b.4.c.11.0" and fill("a.{expert}", {"layer": 1}) == "a.{expert}"
    assert fields_of("a.{layer*2}.{expert}") == ("layer", "expert")
    assert pattern_regex("a.{layer*2}.x", layer=3).fullmatch("a.6.x") and not pattern_regex("a.{layer*2}.x", layer=3).fullmatch("a.3.x")
    for wrong in ("a.{head}", "a.{}", "a.{layer", "a.{layer/2}"):
        with pytest.raises(ValueError, match="may stand in a name pattern"):
            fields_of(wrong)


def test_placeholders_of_a_target_stand_in_every_source():
    Rule("H.{i}.w", "model.H.{i}.w")
    for target, source in (("H.{i}.w", "model.H.w"), ("H.w", "model.H.{i}.w"), ("layers.{i}.w", "model.{layer}.w"), ("H.{layer}.w", "model.H.{layer}.w")):
        with pytest.raises(ValueError, match="must stand|may stand"):
            Rule(target, source)
