"""Qwen3 mixture of experts. Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`.

Unusual: Qwen3's attention over a mixture of experts: softmax over all experts, then top-k, renormalised only with `norm_topk_prob`; layers named in
`mlp_only_layers` or skipped by `decoder_sparse_step` are dense and wider; a window, when the config has one, holds for every layer.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.activations import activation
from labkit.layers.attention import Tokens, locate_tokens
from labkit.layers.cache import DecoderCache, KVCache
from labkit.layers.linear import embed, linear
from labkit.layers.loss import load_balancing_loss
from labkit.layers.moe import apply_experts, on_local_experts, routing_statistics
from labkit.layers.norms import RMSNorm
from labkit.layers.outputs import pack_outputs
from labkit.layers.plan import LayerPlan
from labkit.layers.precision import widen
from labkit.layers.rope import Rope, rope_table
from labkit.layers.sharding import Sharding, construction, default_mesh
from labkit.layers.stack import make_decoder, run_decoder
from labkit.layers.tags import tag
from labkit.models.config import DecoderConfig
from labkit.models.llama.modeling_llama import LlamaMLP
from labkit.models.qwen3.modeling_qwen3 import Qwen3Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """`Qwen3MoeConfig` of transformers; `rope` is its `rope_parameters`. `sliding_window` is None unless `use_sliding_window`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    router_aux_loss_coef: float
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    sliding_window: int | None
    tie_word_embeddings: bool
    rope: Rope

    mlp_bias: ClassVar[bool] = False
    IRRELEVANT = {
        "use_sliding_window": "the installed config class has applied it to sliding_window",
        "max_window_layers": "this reference has one window for all layers",
    }

    @classmethod
    def from_hf(cls, hf) -> "Qwen3MoeConfig":
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        rope = Rope.from_parameters(hf["rope_parameters"], head_dim=head_dim, max_position_embeddings=hf["max_position_embeddings"])
        num_experts = hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]
        return cls(**{**cls.fields_from_hf(hf), "head_dim": head_dim, "num_experts": num_experts}, rope=rope)

    @property
    def plan(self) -> LayerPlan:
        sparse = [i not in self.mlp_only_layers and self.num_experts > 0 and (i + 1) % self.decoder_sparse_step == 0 for i in range(self.num_hidden_layers)]
        return LayerPlan.from_kinds(["moe" if is_sparse else "dense" for is_sparse in sparse])


class Qwen3MoeSharding(Sharding):
    """The base mapping as it is."""

    @classmethod
    def for_mesh(cls, config: Qwen3MoeConfig, mesh) -> "Qwen3MoeSharding":
        sizes = dict(
            vocab_size=config.vocab_size, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, num_experts=config.num_experts
        )
        return cls(dict(mesh.shape), **sizes)


class Qwen3MoeTopKRouter(nnx.Module):
    """Softmax over all experts in at least float32, then the top-k. [tokens, hidden] -> logits [tokens, experts], weights and indices [tokens, top_k],
    probabilities."""

    def __init__(self, config, *, sharding, rngs):
        self.config = config
        initial = nnx.initializers.normal(stddev=config.hidden_size**-0.5)(rngs.params(), (config.hidden_size, config.num_experts), config.param_dtype)
        self.kernel = nnx.Param(initial, out_sharding=sharding.weight("mlp.gate.kernel", ("embed", None), initial.shape))

    def __call__(self, x):
        logits = x @ self.kernel[...].astype(x.dtype)
        probabilities = jax.nn.softmax(widen(logits), -1)
        weights, indices = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        return logits, tag(weights.astype(logits.dtype), "weights"), tag(indices, "indices"), probabilities


class Qwen3MoeExperts(nnx.Module):
    """Gated experts. gate_up_proj [experts, hidden, 2, intermediate], gate before up; down_proj [experts, intermediate, hidden]."""

    def __init__(self, config, *, sharding, rngs):
        shapes = {
            "gate_up_proj": ((config.num_experts, config.hidden_size, 2, config.moe_intermediate_size), ("experts", "embed_exp", None, "mlp")),
            "down_proj": ((config.num_experts, config.moe_intermediate_size, config.hidden_size), ("experts", "mlp", "embed_exp")),
        }
        for name, (shape, axes) in shapes.items():
            initial = nnx.initializers.normal(stddev=shape[1] ** -0.5)(rngs.params(), shape, config.param_dtype)
            setattr(self, name, nnx.Param(initial, out_sharding=sharding.weight(f"mlp.experts.{name}", axes, shape)))
        self.act_fn = activation(config.hidden_act)

    @on_local_experts
    def __call__(self, x, indices, weights):
        return apply_experts(x, indices, weights, self.gate_up_proj, self.down_proj, self.act_fn)


