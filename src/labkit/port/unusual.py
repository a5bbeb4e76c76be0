"""What a reader should know of a family first: told by what its code does, in one line each."""

import ast
import re

_SIGNS = (
    (r"group_tokens\(", "a mixture of experts: tokens sorted by expert, grouped products, dropless"),
    (r"shared_expert", "shared experts that every token visits"),
    (r"correction_bias|e_score_correction", "a router whose choice is corrected by a bias that does not enter the weights"),
    (r"update_recurrent_state\(", "a recurrent state in place of keys and values in some layers"),
    (r"update_conv_state\(", "a short causal convolution with a state of its own"),
    (r"create_sliding_window_causal_mask\(", "layers that see a window"),
    (r"create_chunked_causal_mask\(", "layers that see their chunk only"),
    (r"sinks", "attention sinks: one extra logit per head"),
    (r"softcap", "a tanh softcap on scores or logits"),
    (r"q_norm|query_layernorm|q_layernorm", "norms on queries and keys"),
    (r"kv_a_proj|kv_b_proj|kv_lora", "latent attention: keys and values through a low-rank bottleneck"),
    (r"lambda_q1|lambda_init", "differential attention: the difference of two attention maps"),
    (r"alibi", "ALiBi: a bias by distance in place of rotary positions"),
    (r"logit_scale|logits_scaling|lm_head_multiplier", "logits are scaled"),
    (r"embed_scale|embedding_multiplier|scale_emb", "embeddings are scaled"),
    (r"residual_multiplier", "residual branches are scaled"),
)


def unusual(context, text: str) -> list[str]:
    """Lines for the head of the emitted file."""
    code = ast.unparse(ast.parse(text))
    found = [line for pattern, line in _SIGNS if re.search(pattern, code)]
    kinds = {cls for f in context.functions.values() if f.cls for cls in [f.cls] if f.cls.endswith("DecoderLayer")}
    if len(kinds) > 1:
        found.append(f"layers of several classes: {', '.join(sorted(kinds))}")
    if context.spine.layers is None:
        found.append("layers that cannot be stacked: kept as a list and run by a loop")
    return found + [f"the reference computes a part of this without gradients ({place}), and so does the slice" for place in _without_gradients(context)]


def _without_gradients(context) -> list[str]:
    """file:line of every value that is a context without gradients or none, as the loop's turn has it."""
    places = set()
    for folded in context.functions.values():
        for node in ast.walk(folded.original):
            if isinstance(node, ast.IfExp) and any(re.search(r"\bno_grad\(\)", ast.unparse(branch)) for branch in (node.body, node.orelse)):
                places.add(f"{folded.file}:{node.lineno}")
    return sorted(places)
