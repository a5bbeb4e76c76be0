"""Sizes and values of tiny configs, by config key, for any family.

No coincidences: 72 hidden, 6 heads, 2 key-value heads, head size 10 (not 72 / 6), 88 intermediate, 8 experts, 131 tokens, window 7, 5 layers.
No neutral values: softcaps that bite, multipliers far from 1, an epsilon and a rope base that no class has as its default.
Lists that describe layers are made by the config class itself.
"""

import itertools
from collections.abc import Iterator

HEAD_DIM, LAYERS = 10, 5
ROPE_THETA = 700.0

_SIZES = (
    (72, "hidden_size n_embd d_model n_embed dim embed_dim word_embed_proj_dim embedding_size"),
    (6, "num_attention_heads n_head n_heads num_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads"),
    (HEAD_DIM, "head_dim kv_channels"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers"),
    (131, "vocab_size"),
    (88, "intermediate_size n_inner ffn_dim ffn_hidden_size dff inner_dim"),
    (320, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length"),
    (7, "sliding_window attention_window_size window_size"),
    (9, "attention_chunk_size"),
    (40, "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size"),
    (56, "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (3, "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_experts_per_token"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace n_input_layers n_output_layers"),
    (4, "n_group num_expert_group"),
    (2, "topk_group layer_group_size"),
    (16, "index_head_dim index_n_heads"),
    (3, "indexer_n_heads indexer_compress_ratio"),
    (1, "indexer_kv_heads"),
    (12, "indexer_head_dim"),
    (6, "indexer_budget"),
    (5, "index_topk"),
    (4, "rotary_dim laurel_rank"),
    (14, "global_head_dim"),
    (2, "num_global_key_value_heads"),
    (20, "hidden_size_per_layer_input o_lora_rank"),
    (131, "vocab_size_per_layer_input"),
    (6, "attention_heads decoder_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads"),
    (3, "linear_num_key_heads"),
    (14, "linear_key_head_dim"),
    (16, "linear_value_head_dim"),
    (16, "chunk_size mamba_chunk_size"),
    (24, "mamba_d_head mamba_head_dim"),
    (144, "mamba_d_ssm"),
    (11, "mamba_d_state ssm_state_size state_size"),
    (2, "n_groups mamba_n_groups"),
    (88, "decoder_ffn_dim"),
    (LAYERS, "decoder_layers"),
    (117, "unpadded_vocab_size"),
    (2, "n_layers_per_attn_res_block loop_layer_index_start num_kv_shared_layers"),
    (4, "loop_layer_index_end"),
    (26, "q_lora_rank"),
    (18, "kv_lora_rank"),
    (14, "qk_nope_head_dim"),
    (4, "qk_rope_head_dim"),
    (22, "v_head_dim"),
)
_VALUES = (
    (1.0, "attn_logit_softcapping"),
    (2.0, "final_logit_softcapping"),
    (13, "query_pre_attn_scalar"),
    (1e-4, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon"),
    (3.0, "embedding_multiplier"),
    (0.4, "residual_multiplier partial_rotary_factor"),
    (0.7, "attention_multiplier"),
    (8.0, "logits_scaling"),
    (0.0625, "logit_scale"),
    (0.3, "lm_head_multiplier"),
    (2.5, "routed_scaling_factor"),
    (ROPE_THETA, "rope_theta"),
    (True, "norm_topk_prob"),
    ([1], "mlp_only_layers"),
    (
        0.0,
        "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout attention_probs_dropout_prob hidden_dropout_prob resid_dropout emb_pdrop",
    ),
    (0.0, "activation_dropout layerdrop"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
SIZES = {key: size for size, keys in _SIZES for key in keys.split()}
VALUES = {key: value for value, keys in _VALUES for key in keys.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def candidates(defaults: dict, optional: frozenset[str] = frozenset()) -> Iterator[dict]:
    """Config values for a class whose defaults are given, first choice first: later ones give up a distinction that some families cannot have.

    optional: keys that the reference reads although the class does not declare them.
    """
    base = tiny_values(defaults)
    shown = {"layer_types": base.pop("layer_types")} if "layer_types" in base else {}
    heads = base.get("num_attention_heads")
    head_sizes: list[dict] = [{"head_dim": HEAD_DIM}] if "head_dim" in optional or "head_dim" in base else [{}]
    if "head_dim" not in base:
        head_sizes.append({})
    if "qk_rope_head_dim" in base:
        head_sizes.insert(0, {"head_dim": base["qk_rope_head_dim"]} if "head_dim" in defaults else {})
    head_sizes += [{"head_dim": size} for size in (12, 24)] if "head_dim" in base else []
    key_values: list[dict] = [{}]
    if "num_key_value_heads" in base and heads:
        key_values.insert(0 if "kv_lora_rank" in base else 1, {"num_key_value_heads": heads})
        key_values.append({"num_key_value_heads": 1})  # some layers of a class may have a multiple of what the config says
    experts: list[dict] = [{}] + ([{"num_experts_per_tok": 1}] if "num_experts_per_tok" in base else [])
    layers = defaults.get("num_hidden_layers")
    lists = {
        key: _in_turn(value) or value[:LAYERS] for key, value in defaults.items() if isinstance(value, list) and len(value) == layers and "token" not in key
    }
    stacks = [shown] * bool(shown) + [{}] + [lists] * bool(lists)
    # A class may cut its heads into parts of a number of its own.
    fewer = [{key: 4} for key in HEADS if key in base and "num_key_value_heads" not in base][:1]
    for more in [{}, *_nested(defaults), *fewer]:
        for expert, stack, key_value, head_size in itertools.product(experts, stacks, key_values, head_sizes):
            yield {**base, **stack, **key_value, **head_size, **expert, **more}


def _nested(defaults: dict) -> list[dict]:
    """Values for classes that the plain ones do not suit: layer types in turn, a rope table for each, and configs within the config by the rules of
    this page."""
    found = []
    kinds = list(dict.fromkeys(defaults.get("layer_types") or []))
    if len(kinds) > 1:
        found.append({"layer_types": [kinds[layer % len(kinds)] for layer in range(LAYERS)]})
    if kinds and "rope_parameters" in defaults:
        tables = {kind: {"rope_type": "default", "rope_theta": ROPE_THETA * (1 + 3 * index)} for index, kind in enumerate(kinds)}
        found.append({"rope_parameters": tables})
    inner = {key: value for key, value in defaults.items() if key.endswith("_config") and isinstance(value, dict)}
    if inner:
        found.append({key: tiny_values(value) | ({"rope_theta": ROPE_THETA, "clip_qkv": 1.0} if "attn" in key else {}) for key, value in inner.items()})
    return found


def tiny_values(defaults: dict) -> dict:
    """The rules of this page applied to the keys that the class declares."""
    values = {}
    for key, default in defaults.items():
        if key in SIZES and (default is None or (isinstance(default, int) and not isinstance(default, bool))):
            values[key] = SIZES[key]
        elif key in SIZES and isinstance(default, list) and set(map(type, default)) == {int} and len(default) == defaults.get("num_hidden_layers"):
            values[key] = [SIZES[key]] * LAYERS
        elif key in VALUES and default is not None:
            values[key] = VALUES[key]
        elif key in TOKENS and default is not None:
            values[key] = TOKENS[key]
        elif key == "rope_parameters" and isinstance(default, dict):
            values[key] = _rope(default)
    shown = _every_kind(defaults)
    if shown:
        values["layer_types"] = shown
    if isinstance(defaults.get("per_layer_config"), dict):
        values["per_layer_config"] = {layer: _layer_sizes(own) for layer, own in defaults["per_layer_config"].items() if int(layer) < LAYERS}
    if "attn_layer_indices" in defaults:
        values["attn_layer_indices"] = [1, 4]
    if "activation_sparsity_pattern" in defaults:
        values["activation_sparsity_pattern"] = [0.9, 0.9, 0.0, 0.0, 0.0]
    if "attention_types" in defaults:
        values["attention_types"] = [[["global", "local"], 2], [["global"], 1]]
    return values


def _layer_sizes(own: dict) -> dict:
    """Sizes of a layer that differ from the rest's; heads stay as many as keys have, and a head the sum of its parts."""
    sizes = {key: SIZES[key] - 2 if key in SIZES else value for key, value in own.items()}
    if own.get("num_key_value_heads") == own.get("num_attention_heads") is not None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "qk_nope_head_dim" in own:
        sizes["head_dim"] = sizes["qk_nope_head_dim"] + sizes.get("qk_rope_head_dim", SIZES["qk_rope_head_dim"])
    return sizes


def _every_kind(defaults: dict) -> list[str] | None:
    """Layer types in turn, for a class whose pattern is longer than a tiny stack and would show one kind only."""
    return _in_turn(defaults.get("layer_types"))


def _in_turn(types) -> list[str] | None:
    """The names of a per-layer list in turn, where its first ones do not hold them all."""
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types) or len(set(types[:LAYERS])) == len(set(types)):
        return None
    kinds = list(dict.fromkeys(types))
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]


def _rope(default: dict) -> dict:
    """The class's rope with numbers of our own: one base per layer type where tables are nested."""
    if any(isinstance(table, dict) for table in default.values()):
        return {
            kind: _rope_table(table, ROPE_THETA * (1 + 3 * index)) if isinstance(table, dict) else table for index, (kind, table) in enumerate(default.items())
        }
    return _rope_table(default, ROPE_THETA)


def _rope_table(table: dict, theta: float) -> dict:
    changed = {**table, "rope_theta": theta}
    if table.get("partial_rotary_factor") not in (None, 1, 1.0):
        changed["partial_rotary_factor"] = VALUES["partial_rotary_factor"]
    return changed
