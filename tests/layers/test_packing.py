"""Packed rows in a decoder with a state: each segment comes out as if it stood alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from labkit.layers.packing import _segments, apart_when_packed

TOKENS = np.random.default_rng(0).integers(1, 9, (2, 10)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2], [0, 0, 4, 4, 1, 1, 1, 3, 0, 0]], np.int32)
PARTS = [(0, 0, 4), (0, 4, 10), (1, 2, 4), (1, 4, 7), (1, 7, 8)]


class Leaky:
    """Logits are running sums of what is not padding: a state that no mask keeps from the next segment."""

    scale = 1.5

    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):
        real = jnp.ones(tokens.shape) if segment_ids is None else (segment_ids != 0).astype(jnp.float32)
        places = jnp.cumsum(real, 1) if positions is None else positions.astype(jnp.float32)
        state = jnp.cumsum(self.scale * tokens * real, 1)
        logits = jnp.stack([state, state * places], -1)
        flat = (tokens * real).reshape(-1)[None, :, None]
        aux = {"per_token": flat, "mean": jnp.sum(tokens * real) / jnp.maximum(jnp.sum(real), 1)}
        return (logits, aux) if return_aux else logits


class Apart(Leaky):
    __call__ = apart_when_packed(Leaky.__call__)


def alone(row, start, stop, **more):
    return Leaky()(TOKENS[row : row + 1, start:stop], **more)[0]


def test_each_segment_is_alone():
    packed = jax.jit(lambda segments: Apart()(TOKENS, segment_ids=segments))(SEGMENTS)
    for row, start, stop in PARTS:
        np.testing.assert_allclose(packed[row, start:stop], alone(row, start, stop), rtol=1e-6)
    assert np.isfinite(packed).all()


def test_the_plain_call_leaks():
    leaks = Leaky()(TOKENS, segment_ids=SEGMENTS)
    assert not np.allclose(leaks[0, 4:10], alone(0, 4, 10))


def test_given_positions_travel_with_their_tokens():
    positions = np.tile(np.arange(10, dtype=np.int32) * 3, (2, 1))
    packed = Apart()(TOKENS, positions, SEGMENTS)
    np.testing.assert_allclose(packed[0, 4:10], alone(0, 4, 10, positions=jnp.asarray(positions[:1, 4:10])), rtol=1e-6)


def test_what_is_reported_comes_by_token_and_by_mean():
    _, aux = Apart()(TOKENS, segment_ids=SEGMENTS, return_aux=True)
    real = SEGMENTS != 0
    assert np.array_equal(aux["per_token"][0, :, 0], (TOKENS * real).reshape(-1))
    np.testing.assert_allclose(aux["mean"], TOKENS[real].mean(), rtol=1e-6)


@pytest.mark.parametrize("given", [{}, {"cache": object()}])
def test_calls_without_segments_or_with_a_cache_are_as_they_were(given):
    assert np.array_equal(Apart()(TOKENS, **given), Leaky()(TOKENS, **given))


def test_gradients_are_those_of_the_segments():
    def loss(scale):
        model = Apart()
        model.scale = scale
        return jnp.sum(jnp.sin(model(TOKENS, segment_ids=SEGMENTS)) * (SEGMENTS != 0)[..., None])

    def apart(scale):
        model = Leaky()
        model.scale = scale
        return sum(jnp.sum(jnp.sin(model(TOKENS[row : row + 1, start:stop]))) for row, start, stop in PARTS)

    np.testing.assert_allclose(jax.grad(loss)(1.5), jax.grad(apart)(1.5), rtol=1e-5)


def test_segments_are_numbered_by_their_order():
    index, starts = _segments(jnp.asarray(SEGMENTS))
    assert index[1].tolist() == [-1, -1, 0, 0, 1, 1, 1, 2, -1, -1]
    assert starts[1].tolist() == [0, 4, 7] + [0] * 7
