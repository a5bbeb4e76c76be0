"""Which fields of a config a slice really reads: traced through one construction and one call, both abstract."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from labkit.models.registry import Family


def traced_reads(family: Family, config) -> set[str]:
    """Names of the config's fields that building the model and one call of 2 x 8 tokens read."""
    seen: set[str] = set()

    class Traced(type(config)):
        def __getattribute__(self, name):
            if not name.startswith("_"):
                seen.add(name)
            return super().__getattribute__(name)

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    traced = Traced(**values)
    seen.clear()

    def call(tokens):
        return family.create(traced, rngs=nnx.Rngs(0))(tokens)

    jax.eval_shape(call, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    return seen & set(values)


def unread_keys(family: Family, config, defaults: dict) -> dict[str, object]:
    """Keys that are fields of the slice's config, stand at another value than the reference's default, and were not read: key -> value.

    A key that another key switches off (a window with `use_sliding_window` false) is one: it is reported, not refused.
    """
    read = traced_reads(family, config)
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in read or field.name in ("dtype", "param_dtype") or value is None:
            continue
        default = defaults.get(field.name, field.default)
        if _plain(value) != _plain(default):
            found[field.name] = value
    return found


def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if hasattr(value, "items") else value
