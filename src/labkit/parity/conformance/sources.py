"""Which tiny models stand for a family: two seeds and two configurations, the second one with what the first hides."""

LLAMA3 = '{"rope_type":"llama3","rope_theta":500.0,"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":16}'
YARN = '{"rope_type":"yarn","rope_theta":500.0,"factor":4.0,"original_max_position_embeddings":16}'
YARN_MSCALE = '{"rope_type":"yarn","rope_theta":500.0,"factor":4.0,"original_max_position_embeddings":16,"mscale":0.7,"mscale_all_dim":0.5}'
DYNAMIC = '{"rope_type":"dynamic","rope_theta":500.0,"factor":3.0}'
LINEAR = '{"rope_type":"linear","rope_theta":500.0,"factor":8.0}'
PER_KIND = '{"full_attention":{"rope_type":"linear","rope_theta":500.0,"factor":8.0},"sliding_attention":{"rope_type":"default","rope_theta":300.0}}'
LONG = (
    '{"rope_type":"longrope","rope_theta":500.0,"original_max_position_embeddings":32,'
    '"short_factor":[1.0,1.1,1.2,1.4,1.5,1.7],"long_factor":[1.3,1.8,2.5,3.1,4.0,5.5]}'
)
HEADS = "num_attention_heads=8&num_key_value_heads=2"

SECOND = {
    "llama": f"{HEADS}&attention_bias=true&mlp_bias=true&tie_word_embeddings=true&rope_parameters={LLAMA3}",
    "mistral": f"{HEADS}&head_dim=14&sliding_window=null&rope_parameters={LINEAR}",
    "qwen2": f"use_sliding_window=true&sliding_window=5&max_window_layers=2&max_position_embeddings=32&rope_parameters={DYNAMIC}",
    "qwen3": f"{HEADS}&tie_word_embeddings=true&attention_bias=true&rope_parameters={YARN}",
    "qwen2_moe": f"norm_topk_prob=false&decoder_sparse_step=2&mlp_only_layers=[]&num_hidden_layers=7&rope_parameters={LLAMA3}",
    "qwen3_moe": f"{HEADS}&norm_topk_prob=false&mlp_only_layers=[]&rope_parameters={DYNAMIC}&max_position_embeddings=32",
    "mixtral": f"{HEADS}&num_experts_per_tok=1&sliding_window=6&tie_word_embeddings=true",
    "gemma": "num_key_value_heads=1&head_dim=16&num_hidden_layers=3",
    "gemma2": "attn_logit_softcapping=null&tie_word_embeddings=false&num_hidden_layers=4",
    "gemma3_text": f"num_hidden_layers=7&rope_parameters={PER_KIND}",
    "phi3": f"rope_parameters={LONG}&num_hidden_layers=3",
    "granite": f"{HEADS}&attention_bias=true&mlp_bias=true&tie_word_embeddings=true&rope_parameters={YARN}",
    "granitemoe": f"{HEADS}&num_experts_per_tok=2&attention_bias=true&tie_word_embeddings=true",
    "cohere": f"{HEADS}&use_qk_norm=true&attention_bias=true&num_hidden_layers=3",
    "cohere2": f"{HEADS}&num_hidden_layers=7&attention_bias=true",
    "olmo2": f"{HEADS}&attention_bias=true&tie_word_embeddings=true&rope_parameters={YARN}",
    "olmoe": "norm_topk_prob=false&clip_qkv=1.0&num_hidden_layers=3&attention_bias=true",
    "smollm3": "use_sliding_window=true&sliding_window=6&no_rope_layer_interval=3&num_hidden_layers=7&tie_word_embeddings=true",
    "deepseek_v3": f"q_lora_rank=null&norm_topk_prob=false&rope_interleave=false&rope_parameters={YARN_MSCALE}&first_k_dense_replace=2",
    "gpt_oss": f"{HEADS}&num_hidden_layers=3&num_experts_per_tok=2&sliding_window=5",
    "llama4_text": f"{HEADS}&interleave_moe_layer_step=1&use_qk_norm=false&num_experts_per_tok=2&num_hidden_layers=6",
    "hrm_text": "num_attention_heads=8&tie_word_embeddings=true",
    "minicpm3": "q_lora_rank=22&num_attention_heads=8&tie_word_embeddings=true&attention_bias=true",
    "glm4": f"{HEADS}&attention_bias=true&tie_word_embeddings=true&num_hidden_layers=3",
    "glm4_moe": "use_qk_norm=true&norm_topk_prob=false&attention_bias=true&first_k_dense_replace=2",
    "qwen3_next": "norm_topk_prob=false&mlp_only_layers=[]&num_hidden_layers=9&tie_word_embeddings=true",
    "gpt2": "n_head=8&scale_attn_by_inverse_layer_idx=true&tie_word_embeddings=false&activation_function=relu",
    "gpt_neox": "use_parallel_residual=false&attention_bias=false&num_attention_heads=4&tie_word_embeddings=true",
    "mamba2": "use_bias=true&use_conv_bias=false&tie_word_embeddings=true&num_hidden_layers=3",
}
"""Named family -> overrides of its second configuration: other heads, the other way to norm a choice, a cycle with a remainder, other rope types."""

NAMED = tuple(SECOND)
"""The families that stand in the default tests."""


def sources(model_type: str) -> list[str]:
    """Model names of a family's two configurations. A type that is not named has its second one shaped as the class's defaults."""
    from labkit.hf.default_shaped import default_shaped

    first = f"tiny:{model_type}"
    return [first, f"{first}?{SECOND[model_type]}&seed=1" if model_type in SECOND else next(iter(default_shaped(model_type)))]
