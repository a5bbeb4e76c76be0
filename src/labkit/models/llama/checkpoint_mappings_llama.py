"""Llama's correspondence of tensors on disk and parameters, both ways."""

from labkit.models.mapping import Ignored, Layout, Rule, RuleTable, Tied, Transpose

HEAD_RULE = Rule("lm_head.kernel", Layout("lm_head.weight", Transpose(1, 0)))
HEAD_TIED = Tied("lm_head.weight", to="model.embed_tokens.weight")
ROTARY_BUFFER = Ignored(
    "model.layers.{layer}.self_attn.rotary_emb.inv_freq", reason="a buffer that the config determines; checkpoints of old versions carry it"
)

EMBED_AND_NORM = (
    Rule("embed_tokens.embedding", Layout("model.embed_tokens.weight")),
    Rule("norm.weight", Layout("model.norm.weight")),
)


def layer_weight(name: str) -> Rule:
    """A vector that every layer stores as `<name>.weight`."""
    return Rule(f"layers.{name}.weight", Layout(f"model.layers.{{layer}}.{name}.weight"))


def layer_kernel(name: str, kinds=None) -> Rule:
    """A linear layer's matrix, [out, in] on disk and [in, out] here."""
    return Rule(f"layers.{name}.kernel", Layout(f"model.layers.{{layer}}.{name}.weight", Transpose(1, 0)), kinds=kinds)


def layer_bias(name: str, kinds=None) -> Rule:
    """A linear layer's bias."""
    return Rule(f"layers.{name}.bias", Layout(f"model.layers.{{layer}}.{name}.bias"), kinds=kinds)


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def llama_rules(config) -> RuleTable:
    """The rule table of one config: biases and the head as it has them."""
    return RuleTable(
        *EMBED_AND_NORM,
        *(layer_weight(name) for name in ("input_layernorm", "post_attention_layernorm")),
        *(layer_kernel(name) for name in ATTENTION + MLP),
        *(layer_bias(name) for name in ATTENTION if config.attention_bias),
        *(layer_bias(name) for name in MLP if config.mlp_bias),
        HEAD_TIED if config.tie_word_embeddings else HEAD_RULE,
        ROTARY_BUFFER,
    )
