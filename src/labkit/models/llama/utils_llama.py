"""Llama's FLOPs and its loss for the training engine."""

import logging

from labkit.layers.flops import TrainingFlops, training_flops, visible_pairs
from labkit.layers.loss import causal_lm_loss

log_flops = logging.getLogger("labkit.flops")


def calculate_llama_tflops_per_device(config, *, batch: int, length: int, log: bool = True) -> TrainingFlops:
    """Operations of one training step on `batch` sequences of `length` tokens on one device."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    flops = training_flops(
        tokens=batch * length,
        sequences=batch,
        active_parameters=config.num_hidden_layers * (attention + mlp) + config.hidden_size * config.vocab_size,
        pairs=config.num_hidden_layers * visible_pairs(length),
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )
    if log:
        log_flops.info("%s", flops)
    return flops


def configure_llama_engine(engine):
    """The engine with this family's loss."""
    return engine.with_loss_fn(causal_lm_loss, has_aux=True)
