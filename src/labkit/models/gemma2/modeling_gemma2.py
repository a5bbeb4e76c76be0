"""Gemma 2. Reference: transformers `models/gemma2/modeling_gemma2.py`.

Unusual: norms multiply by 1 + weight, and each sublayer has one before and one after it; tanh softcaps on attention scores and on the logits; by default even
layers see a window and odd ones everything; the score scale comes from `query_pre_attn_scalar`; embeddings are multiplied by sqrt(hidden), rounded to the
weight dtype.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.attention import NO_WINDOW, attend, causal_mask, locate_tokens
from labkit.layers.cache import DecoderCache, KVCache
from labkit.layers.linear import Embed, linear
from labkit.layers.norms import UnitOffsetRMSNorm
from labkit.layers.outputs import pack_outputs
from labkit.layers.plan import LayerPlan
from labkit.layers.precision import constant
from labkit.layers.rope import Rope, apply_rope, rope_table
from labkit.layers.sharding import Sharding, construction, default_mesh
from labkit.layers.stack import make_decoder, run_decoder
from labkit.layers.tags import tag
from labkit.models.config import DecoderConfig
from labkit.models.llama.modeling_llama import LlamaAttention, LlamaMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """`Gemma2Config` of transformers; `rope` is its `rope_parameters`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    query_pre_attn_scalar: float
    sliding_window: int | None
    layer_types: tuple[str, ...]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    tie_word_embeddings: bool
    rope: Rope

    mlp_bias: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, hf) -> "Gemma2Config":
        if hf.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention: this slice is a causal decoder")
        rope = Rope.from_parameters(hf["rope_parameters"], head_dim=hf["head_dim"], max_position_embeddings=hf["max_position_embeddings"])
        return cls(**cls.fields_from_hf(hf), rope=rope)

    @property
    def hidden_act(self) -> str:
        """The name under which other families keep `hidden_activation`."""
        return self.hidden_activation

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan.from_kinds(["decoder"] * self.num_hidden_layers, variants=self.layer_types)

    @property
    def windows(self) -> np.ndarray:
        """int32 [num_hidden_layers]: how far back each layer sees."""
        window = NO_WINDOW if self.sliding_window is None else self.sliding_window
        return np.asarray([window if kind == "sliding_attention" else NO_WINDOW for kind in self.layer_types], np.int32)


class Gemma2Sharding(Sharding):
    """The base mapping as it is."""

    @classmethod
    def for_mesh(cls, config: Gemma2Config, mesh) -> "Gemma2Sharding":
        return cls(dict(mesh.shape), vocab_size=config.vocab_size, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)


class Gemma2TextScaledWordEmbedding(Embed):
    """Token embeddings times sqrt(hidden); `attend`, the tied head, is without the factor."""

    def __init__(self, config, *, sharding, rngs):
        metadata = {"out_sharding": sharding.weight("embed_tokens.embedding", ("vocab", "embed"), (config.vocab_size, config.hidden_size))}
        super().__init__(config.vocab_size, config.hidden_size, dtype=config.dtype, param_dtype=config.param_dtype, embedding_metadata=metadata, rngs=rngs)

    def __call__(self, tokens):
        embedded = super().__call__(tokens)
        return embedded * constant(self.features**0.5, embedded.dtype)


class Gemma2Attention(LlamaAttention):
    """Llama's attention with a window, a softcap on scores and its own scale. [batch, length, hidden] -> the same, and the layer's cache."""

    def __call__(self, x, *, tokens, rope, window, cache):
        config = self.config
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, -1, config.head_dim)
        k = self.k_proj(x).reshape(batch, length, -1, config.head_dim)
        v = self.v_proj(x).reshape(batch, length, -1, config.head_dim)
        q, k = tag(apply_rope(q, *rope), "q_rope"), tag(apply_rope(k, *rope), "k_rope")
        if cache is not None:
            cache = cache.write(k, v, tokens.slots[0])
            k, v = cache.key, cache.value
        out = attend(q, k, v, causal_mask(tokens, window), scale=config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping, causal=True)
        return self.o_proj(out.reshape(batch, length, -1)), cache


class Gemma2DecoderLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config, *, sharding, rngs):
        norm = dict(eps=config.rms_norm_eps, param_dtype=config.param_dtype, metadata={"out_sharding": sharding.weight("norm.weight", ("norm",))})
        self.sharding = sharding
        self.self_attn = Gemma2Attention(config, sharding=sharding, rngs=rngs)
        self.mlp = LlamaMLP(config, sharding=sharding, rngs=rngs)
        self.input_layernorm = UnitOffsetRMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = UnitOffsetRMSNorm(config.hidden_size, **norm)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, **norm)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, **norm)

    def __call__(self, x, *, tokens, rope, window, cache):
        attended, cache = self.self_attn(self.input_layernorm(x), tokens=tokens, rope=rope, window=window, cache=cache)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return self.sharding.constrain(x, "hidden", ("batch", "length", "embed")), cache, {}


class Gemma2Model(nnx.Module):
    """The decoder with its head. See `__call__`."""

    def __init__(self, config: Gemma2Config, *, sharding: Gemma2Sharding, mesh, rngs: nnx.Rngs):
        self.config, self.sharding, self.mesh = config, sharding, mesh
        parts = dict(config=config, sharding=sharding, rngs=rngs)
        self.embed_tokens = Gemma2TextScaledWordEmbedding(config, sharding=sharding, rngs=rngs)
        self.layers = make_decoder(config.plan, lambda kind, rngs: Gemma2DecoderLayer(config, sharding=sharding, rngs=rngs), rngs)
        self.norm = UnitOffsetRMSNorm(
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
            config.plan, self.layers, x, per_layer={"window": config.windows}, cache=None if cache is None else cache.layers, scan=scan, remat=remat, **shared
        )
        x = self.norm(x)
        logits = tag(self.embed_tokens.attend(x), "lm_head") if config.tie_word_embeddings else self.lm_head(x)
        if config.final_logit_softcapping is not None:
            cap = constant(config.final_logit_softcapping, logits.dtype)
            logits = jnp.tanh(logits / cap) * cap
        logits = self.sharding.constrain(logits, "logits", ("batch", "length", "vocab"))
        if after is not None:
            after = dataclasses.replace(after, layers=layer_caches)
        return pack_outputs(logits, aux, after, return_aux=return_aux)

    def init_cache(self, batch: int, capacity: int) -> DecoderCache:
        """An empty cache for `capacity` tokens per row, in the model's dtype."""
        c = self.config
        layers = [[KVCache.empty(s.repeats, batch, capacity, c.num_key_value_heads, c.head_dim, c.dtype) for _ in s.cycle] for s in c.plan.segments]
        return DecoderCache.empty(layers, batch, capacity)


def create_gemma2_model(config: Gemma2Config, *, rngs: nnx.Rngs, mesh: jax.sharding.Mesh | None = None, quant_mode_str: str | None = None) -> Gemma2Model:
    """A model with random parameters placed on `mesh` (one device by default); abstract under `nnx.eval_shape`.

    quant_mode_str is accepted for the engine's sake and must be None or empty: raises ValueError otherwise.
    """
    if quant_mode_str:
        raise ValueError(f"quant_mode_str={quant_mode_str!r}: this slice has no quantized form")
    mesh = default_mesh() if mesh is None else mesh
    with construction(mesh):
        return Gemma2Model(config, sharding=Gemma2Sharding.for_mesh(config, mesh), mesh=mesh, rngs=rngs)
