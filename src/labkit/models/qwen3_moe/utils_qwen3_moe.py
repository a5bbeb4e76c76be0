"""Qwen3-MoE's FLOPs and its loss for the training engine."""

import logging

from labkit.layers.flops import TrainingFlops, training_flops, visible_pairs
from labkit.layers.loss import mixture_lm_loss

log_flops = logging.getLogger("labkit.flops")


def calculate_qwen3_moe_tflops_per_device(config, *, batch: int, length: int, log: bool = True) -> TrainingFlops:
    """Operations of one training step on `batch` sequences of `length` tokens on one device; a token is counted with the experts it visits."""
    kinds = config.plan.kinds
    attention = config.hidden_size * config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    dense = 3 * config.hidden_size * config.intermediate_size
    mixture = config.hidden_size * config.num_experts + 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    flops = training_flops(
        tokens=batch * length,
        sequences=batch,
        active_parameters=len(kinds) * attention + kinds.count("dense") * dense + kinds.count("moe") * mixture + config.hidden_size * config.vocab_size,
        pairs=len(kinds) * visible_pairs(length, config.sliding_window),
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )
    if log:
        log_flops.info("%s", flops)
    return flops


def configure_qwen3_moe_engine(engine):
    """The engine with this family's loss, the load-balancing loss folded in."""
    return engine.with_loss_fn(mixture_lm_loss, has_aux=True)
