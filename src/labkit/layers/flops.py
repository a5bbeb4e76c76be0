"""Floating-point operations of a training step, from shapes. One multiply-add counts as two; backward counts as twice forward."""

import dataclasses
import logging
import re
from collections import Counter

import numpy as np
from flax import nnx

log_flops = logging.getLogger("labkit.flops")
_LISTED_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+")
_ATTENTION = re.compile(r"(^|[._])(?<!linear_)(attn|attention)([._]|$)")


@dataclasses.dataclass(frozen=True)
class TrainingFlops:
    """Tera-operations of one training step on one device: products with weights, attention products, and their sum."""

    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def __str__(self):
        return f"{self.total:.3f} TFLOP per step and device: {self.weights:.3f} in products with weights, {self.attention:.3f} in attention"


def visible_pairs(length: int, window: int | None = None) -> int:
    """Query-key pairs under a causal mask of `length` tokens, with or without a sliding window."""
    reach = np.minimum(np.arange(length) + 1, length if window is None else window)
    return int(reach.sum())


def training_flops(*, tokens: int, sequences: int, active_parameters: int, pairs: int, heads: int, head_dim: int) -> TrainingFlops:
    """tokens: per step and device. sequences: how many. active_parameters: weights each token is multiplied with, head included. pairs: query-key pairs of one
    sequence summed over layers; heads and head_dim: of one layer."""
    return TrainingFlops(weights=6 * tokens * active_parameters / 1e12, attention=12 * sequences * pairs * heads * head_dim / 1e12)


def decoder_training_flops(config, create, *, batch: int, length: int, experts_per_token: int | None = None, log: bool = True) -> TrainingFlops:
    """Operations of one training step of any decoder, from its parameters' shapes and its config.

    create(config, rngs=...) -> model. experts_per_token: how many of its layer's experts a token visits. Raises ValueError where the config has heads and no
    size that tells theirs.
    """
    abstract = nnx.eval_shape(lambda: create(config, rngs=nnx.Rngs(0)))
    shapes = {".".join(map(str, path)): leaf.get_raw_value().shape for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param))}
    heads, head_dim = attention_heads(config)
    flops = training_flops(
        tokens=batch * length,
        sequences=batch,
        active_parameters=active_parameters(shapes, config.plan, vocab_size=getattr(config, "vocab_size", None), experts_per_token=experts_per_token),
        pairs=sum(attention_pairs(config, length, attending(shapes, config.plan))) if heads else 0,
        heads=heads,
        head_dim=head_dim,
    )
    if log:
        log_flops.info("%s", flops)
    return flops


def active_parameters(shapes, plan, *, vocab_size: int | None = None, experts_per_token: int | None = None) -> int:
    """Weights that one token is multiplied with: every matrix, tables of embeddings left out, a mixture's experts as many as a token visits.

    shapes: path -> shape of every parameter, layers stacked as `plan` says. A parameter below a module called `experts` holds its experts on the first axis, or
    is one of several `experts.<number>`. vocab_size: where no matrix leads to the vocabulary, its embedding is the head and counts.
    """
    prefixes = tuple(plan.parameter_path(s, p) + "." for s, p, _ in plan.positions())
    modules = Counter(name.rpartition(".")[0] for name in {match[0] for match in map(_LISTED_EXPERT.match, shapes) if match})
    total, tables, head = 0.0, [], False
    for path, shape in shapes.items():
        row = len(shape) - path.startswith(prefixes)
        if path.split(".")[-1] == "embedding":
            tables.append(shape)
            continue
        if row < 2:
            continue
        count = float(np.prod(shape))
        if experts_per_token is not None and (match := _LISTED_EXPERT.match(path)):
            count *= experts_per_token / modules[match[0].rpartition(".")[0]]
        elif experts_per_token is not None and "experts" in path.split(".")[:-1]:
            if row < 3:  # a bias per expert
                continue
            count *= experts_per_token / shape[len(shape) - row]
        head |= row == len(shape) and vocab_size in shape
        total += count
    tied = [] if head else [float(np.prod(shape)) for shape in tables if shape[0] == vocab_size]
    return round(total + max(tied, default=0.0))


def attending(shapes, plan) -> list[bool]:
    """For each layer whether its parameters are those of attention, by name; all of them where no name tells."""
    places = {(s, p): plan.parameter_path(s, p) + "." for s, p, _ in plan.positions()}
    found = {place: any(_ATTENTION.search(path) for path in shapes if path.startswith(prefix)) for place, prefix in places.items()}
    return [found[plan.locate(layer)[:2]] or not any(found.values()) for layer in range(plan.num_layers)]


def attention_heads(config) -> tuple[int, float]:
    """(query heads, their dimension) of a config by the field's usual names, (0, 0) without attention. Where queries and values differ in size, the mean."""

    def first(*names):
        return next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)

    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
    if heads is None:
        return 0, 0
    if isinstance(heads, tuple):
        heads = max(heads)
    query, value = first("qk_head_dim"), first("v_head_dim")
    if query is None and first("qk_nope_head_dim") is not None:
        query = config.qk_nope_head_dim + (first("qk_rope_head_dim") or 0)
    if query is not None:
        return heads, (query + (query if value is None else value)) / 2
    head_dim, width = first("head_dim", "kv_channels"), first("hidden_size", "n_embd", "d_model", "n_embed", "embed_dim", "dim")
    if head_dim is None and width is None:
        raise ValueError("the config tells neither the size of a head nor the hidden size")
    return heads, width // heads if head_dim is None else head_dim


def attention_pairs(config, length: int, attends=None) -> list[int]:
    """Query-key pairs of every layer of `config.plan`: its kind in `layer_types` or `layers_block_type` tells a window, a chunk, or no attention at all.

    attends: one truth value per layer, for configs without either.
    """
    count = config.plan.num_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", None) is not False else None
    if kinds is None:
        return [visible_pairs(length, window) if attends_here else 0 for attends_here in attends or [True] * count]
    pairs = []
    for kind in kinds[:count]:
        if "sliding" in kind or "local" in kind:
            pairs.append(visible_pairs(length, getattr(config, "sliding_window", None)))
        elif "chunk" in kind and getattr(config, "attention_chunk_size", None):
            whole, rest = divmod(length, config.attention_chunk_size)
            pairs.append(whole * visible_pairs(config.attention_chunk_size) + visible_pairs(rest))
        elif ("attention" in kind and "linear" not in kind) or kind == "hybrid":
            pairs.append(visible_pairs(length))
        else:
            pairs.append(0)
    return pairs
