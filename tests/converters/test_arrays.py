import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.converters.arrays import cast, common, contiguous, copy_into, difference, exact, first_non_finite, same_bits

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms(use_true_random=False), st.sampled_from([np.float32, BF16, F8, np.complex128, np.bool_]))
def test_tiled_copy_is_numpys(shape, random, dtype):
    shape[-1] *= 37
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    axes = list(range(len(shape)))
    random.shuffle(axes)
    view = array.transpose(axes)
    assert same_bits(contiguous(view), np.ascontiguousarray(view)) and contiguous(view).flags.c_contiguous


def test_tiled_copy_crosses_tiles_strides_and_refuses_other_shapes():
    array = np.arange(300 * 270, dtype=np.uint16).reshape(300, 270).view(BF16)
    for view in (array.T, array[::-1].T, array[:, ::3].T, array.reshape(300, 27, 10).transpose(2, 0, 1)):
        out = np.zeros(view.shape, BF16)
        copy_into(out, view)
        assert np.array_equal(out.view(np.uint16), np.ascontiguousarray(view.view(np.uint16)))
    with pytest.raises(ValueError, match="copy"):
        copy_into(np.zeros((2, 2), BF16), array[:2, :3])
    with pytest.raises(ValueError, match="copy"):
        copy_into(np.zeros((2, 2), np.float16), array[:2, :2])


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64, F8, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_non_finite_names_the_first(dtype, bad):
    array = np.zeros((600, 300), dtype)
    array[...] = ml_dtypes.finfo(dtype).max
    assert first_non_finite(array) is None and first_non_finite(-array) is None
    array[500, 7] = array[501, 3] = np.array(bad, dtype)
    assert first_non_finite(array) == (500, 7)
    assert first_non_finite(array.T) == (3, 501)
    assert first_non_finite(array[500, 7].reshape(())) == ()


def test_integers_and_empty_arrays_are_finite():
    assert first_non_finite(np.arange(5)) is None and first_non_finite(np.zeros((0, 3), BF16)) is None


def test_exact_and_common_dtypes():
    assert exact(BF16, np.float32) and exact(np.float16, np.float32) and exact(F8, BF16) and exact(np.int8, np.int32)
    assert not exact(np.float32, BF16) and not exact(BF16, np.float16) and not exact(np.float16, BF16) and not exact(np.int64, np.float32)
    assert common([BF16, np.float16]) == np.float32 and common([F8, BF16]) == BF16 and common([np.float64, BF16]) == np.float64
    with pytest.raises(ValueError, match="no dtype"):
        common([np.int64, np.float32])


@pytest.mark.parametrize("new", [np.float32, np.float64, np.float16])
def test_cast_is_numpys(new):
    every = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    every = every[np.isfinite(every.astype(np.float32))]
    with np.errstate(over="ignore"):
        assert same_bits(cast(every, new), every.astype(np.float32).astype(new))
    assert cast(every, BF16) is every


def test_difference_counts_and_measures():
    a = np.zeros((3, 4), BF16)
    b = a.copy()
    b[1, 2] = 2
    assert same_bits(a, a.copy()) and not same_bits(a, b) and not same_bits(a, -a)
    assert difference(a, b) == "1 of 12 values differ, by up to 2"
    assert "float32" in difference(a, a.astype(np.float32))
