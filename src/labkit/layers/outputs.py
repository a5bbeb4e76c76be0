"""What a decoder's call returns."""


def pack_outputs(logits, aux, cache, *, return_aux: bool):
    """`logits[, aux][, cache]`: aux when asked for, the new cache when one was given."""
    results = [logits]
    if return_aux:
        results.append(aux)
    if cache is not None:
        results.append(cache)
    return results[0] if len(results) == 1 else tuple(results)
