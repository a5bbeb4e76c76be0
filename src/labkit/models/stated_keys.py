"""Keys that published checkpoints carry and the installed config class does not know: each states what the reference does anyway, and binds.

The reference has no line that reads them (`tests/models/test_published.py` checks it). Any other value means a model that the installed reference does not
compute, and is refused like every unknown key.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stated:
    """reason: what the key says. values: what it may be; empty: anything. same_as: another key of the config whose value it repeats."""

    reason: str
    values: tuple = ()
    same_as: str = ""

    def agrees(self, value, config: Mapping) -> bool:
        """True when the key says what the reference does."""
        if self.same_as:
            return value == config.get(self.same_as)
        return not self.values or any(value == allowed and type(value) is type(allowed) for allowed in self.values)

    def __str__(self):
        return f"here it can only be {f'that of {self.same_as}' if self.same_as else ' or '.join(map(repr, self.values))}: {self.reason}"


_DROPOUT = Stated("dropout acts in training only, and the lab trains without it")

STATED_KEYS: dict[str, dict[str, Stated]] = {
    "cohere2": {
        "layer_switch": Stated("layer types are in the effective config"),
        "order_of_interleaved_layers": Stated("layer types are in the effective config", ("local_attn_first",)),
        "position_embedding_type": Stated("the reference rotates neighbouring channels", ("rope_gptj",)),
        "rotary_pct": Stated("the reference rotates whole heads", (1.0, 1)),
        "use_embedding_sharing": Stated("the head is the embedding", (True,)),
        "use_gated_activation": Stated("the reference's MLP is gated", (True,)),
        "use_parallel_block": Stated("the reference's block is parallel", (True,)),
        "use_parallel_embedding": Stated("a layout of the publisher's own training code"),
    },
    "deepseek_v3": {
        "aux_loss_alpha": Stated("the publisher's training loss"),
        "ep_size": Stated("how the publisher spread the experts"),
        "moe_layer_freq": Stated("every layer after the dense ones is a mixture", (1,)),
        "scoring_func": Stated("the reference's router is a sigmoid", ("sigmoid",)),
        "seq_aux": Stated("the publisher's training loss"),
        "topk_method": Stated("the reference corrects the choice by a bias and limits it to groups", ("noaux_tc",)),
    },
    "gemma2": {
        "hidden_act": Stated("the legacy name of hidden_activation, which the reference reads"),
        "sliding_window_size": Stated("the legacy name of sliding_window", same_as="sliding_window"),
    },
    "gemma3_text": {"sliding_window_pattern": Stated("layer types are in the effective config")},
    "gpt2": {"n_ctx": Stated("the legacy name of n_positions", same_as="n_positions")},
    "gpt_neox": {"attention_probs_dropout_prob": _DROPOUT, "hidden_dropout_prob": _DROPOUT},
    "gpt_oss": {
        "experts_per_token": Stated("the legacy name of num_experts_per_tok", same_as="num_experts_per_tok"),
        "initial_context_length": Stated("the rope table's original_max_position_embeddings holds it"),
    },
    "llama": {"rope_interleaved": Stated("the reference rotates halves", (False,))},
    "llama4_text": {"for_llm_compression": Stated("a mark of the publisher", (False,))},
    "mamba2": {
        "intermediate_size": Stated("the reference takes expand times hidden_size; shapes would tell"),
        "norm_before_gate": Stated("the reference's norm comes after the gate, whatever this says"),
        "rms_norm": Stated("the reference's gated norm is always there", (True,)),
    },
    "phi3": {"attention_bias": Stated("the reference's attention has no bias", (False,))},
    "qwen2": {"use_mrope": Stated("positions are those of text", (False,))},
    "qwen3_moe": {"max_window_layers": Stated("the reference's window is on or off for all layers")},
    "qwen3_next": {"use_sliding_window": Stated("the reference has no windows", (False,))},
    "smollm3": {"max_window_layers": Stated("layer types are in the effective config")},
}
"""model_type -> key -> what it states."""
