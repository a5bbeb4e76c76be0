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


def router_loss(router_logits, top_k: int):
    """`load_balancing_loss` from router logits [..., tokens, experts] of all layers, each token choosing its `top_k` most probable experts."""
    num_experts = router_logits.shape[-1]
    probability = jax.nn.softmax(widen(router_logits.reshape(-1, router_logits.shape[-2], num_experts)), -1)
    chosen = jax.nn.one_hot(jax.lax.top_k(probability, top_k)[1], num_experts, dtype=probability.dtype).sum(-2)
    return load_balancing_loss(chosen.mean(1), probability.mean(1))


def causal_lm_loss(model, batch):
    """(loss, aux) of a dense decoder: the cross-entropy alone.

    batch: inputs, targets int [batch, length]; optional inputs_position, inputs_segmentation, targets_segmentation of the same shape.
    """
    logits = model(batch["inputs"], batch.get("inputs_position"), batch.get("inputs_segmentation"))
    return cross_entropy(logits, batch["targets"], batch.get("targets_segmentation")), {}


def mixture_lm_loss(model, batch, *, coefficient: float | None = None, top_k: int | None = None):
    """(loss, aux): the cross-entropy plus the router's load-balancing loss times `coefficient` (None: `config.router_aux_loss_coef`).

    The model's aux holds it as `moe_lb_loss`, or the `router_logits` that make it with `top_k`; a model whose layers are all dense holds neither. batch: as for
    `causal_lm_loss`; targets_segmentation masks the cross-entropy alone.
    """
    logits, aux = model(batch["inputs"], batch.get("inputs_position"), batch.get("inputs_segmentation"), return_aux=True)
    loss = cross_entropy(logits, batch["targets"], batch.get("targets_segmentation"))
    if "moe_lb_loss" not in aux and "router_logits" in aux:
        aux = aux | {"moe_lb_loss": router_loss(aux["router_logits"], top_k)}
    if "moe_lb_loss" in aux:
        loss = loss + (model.config.router_aux_loss_coef if coefficient is None else coefficient) * aux["moe_lb_loss"]
    return loss, aux
