"""Losses that every family shares."""

import jax
import jax.numpy as jnp

from labkit.layers.precision import widen


def cross_entropy(logits_btv, targets_bt, targets_segmentation=None):
    """Mean negative log-likelihood per counted token, in at least float32.

    logits [batch, length, vocab] predict targets int [batch, length] at the same index. targets_segmentation: int [batch, length], 0 is not counted; it masks
    this loss and nothing else.
    """
    surprise = negative_log_likelihood(logits_btv, targets_bt)
    counted = jnp.ones_like(surprise) if targets_segmentation is None else (targets_segmentation != 0).astype(surprise.dtype)
    return jnp.sum(surprise * counted) / jnp.maximum(jnp.sum(counted), jnp.ones((), surprise.dtype))


@jax.custom_vjp
def negative_log_likelihood(logits, targets):
    """-log softmax(logits) at the targets, in at least float32. logits [..., vocab], targets int [...] -> [...].

    Its gradient is written out, so that of all arrays of the logits' size only the logits and their gradient ever lie in memory.
    """
    return _nll_forward(logits, targets)[0]


def _nll_forward(logits, targets):
    total = jax.nn.logsumexp(widen(logits), -1)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return total - widen(picked), (logits, targets, total)


def _nll_backward(kept, gradient):
    logits, targets, total = kept
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    probabilities = jnp.exp(widen(logits) - total[..., None])
    return ((probabilities - is_target.astype(probabilities.dtype)) * gradient[..., None]).astype(logits.dtype), None


negative_log_likelihood.defvjp(_nll_forward, _nll_backward)


def load_balancing_loss(tokens_per_expert, router_probability):
    """Switch Transformer's auxiliary loss over all mixture layers (arXiv 2101.03961, equations 4 to 6; `load_balancing_loss_func` of transformers).

    tokens_per_expert: [layers, experts], choices per token that fell on each expert. router_probability: [layers, experts], mean router probability.
    """
    num_experts = tokens_per_expert.shape[-1]
    return num_experts * jnp.sum(jnp.mean(tokens_per_expert, 0) * jnp.mean(router_probability, 0))


def router_loss(router_logits, top_k: int, counted=None):
    """`load_balancing_loss` from router logits [..., tokens, experts] of all layers, each token choosing its `top_k` most probable experts.

    counted: tokens that are not padding, bool or int of any shape with as many elements as there are tokens in one layer; all when None.
    """
    num_experts = router_logits.shape[-1]
    tokens = router_logits.shape[-2] if counted is None else counted.size
    probability = jax.nn.softmax(widen(router_logits.reshape(-1, tokens, num_experts)), -1)
    chosen = jax.nn.one_hot(jax.lax.top_k(probability, top_k)[1], num_experts, dtype=probability.dtype).sum(-2)
    if counted is None:
        return load_balancing_loss(chosen.mean(1), probability.mean(1))
    weight = (counted.reshape(-1, 1) != 0).astype(probability.dtype)
    total = jnp.maximum(jnp.sum(weight), jnp.ones((), weight.dtype))
    return load_balancing_loss((chosen * weight).sum(1) / total, (probability * weight).sum(1) / total)


def router_statistics(router_logits, top_k: int) -> dict:
    """What is watched of a mixture, from router logits [layers, tokens, experts]: tokens_per_expert [layers, experts], choices per token of the `top_k` most
    probable experts, and router_entropy [layers], nats, the mean over tokens."""
    probability = jax.nn.softmax(widen(router_logits.reshape(-1, *router_logits.shape[-2:])), -1)
    chosen = jax.nn.one_hot(jax.lax.top_k(probability, top_k)[1], probability.shape[-1], dtype=probability.dtype).sum(-2)
    return {"tokens_per_expert": chosen.mean(1), "router_entropy": entropy(probability).mean(-1)}


def entropy(probability):
    """-sum p log p over the last axis, nats; 0 log 0 is 0."""
    return -jnp.sum(jax.scipy.special.xlogy(probability, probability), -1)


def causal_lm_loss(model, batch):
    """(loss, aux) of a dense decoder: the cross-entropy alone.

    batch: inputs, targets int [batch, length]; optional inputs_position, inputs_segmentation, targets_segmentation of the same shape.
    """
    logits = model(batch["inputs"], batch.get("inputs_position"), batch.get("inputs_segmentation"))
    return cross_entropy(logits, batch["targets"], batch.get("targets_segmentation")), {}


def mixture_lm_loss(model, batch, *, coefficient: float | None = None, top_k: int | None = None):
    """(loss, aux): the cross-entropy plus the router's load-balancing loss times `coefficient` (None: `config.router_aux_loss_coef`).

    The model's aux holds it as `moe_lb_loss`, or the `router_logits` that make it with `top_k`; a model whose layers are all dense holds neither. batch: as for
    `causal_lm_loss`; targets_segmentation masks the cross-entropy alone, padding in inputs_segmentation is left out of both.
    """
    logits, aux = model(batch["inputs"], batch.get("inputs_position"), batch.get("inputs_segmentation"), return_aux=True)
    loss = cross_entropy(logits, batch["targets"], batch.get("targets_segmentation"))
    if "moe_lb_loss" not in aux and "router_logits" in aux:
        balance = router_loss(aux["router_logits"], top_k, batch.get("inputs_segmentation"))
        aux = aux | router_statistics(aux["router_logits"], top_k) | {"moe_lb_loss": balance}
    if "moe_lb_loss" in aux:
        loss = loss + (model.config.router_aux_loss_coef if coefficient is None else coefficient) * aux["moe_lb_loss"]
    return loss, aux
