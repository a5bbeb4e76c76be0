"""SmolLM2-135M, real weights, fine-tuned on a small text: the loss falls, and what is exported is what was trained."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import labkit
from labkit.converters import export
from labkit.hf import open_source
from labkit.hf.reference import Reference
from labkit.train.data import PackedData
from labkit.train.documents import read_documents
from labkit.train.metrics import read_metrics

TEXT = Path(__file__).parents[2] / "README.md"


def reference_loss(folder, rows) -> float:
    """transformers' mean loss over rows of tokens."""
    logits = Reference.load(folder, "float32", attention="sdpa").logits(rows[:, :-1])
    shifted = logits - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(shifted, rows[:, 1:, None], -1)[..., 0]
    return float((np.log(np.exp(shifted).sum(-1)) - picked).mean())


@pytest.mark.slow
def test_smollm2_learns_a_small_text_in_30_steps(tmp_path):
    source = open_source("smollm2-135m")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(Path(labkit.__file__).parents[1])}  # one device
    command = "-m labkit.cli train smollm2-135m --steps 30 --batch 4 --length 64 --learning-rate 1e-4 --warmup 3".split()
    done = subprocess.run(
        [sys.executable, *command, "--data", str(TEXT), "--out", str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 30/30" in done.stdout and "labkit export" in done.stdout
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 30 and np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3, losses
    export(tmp_path / "run" / "model", tmp_path / "hf")
    (document,) = read_documents(TEXT, source)
    rows = np.asarray(document[: 8 * 65]).reshape(8, 65)
    before, after = reference_loss(source.path, rows), reference_loss(tmp_path / "hf", rows)
    assert after < before - 0.3, (before, after)
    assert PackedData.pack([document], length=64, batch=4).rows > 30
