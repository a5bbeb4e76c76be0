"""For the refined families the translated slice is the same function, and a parameter tree of one loads into the other through their rules."""

import jax.numpy as jnp
import numpy as np
import pytest

from labkit.converters import convert, export, load_model
from labkit.hf.source import open_source
from labkit.parity.compare import relative_error
from labkit.port.slices import ensure_slice

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2")
LIMIT = 1e-5
"""float32 here; the board compares both with the reference in float64."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_translated_and_refined_agree(family, monkeypatch, tmp_path):
    source = open_source(f"tiny:{family}")
    monkeypatch.setenv("LABKIT_PREFER", "")
    refined, config, _ = load_model(source, dtype=jnp.float32)
    convert(source, tmp_path / "refined")
    export(tmp_path / "refined", tmp_path / "out")
    monkeypatch.setenv("LABKIT_PREFER", "translated")
    ensure_slice(source).require()
    translated, _, _ = load_model(open_source(tmp_path / "out"), dtype=jnp.float32)
    assert type(translated).__module__.startswith("labkit_slices")
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (2, 60)).astype(np.int32)
    ours, theirs = refined(tokens), translated(tokens)
    assert relative_error(np.asarray(theirs), np.asarray(ours)) < LIMIT
    assert relative_error(np.asarray(theirs)[:, ::-1], np.asarray(ours)) > LIMIT
