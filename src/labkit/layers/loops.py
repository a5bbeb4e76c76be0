"""Loops over time and over chunks as scans: a program whose size does not grow with the length."""

import jax
import jax.numpy as jnp


def scan_range(step, steps: range, *carry):
    """`for i in steps: carry = step(i, *carry)` as one scan.

    step(i, *carry) -> (carry, outs), both tuples; i is an int32 scalar array. Returns (carry, outs), outs with the iterations as their leading axis. A value
    that the first iteration widens is widened before it, as the reference's own first iteration does.
    """
    index = jnp.arange(steps.start, steps.stop, steps.step, dtype=jnp.int32)
    carry = tuple(map(jnp.asarray, carry))
    for _ in range(3):
        after = jax.eval_shape(lambda carry: step(index[0], *carry)[0], carry)
        if all(a.dtype == b.dtype for a, b in zip(after, carry)):
            break
        carry = tuple(a.astype(jnp.promote_types(a.dtype, b.dtype)) for a, b in zip(carry, after))
    return jax.lax.scan(lambda carry, i: step(i, *carry), carry, index)


def prefix(x, stop, axis: int = -1):
    """`x[..., :stop]` for a traced `stop`, with its full length: zeros from `stop` on."""
    return jnp.where(_before(x, stop, axis), x, jnp.zeros((), x.dtype))


def with_prefix(x, start_values, stop):
    """`x` with its first `stop` entries of the last axis from `start_values`, for a traced `stop`."""
    return jnp.where(_before(x, stop, -1), start_values, x)


def rows_joined(outs, axis: int):
    """Pieces [pieces, ...] put one behind the other along an axis of a piece (`torch.cat` of a list)."""
    axis %= outs.ndim - 1
    moved = jnp.moveaxis(outs, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def _before(x, stop, axis):
    axis %= x.ndim
    return jnp.arange(x.shape[axis], dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1 - axis)) < stop
