"""Llama: the plain decoder that other slices are compared with. Reference: transformers `models/llama/modeling_llama.py`.

Unusual: nothing. Pre-norm blocks, grouped-query attention over full causal context, split-half rotary embeddings, a gated SiLU MLP; biases and a tied head
by config.
"""

import dataclasses

import jax
from flax import nnx

from labkit.layers.activations import activation
from labkit.layers.attention import attend, causal_mask, locate_tokens
from labkit.layers.cache import DecoderCache, KVCache
from labkit.layers.linear import embed, linear
from labkit.layers.norms import RMSNorm
from labkit.layers.outputs import pack_outputs
from labkit.layers.plan import LayerPlan
from labkit.layers.rope import Rope, apply_rope, rope_table
from labkit.layers.sharding import Sharding, construction, default_mesh
from labkit.layers.stack import make_decoder, run_decoder
from labkit.layers.tags import tag
from labkit.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """`LlamaConfig` of transformers; `rope` is its `rope_parameters`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: Rope

    @classmethod
    def from_hf(cls, hf) -> "LlamaConfig":
        rope = Rope.from_parameters(hf["rope_parameters"], head_dim=hf["head_dim"], max_position_embeddings=hf["max_position_embeddings"])
        return cls(**cls.fields_from_hf(hf), rope=rope)

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan.from_kinds(["full_attention"] * self.num_hidden_layers)


class LlamaSharding(Sharding):
    """The base mapping as it is."""

    @classmethod
    def for_mesh(cls, config: LlamaConfig, mesh) -> "LlamaSharding":
        return cls(dict(mesh.shape), vocab_size=config.vocab_size, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)


class LlamaMLP(nnx.Module):
    """down(act(gate(x)) * up(x)). [batch, length, hidden] -> the same."""

    def __init__(self, config, *, sharding, rngs):
        parts = dict(config=config, sharding=sharding, rngs=rngs, use_bias=config.mlp_bias)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, ("embed", "mlp"), "mlp.gate_proj", **parts)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, ("embed", "mlp"), "mlp.up_proj", **parts)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, ("mlp", "embed"), "mlp.down_proj", **parts)
        self.act_fn = activation(config.hidden_act)

    def __call__(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nnx.Module):
    """Grouped-query attention with rotary positions. [batch, length, hidden] -> the same, and the layer's cache."""

    def __init__(self, config, *, sharding, rngs):
        parts = dict(config=config, sharding=sharding, rngs=rngs, use_bias=config.attention_bias)
        width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.config = config
        self.q_proj = linear(config.hidden_size, width, ("embed", "heads"), "self_attn.q_proj", **parts)
        self.k_proj = linear(config.hidden_size, kv_width, ("embed", "kv_heads"), "self_attn.k_proj", **parts)
        self.v_proj = linear(config.hidden_size, kv_width, ("embed", "kv_heads"), "self_attn.v_proj", **parts)
        self.o_proj = linear(width, config.hidden_size, ("heads", "embed"), "self_attn.o_proj", **parts)

    def __call__(self, x, *, tokens, rope, cache):
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, -1, self.config.head_dim)
        k = self.k_proj(x).reshape(batch, length, -1, self.config.head_dim)
        v = self.v_proj(x).reshape(batch, length, -1, self.config.head_dim)
        q, k = tag(apply_rope(q, *rope), "q_rope"), tag(apply_rope(k, *rope), "k_rope")
        if cache is not None:
            cache = cache.write(k, v, tokens.slots[0])
            k, v = cache.key, cache.value
        out = attend(q, k, v, causal_mask(tokens), scale=self.config.head_dim**-0.5, causal=True)
        return self.o_proj(out.reshape(batch, length, -1)), cache


class LlamaDecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, *, sharding, rngs):
        norm = dict(eps=config.rms_norm_eps, param_dtype=config.param_dtype, metadata={"out_sharding": sharding.weight("norm.weight", ("norm",))})
        self.sharding = sharding
        self.self_attn = LlamaAttention(config, sharding=sharding, rngs=rngs)
        self.mlp = LlamaMLP(config, sharding=sharding, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)

    def __call__(self, x, *, tokens, rope, cache):
        attended, cache = self.self_attn(self.input_layernorm(x), tokens=tokens, rope=rope, cache=cache)
        x = x + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.sharding.constrain(x, "hidden", ("batch", "length", "embed")), cache, {}


class LlamaModel(nnx.Module):
    """The decoder with its head. See `__call__`."""

    def __init__(self, config: LlamaConfig, *, sharding: LlamaSharding, mesh, rngs: nnx.Rngs):
        self.config, self.sharding, self.mesh = config, sharding, mesh
        parts = dict(config=config, sharding=sharding, rngs=rngs)
        self.embed_tokens = embed(config.vocab_size, config.hidden_size, "embed_tokens", **parts)
        self.layers = make_decoder(config.plan, lambda kind, rngs: LlamaDecoderLayer(config, sharding=sharding, rngs=rngs), rngs)
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
        return pack_outputs(logits, aux, after, return_aux=return_aux)

    def init_cache(self, batch: int, capacity: int) -> DecoderCache:
        """An empty cache for `capacity` tokens per row, in the model's dtype."""
        c = self.config
        layers = [[KVCache.empty(s.repeats, batch, capacity, c.num_key_value_heads, c.head_dim, c.dtype) for _ in s.cycle] for s in c.plan.segments]
        return DecoderCache.empty(layers, batch, capacity)


def create_llama_model(config: LlamaConfig, *, rngs: nnx.Rngs, mesh: jax.sharding.Mesh | None = None, quant_mode_str: str | None = None) -> LlamaModel:
    """A model with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`.

    quant_mode_str is accepted for the engine's sake and must be None or empty: raises ValueError otherwise.
    """
    if quant_mode_str:
        raise ValueError(f"quant_mode_str={quant_mode_str!r}: this slice has no quantized form")
    mesh = default_mesh() if mesh is None else mesh
    with construction(mesh):
        return LlamaModel(config, sharding=LlamaSharding.for_mesh(config, mesh), mesh=mesh, rngs=rngs)
