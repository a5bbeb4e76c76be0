"""Qwen3-MoE's correspondence of tensors on disk and parameters. Checkpoints hold one tensor per expert (published) or all experts in one (fused); both load."""

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
from labkit.models.mapping import Layout, Rule, RuleTable, SplitAxis, Stack, Transpose

_MLP = "model.layers.{layer}.mlp"

MIXTURE = (
    Rule("layers.mlp.gate.kernel", Layout(f"{_MLP}.gate.weight", Transpose(1, 0)), kinds="moe"),
    Rule(
        "layers.mlp.experts.gate_up_proj",
        Layout((f"{_MLP}.experts.{{expert}}.gate_proj.weight", f"{_MLP}.experts.{{expert}}.up_proj.weight"), Transpose(0, 2, 1), Stack(2)),
        Layout(f"{_MLP}.experts.gate_up_proj", SplitAxis(1, 2), Transpose(0, 3, 1, 2)),
        kinds="moe",
    ),
    Rule(
        "layers.mlp.experts.down_proj",
        Layout(f"{_MLP}.experts.{{expert}}.down_proj.weight", Transpose(0, 2, 1)),
        Layout(f"{_MLP}.experts.down_proj", Transpose(0, 2, 1)),
        kinds="moe",
    ),
)


def qwen3_moe_rules(config) -> RuleTable:
    """The rule table of one config: biases and the head as it has them."""
    return RuleTable(
        *EMBED_AND_NORM,
        *(layer_weight(name) for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")),
        *(layer_kernel(name) for name in ATTENTION),
        *(layer_bias(name) for name in ATTENTION if config.attention_bias),
        *MIXTURE,
        *(layer_kernel(name, kinds="dense") for name in MLP),
        HEAD_TIED if config.tie_word_embeddings else HEAD_RULE,
        ROTARY_BUFFER,
    )