class Qwen3MoeSparseMoeBlock(nnx.Module):
    """Router and experts. [batch, length, hidden] -> the same, and what the load-balancing loss needs of this layer."""

    def __init__(self, config, *, sharding, rngs):
        self.gate = Qwen3MoeTopKRouter(config, sharding=sharding, rngs=rngs)
        self.experts = Qwen3MoeExperts(config, sharding=sharding, rngs=rngs)

    def __call__(self, x, tokens: Tokens):
        flat = x.reshape(-1, x.shape[-1])
        _, weights, indices, probabilities = self.gate(flat)
        out = self.experts(flat, indices, weights).reshape(x.shape)
        return out, routing_statistics(probabilities, indices, (tokens.segment_ids != 0).reshape(-1))


class Qwen3MoeDecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where the mlp is a mixture or, in layers of kind "dense", a plain one."""

    def __init__(self, config, kind: str, *, sharding, rngs):
        norm = dict(eps=config.rms_norm_eps, param_dtype=config.param_dtype, metadata={"out_sharding": sharding.weight("norm.weight", ("norm",))})
        self.config, self.sharding, self.kind = config, sharding, kind
        self.self_attn = Qwen3Attention(config, sharding=sharding, rngs=rngs)
        self.mlp = (Qwen3MoeSparseMoeBlock if kind == "moe" else LlamaMLP)(config, sharding=sharding, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)

    def __call__(self, x, *, tokens, rope, cache):
        attended, cache = self.self_attn(self.input_layernorm(x), tokens=tokens, rope=rope, window=self.config.sliding_window, cache=cache)
        x = x + attended
        normed, aux = self.post_attention_layernorm(x), {}
        if self.kind == "moe":
            out, aux = self.mlp(normed, tokens)
        else:
            out = self.mlp(normed)
        return self.sharding.constrain(x + out, "hidden", ("batch", "length", "embed")), cache, aux


class Qwen3MoeModel(nnx.Module):
    """The decoder with its head. See `__call__`."""

    def __init__(self, config: Qwen3MoeConfig, *, sharding: Qwen3MoeSharding, mesh, rngs: nnx.Rngs):
        self.config, self.sharding, self.mesh = config, sharding, mesh
        parts = dict(config=config, sharding=sharding, rngs=rngs)
        self.embed_tokens = embed(config.vocab_size, config.hidden_size, "embed_tokens", **parts)
        self.layers = make_decoder(config.plan, lambda kind, rngs: Qwen3MoeDecoderLayer(config, kind, sharding=sharding, rngs=rngs), rngs)
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, param_dtype=config.param_dtype, metadata={"out_sharding": sharding.weight("norm.weight", ("norm",))}
        )
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size, ("embed", "vocab"), "lm_head", **parts)

    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):
        """tokens int [batch, length] -> logits [batch, length, vocab][, aux][, cache] (design, "Family slice")."""
        config = self.config
        located, after = locate_tokens(tokens, positions, segment_ids, cache)
        x = self.sharding.constrain(self.embed_tokens(tokens), "embed_tokens", ("batch", "length", "embed"))
        shared = dict(tokens=located, rope=rope_table(located.positions, config.rope, config.dtype))
        x, layer_caches, aux = run_decoder(
            config.plan, self.layers, x, per_layer={}, cache=None if cache is None else cache.layers, scan=scan, remat=remat, **shared
        )
        x = self.norm(x)
        logits = tag(self.embed_tokens.attend(x), "lm_head") if config.tie_word_embeddings else self.lm_head(x)
        logits = self.sharding.constrain(logits, "logits", ("batch", "length", "vocab"))
        if after is not None:
            after = dataclasses.replace(after, layers=layer_caches)
        if aux:
            aux["moe_lb_loss"] = load_balancing_loss(aux["tokens_per_expert"], aux["router_probability"])
        return pack_outputs(logits, aux, after, return_aux=return_aux)

    def init_cache(self, batch: int, capacity: int) -> DecoderCache:
        """An empty cache for `capacity` tokens per row, in the model's dtype."""
        c = self.config
        layers = [[KVCache.empty(s.repeats, batch, capacity, c.num_key_value_heads, c.head_dim, c.dtype) for _ in s.cycle] for s in c.plan.segments]
        return DecoderCache.empty(layers, batch, capacity)


def create_qwen3_moe_model(
    config: Qwen3MoeConfig, *, rngs: nnx.Rngs, mesh: jax.sharding.Mesh | None = None, quant_mode_str: str | None = None
) -> Qwen3MoeModel:
    """A model with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`.

    quant_mode_str is accepted for the engine's sake and must be None or empty: raises ValueError otherwise.
    """
    if quant_mode_str:
        raise ValueError(f"quant_mode_str={quant_mode_str!r}: this slice has no quantized form")
    mesh = default_mesh() if mesh is None else mesh
    with construction(mesh):
        return Qwen3MoeModel(config, sharding=Qwen3MoeSharding.for_mesh(config, mesh), mesh=mesh, rngs=rngs)
