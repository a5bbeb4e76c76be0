"""Bodies that are known by fingerprint and become a call into `layers/`."""

import ast
import hashlib
import re

from labkit.port.refusal import CannotTranslate

ATTENTION = "labkit.layers.attention"


def body_fingerprint(folded) -> str:
    """A hash of a function's simplified body. Names count: they are the field's, the same in every file."""
    body = "\n".join(ast.unparse(s) for s in folded.node.body)
    for spelled, plain in ((".contiguous()", ""), ("nn.functional.softmax", "F.softmax"), ("torch.nn.functional", "F")):
        body = body.replace(spelled, plain)
    body = re.sub(r"if attention_mask is not None:\n\s+(attn_weights = attn_weights \+ attention_mask)", r"\1", body)
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def _arguments(rewriter, node, target) -> dict[str, str]:
    bound = dict(zip(target.parameters, node.args)) | {k.arg: k.value for k in node.keywords}
    return {name: rewriter.expr(value) for name, value in bound.items()}


def _eager(rewriter, node, target) -> str:
    given = _arguments(rewriter, node, target)
    function = rewriter.use(ATTENTION, "eager_attention")
    arrays = ", ".join(given[name] for name in ("query", "key", "value", "attention_mask"))
    if "scaling" not in given:
        raise CannotTranslate("attention called without its scale", node)
    text = f"{function}({arrays}, scaling={given['scaling']}"
    if "softcap" in given:
        text += f", softcap={given['softcap']}"
    if "module.sinks" in ast.unparse(target.node):
        text += f", sinks={rewriter.use('labkit.layers.building', 'read')}({given['module']}.sinks)"
    return text + (", causal=True)" if rewriter.t.causal() else ")")


_PLAIN = """
def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout):
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2)
    return attn_output
"""


_SOFTCAP = _PLAIN.replace(
    "    attn_weights = attn_weights + attention_mask",
    """    if softcap is not None:
        attn_weights = attn_weights / softcap
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * softcap
    attn_weights = attn_weights + attention_mask""",
)
_SINKS = _PLAIN.replace(
    "    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
    """    sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined_logits = torch.cat([attn_weights, sinks], dim=-1)
    combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
    probs = F.softmax(combined_logits, dim=-1, dtype=combined_logits.dtype)
    scores = probs[..., :-1]
    attn_weights = scores.to(value_states.dtype)""",
)
_UNGROUPED = _PLAIN.replace(
    "    key_states = repeat_kv(key, module.num_key_value_groups)\n    value_states = repeat_kv(value, module.num_key_value_groups)\n", ""
)
_UNGROUPED = _UNGROUPED.replace("key_states", "key").replace("value_states", "value")


def _own_scale(text: str) -> str:
    """The body that falls back to a scale of its own: every call gives one, or there is no call by this table."""
    head, _, rest = text.partition("dropout):\n")
    return f"{head}dropout):\n    if scaling is None:\n        scaling = module.head_dim ** -0.5\n{rest}"


class _Text:
    def __init__(self, text):
        self.node = self.original = ast.parse(text).body[0]


_ATTENTIONS = (_PLAIN, _SOFTCAP, _SINKS, _UNGROUPED, *map(_own_scale, (_PLAIN, _SOFTCAP, _UNGROUPED)))
KNOWN_BODIES = {body_fingerprint(_Text(text)): _eager for text in _ATTENTIONS}
"""fingerprint of a simplified body -> function(rewriter, call, target) -> text."""
