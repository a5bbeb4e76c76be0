"""Bodies that are known by fingerprint and become a call into `layers/`."""

import ast
import hashlib

ATTENTION = "labkit.layers.attention"


def body_fingerprint(folded) -> str:
    """A hash of a function's simplified body, names of parameters and locals aside."""
    names: dict[str, str] = {}

    class Rename(ast.NodeTransformer):
        def visit_Name(inner, node):
            bound = names.get(node.id)
            return ast.Name(bound, node.ctx) if bound else node

    import copy

    node = copy.deepcopy(folded.node)
    for arg in [*folded.original.args.args, *folded.original.args.kwonlyargs]:
        names.setdefault(arg.arg, f"a{len(names)}")
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.setdefault(inner.id, f"v{len(names)}")
    body = "\n".join(ast.unparse(Rename().visit(s)) for s in node.body)
    for spelled, plain in ((".contiguous()", ""), ("nn.functional.softmax", "F.softmax"), ("torch.nn.functional", "F"), ("if a4 is not None:\n    ", "")):
        body = body.replace(spelled, plain)
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def _arguments(rewriter, node, target) -> dict[str, str]:
    bound = dict(zip(target.parameters, node.args)) | {k.arg: k.value for k in node.keywords}
    return {name: rewriter.expr(value) for name, value in bound.items()}


def _eager(rewriter, node, target) -> str:
    given = _arguments(rewriter, node, target)
    function = rewriter.use(ATTENTION, "eager_attention")
    q, k, v = given["query"], given["key"], given["value"]
    return f"{function}({q}, {k}, {v}, {given['attention_mask']}, scaling={given['scaling']})"


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


class _Text:
    def __init__(self, text):
        self.node = self.original = ast.parse(text).body[0]


KNOWN_BODIES = {body_fingerprint(_Text(_PLAIN)): _eager}
"""fingerprint of a simplified body -> function(rewriter, call, target) -> text."""
