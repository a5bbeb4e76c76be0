"""Qwen3's correspondence of tensors on disk and parameters: Llama's and the query and key norms."""

from labkit.models.llama.checkpoint_mappings_llama import (
    ATTENTION,
    EMBED_AND_NORM,
    HEAD_RULE,
    HEAD_TIED,
    MLP,
    ROTARY_BUFFER,
    layer_bias,
    layer_kernel,
    layer_weight,
)
from labkit.models.mapping import RuleTable


def qwen3_rules(config) -> RuleTable:
    """The rule table of one config: biases and the head as it has them."""
    return RuleTable(
        *EMBED_AND_NORM,
        *(layer_weight(name) for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")),
        *(layer_kernel(name) for name in ATTENTION + MLP),
        *(layer_bias(name) for name in ATTENTION if config.attention_bias),
        HEAD_TIED if config.tie_word_embeddings else HEAD_RULE,
        ROTARY_BUFFER,
    )
