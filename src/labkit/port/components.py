"""Which component a difference belongs to, and what it is in one line where a rule can tell."""

import re

COMPONENTS = ("embedding", "rope", "attention", "router", "experts", "mlp", "norm", "block", "model", "head", "config")

_ROLES = (
    ("rope", r"rotary|rope|rotate_|apply_rotary|alibi"),
    ("router", r"router|topk|gate$|gating|load_balancing"),
    ("experts", r"expert|moe|sparse"),
    ("embedding", r"embedding"),
    ("head", r"forcausallm|lmhead|forconditional"),
    ("block", r"decoderlayer|block|^layer$|encoderlayer"),
    ("attention", r"attention|attn|repeat_kv|mamba|mixer|ssm|delta|conv|recurrent|rglru|segment_sum|chunk|retention|linear_att|indexer|compress"),
    ("norm", r"norm"),
    ("mlp", r"mlp|feedforward|ffn|gatedlinear|dense"),
    ("model", r"model"),
)
# Statements of the model, and of what wraps the experts, that speak of another component.
_STATEMENTS = {
    "model": (
        ("model", r"mask|decoder_layer|past_seen"),
        ("rope", r"rotary|rope|position_emb"),
        ("norm", r"self\.\w*norm\w*|final_layer_?norm|ln_f"),
        ("embedding", r"embed|wte|wpe|\binputs_embeds\b"),
    ),
    "experts": (("router", r"\brouter|gate\b(?!_)|topk|top_k|sigmoid|softmax|routing"),),
}

_EXPLANATIONS = (
    # (components or "", pattern in what is new on either side, words)
    ("norm", r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1", "the norm multiplies by 1 + weight"),
    ("norm", r"torch\.zeros", "the norm's weight starts at zero: it is an offset from 1"),
    ("norm", r"\.mean\(-1.*\) *\n?.*- |mean\(dim|layer_norm|LayerNorm", "layer norm: the mean is subtracted"),
    ("norm", r"type_as|\.float\(\)|float32|input_dtype|\.to\(", "rounding: where the norm widens and narrows"),
    ("norm", r"rsqrt|pow\(2\)", "the mean square and its root"),
    ("norm", r"eps", "epsilon of the norm"),
    ("", r"attn_logit_softcap|softcap", "softcap by tanh"),
    ("head norm embedding model", r"logit_softcap|tanh", "softcap by tanh on the logits"),
    ("", r"query_pre_attn_scalar", "scores are scaled by query_pre_attn_scalar ** -0.5"),
    ("", r"embed_scale|embedding_multiplier|scale_emb|hidden_size ?\*\* ?0\.5|normalizer", "embedding scale"),
    ("", r"logits?_scal|lm_head_multiplier|logit_multiplier|dim_model_base", "logit scale"),
    ("", r"residual_multiplier|residual_scale|scale_depth|layer_scale|layer_scalar", "scale of the residual branch"),
    ("", r"attention_multiplier|self\.scaling|softmax_scale|scale_attn|query_multiplier|key_multiplier", "scale of the scores"),
    ("", r"sinks?\b", "attention sinks"),
    ("", r"[qk]_(layer)?norm|query_(layer)?norm|key_(layer)?norm|qk_norm|use_qk", "q_norm, k_norm: queries and keys are normalised"),
    ("", r"q_lora|kv_lora|kv_a_|q_a_|kv_b_|qk_nope|qk_rope", "low-rank (latent) attention"),
    ("", r"no_rope|use_rope|nope", "layers without rotary embedding"),
    ("", r"partial_rotary|rotary_dim|rotary_pct|rotary_ndims", "only a part of each head is rotated"),
    ("rope", r"::2|repeat_interleave|stack|complex|polar", "rotary pairs are interleaved"),
    ("router", r"histc|tokens_per_expert", "the load-balancing loss, for training"),
    ("", r"sliding|window|chunked", "window: how far back a layer sees"),
    ("", r"e_score_correction|correction_bias|expert_bias", "a correction bias steers the choice of experts"),
    ("", r"n_group|topk_group|group_scores|group_mask", "group-limited routing"),
    ("router experts block", r"sigmoid", "sigmoid routing"),
    ("router", r"softmax[\s\S]*topk", "routing: softmax over all experts, then the top-k"),
    ("router", r"topk[\s\S]*softmax", "routing: the top-k, then softmax over them"),
    ("experts", r"index_add|one_hot|expert_mask", "experts: each token's top-k, weighted and summed"),
    ("block", r"self\.mlp = |mlp_only|sparse_step", "which layers are sparse, which dense"),
    ("router experts", r"routed_scaling|norm_topk|renormal", "weights of the chosen experts: normalised, scaled"),
    ("", r"shared_expert", "shared experts, always on"),
    ("block", r"layer_idx|mlp_layer_types|mlp_only|moe_layer|first_k_dense", "dense and sparse layers differ by index"),
    ("attention mlp", r"sigmoid", "sigmoid gate"),
    ("", r"clamp|clip", "values are clamped"),
    ("", r"act_fn|ACT2FN|hidden_activation|hidden_act|gelu|relu|silu", "activation"),
    ("block", r"mlp.*self_attn|attn_out.*mlp|parallel", "attention and mlp side by side"),
    ("block", r"norm|ln_", "norm order: which norms stand around the sublayers"),
    ("", r"qkv|gate_up|query_key_value|c_attn|Wqkv|in_proj", "fused projection"),
    ("", r"bias=|bias", "bias"),
    ("", r"layer_types|layer_type|layers_block_type|causal_mask_mapping", "layers differ by type: mask and window"),
    ("", r"conv1d|conv\b|causal_conv", "short convolution"),
    ("", r"head_dim", "head size"),
    ("", r"num_key_value|repeat_kv|n_rep", "grouping of keys and values"),
    ("rope model", r"rope|rotary|position_emb|inv_freq|attention_scaling", "rotary embedding"),
    ("head", r"tie|lm_head|_tied", "the head"),
    ("model", r"decoder_layer in", "how the layers are run"),
    ("", r"mask", "attention mask"),
    ("", r"position_ids|past_seen_tokens", "positions"),
    ("", r"cache|conv_state|recurrent_state", "cache"),
)


def component_of(role: str, statement: str = "") -> str:
    """The component of a class or function by its role, refined by what one of its statements speaks of."""
    name = role.lower()
    found = next((component for component, pattern in _ROLES if re.search(pattern, name)), "mlp" if "gate" in name else "model")
    return next((component for component, pattern in _STATEMENTS.get(found, ()) if statement and re.search(pattern, statement)), found)


def explain(component: str, mine: str, donor: str) -> str:
    """One line on a difference, or "" when no rule knows it. Only what one side has and the other lacks is looked at first, then the whole of both."""
    fresh = " ".join(sorted(_words(mine) ^ _words(donor), key=lambda w: (mine + donor).find(w)))
    biases = [set(re.findall(r"\bbias=([\w.]+)", side)) for side in (mine, donor)]
    if all(biases) and biases[0] != biases[1]:
        return f"bias: {', '.join(sorted(biases[0]))}; the donor {', '.join(sorted(biases[1]))}"
    for text in (fresh, f"{mine}\n{donor}") if mine and donor else (f"{mine}{donor}",):
        for where, pattern, words in _EXPLANATIONS:
            if (not where or component in where.split()) and re.search(pattern, text):
                only_donor = not re.search(pattern, mine) and re.search(pattern, donor)
                return f"the donor has: {words}" if only_donor else words
    return ""


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+=?|[^\s\w]", text)) | set(re.findall(r"1\.0 \+ self\.weight|\w+ \*\* -?\d\.\d", text))
