"""Measures: what they must see, and what they must never pass in silence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from labkit.errors import InputError
from labkit.parity.compare import kl_per_position, kl_summary, log_softmax, relative_error, top_2_gap, top_k_agreement

numbers = st.floats(-50, 50, width=32)
logits = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=numbers)


@settings(max_examples=40, deadline=None)
@given(arrays(np.float32, array_shapes(min_dims=1, max_dims=4), elements=numbers))
def test_an_array_equals_itself_and_nothing_not_finite(a):
    assert relative_error(a, a) == 0
    for bad in (np.nan, np.inf):
        spoilt = a.copy()
        spoilt.flat[-1] = bad
        assert relative_error(spoilt, a) == np.inf
        assert relative_error(a, spoilt) == np.inf
        assert relative_error(spoilt, spoilt) == np.inf


@settings(max_examples=40, deadline=None)
@given(arrays(np.float64, array_shapes(min_dims=1, max_dims=3), elements=st.floats(1, 9)), st.floats(1e-6, 1e3))
def test_scale_of_both_sides_does_not_matter(b, factor):
    a = b * (1 + 1e-3)
    assert relative_error(a * factor, b * factor) == pytest.approx(relative_error(a, b), rel=1e-6)
    assert relative_error(a, b) == pytest.approx(1e-3, rel=1e-6)


def test_silent_passes_are_closed():
    zero = np.zeros((2, 3))
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1e-300, zero) == np.inf
    with pytest.raises(InputError, match="shapes differ"):
        relative_error(np.ones((2, 3)), np.ones((1, 3)))
    with pytest.raises(InputError, match="nothing to compare"):
        relative_error(zero, zero, np.zeros(2, bool))
    with pytest.raises(InputError, match="does not fit"):
        relative_error(zero, zero, np.ones(3, bool))


def test_padding_is_left_out_and_only_padding():
    a, b = np.ones((1, 4, 2)), np.ones((1, 4, 2))
    a[0, 0] = np.nan
    assert relative_error(a, b, [[0, 1, 1, 1]]) == 0
    assert relative_error(a, b, [[1, 1, 1, 0]]) == np.inf


@settings(max_examples=60, deadline=None)
@given(logits, st.floats(-100, 100))
def test_kl_ignores_a_constant_and_is_never_negative(reference, shift):
    kl = kl_per_position(reference + shift, reference)
    assert (kl >= 0).all() and kl.max() < 1e-9
    other = np.roll(reference, 1, -1)
    assert (kl_per_position(other, reference) >= 0).all()
    assert np.allclose(np.exp(log_softmax(reference)).sum(-1), 1)


def test_kl_sees_what_the_first_choice_does_not():
    reference = np.array([[1.0, 2.0, 4.0]])
    assert top_k_agreement(8 * reference, reference, 1) == 1
    assert kl_per_position(8 * reference, reference)[0] > 0.1
    assert kl_per_position(np.array([[1.0, np.nan, 4.0]]), reference)[0] == np.inf
    assert kl_per_position(np.array([[1.0, -np.inf, 4.0]]), reference)[0] == np.inf
    with pytest.raises(InputError, match="different shapes"):
        kl_per_position(reference, reference[:, :2])


def test_kl_against_a_hand_computed_value():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    assert kl_per_position(np.log(q), np.log(p)) == pytest.approx((p * np.log(p / q)).sum(), abs=1e-15)


@settings(max_examples=40, deadline=None)
@given(logits)
def test_top_k(values):
    assert top_k_agreement(values, values, 1) == 1 and top_k_agreement(values, values, values.shape[-1]) == 1
    assert (top_2_gap(values) >= 0).all()
    assert top_k_agreement(np.full_like(values, np.nan), values, 1) == 0


def test_summary_counts_positions_without_padding():
    reference = np.random.default_rng(0).normal(size=(2, 5, 7))
    summary = kl_summary(reference, reference, np.array([[0, 0, 1, 1, 1], [1] * 5]))
    assert summary.positions == 8 and summary.max == 0 and summary.top_1 == summary.top_5 == 1
    assert top_k_agreement(-reference, reference, 1) < 1


def test_imaginary_parts_count():
    rotation = np.exp(1j * np.linspace(0, 3, 12)).reshape(3, 4)
    assert relative_error(rotation, rotation) == 0
    assert relative_error(rotation.conj(), rotation) > 1
