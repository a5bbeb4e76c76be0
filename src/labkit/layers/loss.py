"""Losses that every family shares."""

import jax
import jax.numpy as jnp

from labkit.layers.precision import widen


def cross_entropy(logits_btv, targets_bt, targets_segmentation=None):
    """Mean negative log-likelihood per counted token, in at least float32.

    logits [batch, length, vocab] predict targets int [batch, length] at the same index. targets_segmentation: int [batch, length], 0 is not counted; it masks
    this loss and nothing else.
    """
    log_probabilities = jax.nn.log_softmax(widen(logits_btv), -1)
    picked = jnp.take_along_axis(log_probabilities, targets_bt[..., None], -1)[..., 0]
    counted = jnp.ones_like(picked) if targets_segmentation is None else (targets_segmentation != 0).astype(picked.dtype)
    return -jnp.sum(picked * counted) / jnp.maximum(jnp.sum(counted), jnp.ones((), picked.dtype))


def load_balancing_loss(tokens_per_expert, router_probability):
    """Switch Transformer's auxiliary loss over all mixture layers (arXiv 2101.03961, equations 4 to 6; `load_balancing_loss_func` of transformers).

    tokens_per_expert: [layers, experts], choices per token that fell on each expert. router_probability: [layers, experts], mean router probability.
    """
    num_experts = tokens_per_expert.shape[-1]
    return num_experts * jnp.sum(jnp.mean(tokens_per_expert, 0) * jnp.mean(router_probability, 0))
