"""Seed-OSS' correspondence of tensors on disk and parameters."""

from labkit.models.mapping import Layout, Rule, RuleTable, Tied, Transpose

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def seed_oss_rules(config) -> RuleTable:
    """The rule table of one config."""
    linear = lambda name: Rule(f"layers.{name}.kernel", Layout(f"model.layers.{{layer}}.{name}.weight", Transpose(1, 0)))
    plain = lambda name: Rule(f"layers.{name}", Layout(f"model.layers.{{layer}}.{name}"))
    biased = (*(PROJECTIONS if config.attention_bias else ()), *(("self_attn.o_proj",) if config.attention_out_bias else ()))
    return RuleTable(
        Rule("embed_tokens.embedding", Layout("model.embed_tokens.weight")),
        Rule("norm.weight", Layout("model.norm.weight")),
        *map(linear, (*PROJECTIONS, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        *(plain(f"{name}.bias") for name in biased),
        plain("input_layernorm.weight"),
        plain("post_attention_layernorm.weight"),
        Tied("lm_head.weight", to="model.embed_tokens.weight")
        if config.tie_word_embeddings
        else Rule("lm_head.kernel", Layout("lm_head.weight", Transpose(1, 0))),
    )
