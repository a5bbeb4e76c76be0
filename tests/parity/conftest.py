"""A tiny llama on both sides in float64, recorded once. x64 is on only within the fixtures and tests that ask for it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

TINY = "tiny:llama?num_hidden_layers=2"


@pytest.fixture
def x64():
    """float64 and strict promotion, as in a worker."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="package")
def both():
    """source, reference, model, config, tokens, captured, free and isolated recordings, all of one tiny llama."""
    import jax.numpy as jnp

    from labkit.converters import load_model
    from labkit.hf.reference import Reference
    from labkit.hf.source import open_source
    from labkit.parity.capture import capture

    source = open_source(TINY)
    reference = Reference.load(source.path, "exact")
    tokens = np.random.default_rng(0).integers(3, 100, (2, 12))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        model, config, _ = load_model(source, dtype=jnp.float64)
        captured = reference.capture(tokens)
        free, isolated = capture(model, tokens), capture(model, tokens, inject=captured)
    return SimpleNamespace(source=source, reference=reference, model=model, config=config, tokens=tokens, captured=captured, free=free, isolated=isolated)
