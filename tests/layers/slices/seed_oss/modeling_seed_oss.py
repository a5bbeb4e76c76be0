"""Seed-OSS. Reference: transformers `models/seed_oss/modeling_seed_oss.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.layers.activations import activation
from labkit.layers.attention import eager_attention
from labkit.layers.building import create_model
from labkit.layers.decoding import DecoderCall, empty_cache
from labkit.layers.masks import create_causal_mask
from labkit.layers.planning import plan_layers
from labkit.layers.precision import widen
from labkit.layers.rope_types import rope_init
from labkit.layers.sharding import Sharding
from labkit.layers.tags import tag
from labkit.layers.variables import value
from labkit.models.config import TranslatedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOssConfig(TranslatedConfig):
    attention_bias: object = True
    attention_out_bias: object = False
    head_dim: object = None
    hidden_act: object = "silu"
    hidden_size: object = None
    intermediate_size: object = None
    max_position_embeddings: object = None
    mlp_bias: object = False
    num_attention_heads: object = None
    num_hidden_layers: object = None
    num_key_value_heads: object = None
    pad_token_id: object = None
    residual_dropout: object = 0.1
    rms_norm_eps: object = 1e-6
    rope_parameters: object = None
    tie_word_embeddings: object = False
    vocab_size: object = None

    @functools.cached_property
    def plan(self):
        return plan_layers(self.num_hidden_layers, lambda layer_idx, build: SeedOssDecoderLayer(self, layer_idx, build=build), self)


class SeedOssSharding(Sharding):
    pass


class SeedOssRMSNorm(nnx.Module):
    def __init__(self, hidden_size, eps=1e-6, *, build):
        self.weight = build.param(jnp.ones, (hidden_size,), ("norm",), "weight")
        self.variance_epsilon = eps

    def __call__(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = widen(hidden_states)
        variance = jnp.mean(jnp.square(hidden_states), axis=-1, keepdims=True)
        hidden_states = hidden_states * jax.lax.rsqrt(variance + self.variance_epsilon)
        return value(self.weight) * hidden_states.astype(input_dtype)


class SeedOssMLP(nnx.Module):
    def __init__(self, config, *, build):
        self.gate_proj = build.linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, axes=("embed", "mlp"), name="mlp.gate_proj")
        self.up_proj = build.linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, axes=("embed", "mlp"), name="mlp.up_proj")
        self.down_proj = build.linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, axes=("mlp", "embed"), name="mlp.down_proj")
        self.act_fn = activation(config.hidden_act)

    def __call__(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return jnp.concatenate([-x2, x1], axis=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return tag(((q * cos) + (rotate_half(q) * sin)).swapaxes(1, 2), "q_rope").swapaxes(1, 2), tag(
        ((k * cos) + (rotate_half(k) * sin)).swapaxes(1, 2), "k_rope"
    ).swapaxes(1, 2)


class SeedOssAttention(nnx.Module):
    def __init__(self, config, *, build):
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = build.linear(config.hidden_size, width, bias=config.attention_bias, axes=("embed", "heads"), name="self_attn.q_proj")
        self.k_proj = build.linear(config.hidden_size, kv_width, bias=config.attention_bias, axes=("embed", "kv_heads"), name="self_attn.k_proj")
        self.v_proj = build.linear(config.hidden_size, kv_width, bias=config.attention_bias, axes=("embed", "kv_heads"), name="self_attn.v_proj")
        self.o_proj = build.linear(width, config.hidden_size, bias=config.attention_out_bias, axes=("heads", "embed"), name="self_attn.o_proj")

    def __call__(self, hidden_states, position_embeddings, attention_mask, cache):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).reshape(hidden_shape).swapaxes(1, 2)
        key_states = self.k_proj(hidden_states).reshape(hidden_shape).swapaxes(1, 2)
        value_states = self.v_proj(hidden_states).reshape(hidden_shape).swapaxes(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states, value_states = cache.update(key_states, value_states)
        attn_output = eager_attention(query_states, key_states, value_states, attention_mask, scaling=self.scaling)
        return self.o_proj(attn_output.reshape(*input_shape, -1))


class SeedOssDecoderLayer(nnx.Module):
    def __init__(self, config, layer_idx, *, build):
        self.self_attn = SeedOssAttention(config, build=build)
        self.mlp = SeedOssMLP(config, build=build)
        self.input_layernorm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps, build=build)
        self.post_attention_layernorm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps, build=build)

    def __call__(self, hidden_states, attention_mask, position_embeddings, cache):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, cache=cache)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class SeedOssRotaryEmbedding(nnx.Module):
    def __init__(self, config):
        self.config = config

    def __call__(self, x, position_ids):
        inv_freq, attention_scaling = rope_init(self.config, position_ids)
        freqs = position_ids[..., None].astype(inv_freq.dtype) * inv_freq
        emb = jnp.concatenate([freqs, freqs], axis=-1)
        cos = jnp.cos(emb) * attention_scaling
        sin = jnp.sin(emb) * attention_scaling
        return cos.astype(x.dtype), sin.astype(x.dtype)


class SeedOssModel(nnx.Module):
    def __init__(self, config, *, build):
        self.embed_tokens = build.embedding(config.vocab_size, config.hidden_size, name="embed_tokens")
        self.layers = build.layers(config.plan, lambda layer_idx, build: SeedOssDecoderLayer(config, layer_idx, build=build))
        self.norm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps, build=build)
        self.rotary_emb = SeedOssRotaryEmbedding(config)

    def decode(self, input_ids, attention_mask, position_ids, cache):
        inputs_embeds = self.embed_tokens(input_ids)
        causal_mask = create_causal_mask(cache, dtype=inputs_embeds.dtype)
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)

        def layer(decoder_layer, cache, hidden_states):
            return decoder_layer(hidden_states, attention_mask=causal_mask, position_embeddings=position_embeddings, cache=cache)

        hidden_states = cache.run(self.layers, layer, hidden_states)
        return self.norm(hidden_states)


class SeedOssForCausalLM(SeedOssModel):
    def __init__(self, config, *, build):
        super().__init__(config, build=build)
        if not config.tie_word_embeddings:
            self.lm_head = build.linear(config.hidden_size, config.vocab_size, axes=("embed", "vocab"), name="lm_head")

    def __call__(self, tokens, positions=None, segment_ids=None, cache=None, return_aux=False, *, scan=True, remat=None):
        cache = DecoderCall.begin(self, tokens, positions, segment_ids, cache, scan=scan, remat=remat)
        hidden_states = self.decode(tokens, cache.attention_mask, cache.positions, cache)
        logits = tag(self.embed_tokens.attend(hidden_states), "lm_head") if self.config.tie_word_embeddings else self.lm_head(hidden_states)
        return cache.outputs(logits, return_aux=return_aux)

    def init_cache(self, batch, capacity):
        return empty_cache(self, batch, capacity)


def create_seed_oss_model(config, *, rngs, mesh=None, quant_mode_str=None):
    return create_model(SeedOssForCausalLM, config, SeedOssSharding, rngs=rngs, mesh=mesh, quant_mode_str=quant_mode_str)
