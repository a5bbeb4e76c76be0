"""Sizes and values of tiny configs, by config key, for any family.

No coincidences: 36 hidden, 6 heads, 2 key-value heads, head size 10 (not 36 / 6), 44 intermediate, 8 experts, 131 tokens, window 7, 5 layers. No neutral values:
softcaps that bite, multipliers far from 1, an epsilon and a rope base that no class has as its default. Lists that describe layers are made by the config class itself.
"""
HEADS, KV_HEADS, HIDDEN, HEAD_DIM, LAYERS, VOCAB = 6, 2, 36, 10, 5, 131

SIZES = {
    "hidden_size": HIDDEN, "n_embd": HIDDEN, "d_model": HIDDEN, "n_embed": HIDDEN, "dim": HIDDEN, "embed_dim": HIDDEN, "word_embed_proj_dim": HIDDEN, "embedding_size": HIDDEN,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "kv_channels": HEAD_DIM,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "vocab_size": VOCAB, "intermediate_size": 44, "n_inner": 44, "ffn_dim": 44, "ffn_hidden_size": 44, "dff": 44, "inner_dim": 44,
    "max_position_embeddings": 320, "n_positions": 320, "n_ctx": 320, "max_seq_len": 320, "max_sequence_length": 320, "seq_length": 320,
    "sliding_window": 7, "attention_window_size": 7, "window_size": 7, "attention_chunk_size": 9,
    # mixtures
    "moe_intermediate_size": 28, "expert_ffn_hidden_size": 28, "moe_ffn_hidden_size": 28, "shared_expert_intermediate_size": 22, "moe_shared_expert_intermediate_size": 22,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_topk": 3, "moe_k": 3, "top_k_experts": 3, "num_experts_per_token": 3,
    "moe_num_experts": 8, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "mlp_only_layers": [1], "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    # latent attention
    "q_lora_rank": 26, "kv_lora_rank": 18, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 14,
}
VALUES = {
    "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 13, "rms_norm_eps": 1e-4, "layer_norm_eps": 1e-4, "layer_norm_epsilon": 1e-4,
    "norm_eps": 1e-4, "norm_epsilon": 1e-4, "layernorm_epsilon": 1e-4,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 8.0, "logit_scale": 0.0625, "lm_head_multiplier": 0.3,
    "rope_theta": 700.0, "partial_rotary_factor": 0.4,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0, "resid_dropout": 0.0, "emb_pdrop": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "use_cache": True,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE_THETA = 700.0


def tiny_values(defaults: dict, optional: frozenset[str] = frozenset()) -> dict:
    """Config keys and values for a class whose defaults are given. optional: keys that the reference reads although the class does not declare them."""
    values = {}
    for key, default in defaults.items():
        if key in SIZES and isinstance(default, (int, list)) | (default is None):
            values[key] = SIZES[key]
        elif key in VALUES and default is not None:
            values[key] = VALUES[key]
        elif key in TOKENS and default is not None:
            values[key] = TOKENS[key]
        elif key == "rope_parameters" and isinstance(default, dict):
            values[key] = _rope(default)
    if "head_dim" in optional:
        values["head_dim"] = HEAD_DIM
    return values


def _rope(default: dict) -> dict:
    """The class's rope with bases of our own: one per layer type where they are nested."""
    if any(isinstance(table, dict) for table in default.values()):
        changed = {}
        for index, (kind, table) in enumerate(default.items()):
            changed[kind] = {**table, "rope_theta": ROPE_THETA * (1 + 3 * index)} if isinstance(table, dict) and "rope_theta" in table else table
        return changed
    return {**default, "rope_theta": ROPE_THETA}
