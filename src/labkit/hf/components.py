"""Parameters and bytes by component, from tensor names and headers."""

import re
from dataclasses import dataclass

from labkit.hf.layer_names import OTHER_TOWER, is_mtp, layer_count
from labkit.hf.source import Source

COMPONENTS = ("embedding", "attention", "recurrence", "mlp", "experts", "router", "norm", "head", "MTP", "other")
_ROUTER = re.compile(r"(^|\.)(gate|router|wg|shared_expert_gate|shared_expert_gating|gate_weight|e_score_correction_bias|expert_bias|correction_bias)(\.|$)")
_ATTENTION = re.compile(r"attn|attention|(^|\.)(q_proj|k_proj|v_proj|o_proj|qkv_proj|c_attn|query_key_value|Wqkv|sinks)(\.|$)")
_RECURRENCE = re.compile(r"mamba|mixer|ssm|linear_attn|recurrent|conv|rwkv|time_mix|delta|A_log|dt_bias|xlstm|mlstm")
_NORM = re.compile(r"norm|(^|[._])ln(_|\d|\.|$)|layernorm|ln_f", re.IGNORECASE)
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|wpe|word_embeddings?|embed_in|tok_embeddings|embed_positions|position_embeddings?|token_embedding|embeddings?|embed_tokens_per_layer)\."
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.(weight|bias)$")
_MLP = re.compile(r"mlp|feed_forward|ffn|(^|\.)(fc1|fc2|fc_in|fc_out|w1|w2|w3|gate_proj|up_proj|down_proj|dense_h_to_4h|dense_4h_to_h|c_fc)(\.|$)")


@dataclass(frozen=True)
class Component:
    """A row of the table. dtypes: safetensors names, most bytes first."""

    component: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]


def classify(name: str, layers: int | None = None) -> str:
    """The component of a tensor, by its name. layers: the number of decoder layers, to tell multi-token-prediction layers stored behind them."""
    if is_mtp(name, layers):
        return "MTP"
    if OTHER_TOWER.search(name):
        return "other"
    owner = name.rsplit(".", 2)[-2] if name.count(".") >= 1 else name
    if _NORM.search(owner) or _NORM.search(name.rsplit(".", 1)[-1]):
        return "norm"
    if _HEAD.search(name) and not re.search(r"(layers|h|blocks)\.\d+\.", name):
        return "head"
    if _EMBEDDING.search(name):
        return "embedding"
    inside_attention = _ATTENTION.search(name)
    if _ROUTER.search(name) and not inside_attention:
        return "router"
    if "expert" in name:
        return "experts"
    if _RECURRENCE.search(name):
        return "recurrence"
    if inside_attention:
        return "attention"
    return "mlp" if _MLP.search(name) else "other"


def parameters_by_component(source: Source) -> list[Component]:
    """One row per component that has tensors, in a fixed order. A tied head has no tensor and no row."""
    layers = layer_count(source.config.described)
    groups: dict[str, list] = {}
    for name, info in source.tensors.items():
        groups.setdefault(classify(name, layers), []).append(info)
    rows = []
    for component in COMPONENTS:
        infos = groups.get(component)
        if not infos:
            continue
        by_dtype: dict[str, int] = {}
        for info in infos:
            by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
        dtypes = tuple(sorted(by_dtype, key=lambda dtype: (-by_dtype[dtype], dtype)))
        rows.append(Component(component, len(infos), sum(info.size for info in infos), sum(info.nbytes for info in infos), dtypes))
    return rows
