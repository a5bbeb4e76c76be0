"""A reference decoding through the cache that it makes itself."""

import inspect


def decode_in_pieces(model, tokens, pieces, attention_mask=None) -> list:
    """The reference's logits of tokens (torch [batch, length]) given in pieces of these lengths, each with the cache that the one before left.

    attention_mask: [batch, length], 0 at padding; None: no padding. Returns one torch tensor [batch, piece, vocab] per piece. Raises what the model raises,
    ValueError when it returns no cache.
    """
    import torch
    from transformers.cache_utils import Cache

    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    name = next((name for name in ("cache", "past_key_values", "cache_params", "state") if name in names), "cache")
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape[0], -1) if attention_mask is None else (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache, start, found = None, 0, []
    for piece in pieces:
        end = start + piece
        more = {} if cache is None else {name: cache}
        if "position_ids" in names:
            more["position_ids"] = positions[:, start:end]
        if attention_mask is not None:
            more["attention_mask"] = attention_mask[:, :end]
        outputs = model(input_ids=tokens[:, start:end], use_cache=True, **more)
        cache = next((value for value in outputs.values() if isinstance(value, Cache)), outputs.get(name))
        if cache is None:
            raise ValueError("the model returns no cache")
        found.append(outputs.logits)
        start = end
    return found


def decode_with_cache(model, tokens, prompt: int = 7) -> list:
    """A prompt, then the rest of the tokens one by one. Raises as `decode_in_pieces` does."""
    return decode_in_pieces(model, tokens, [prompt] + [1] * (tokens.shape[1] - prompt))
