"""Models on meshes against one device, in float64 and float32; weights that lie wrong and sums that are missing are seen."""

import jax
import numpy as np
import pytest
from flax import nnx

from labkit.converters import load_model
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.layers.token_exchange import Exchange
from labkit.parity import meshes
from labkit.parity.meshes import MESHES, MeshRow, mesh_parity
from labkit.scale.mesh import build_mesh

MIXTURE, DENSE = "tiny:qwen3_moe?num_hidden_layers=2", "tiny:llama?num_hidden_layers=2"


@pytest.mark.parametrize("name, mesh, mixtures", [(MIXTURE, (1, 2, 2, 2), 1), (DENSE, (2, 2, 2, 1), 0)])
def test_logits_gradients_decoding_and_bytes(name, mesh, mixtures):
    found = mesh_parity(open_source(name), meshes=[mesh])
    (row,) = found.rows
    assert found.passed and row.passed and row.mixtures == mixtures, found.plain()
    assert max(row.logits, row.gradients, row.decode) < 1e-12 and row.bytes == row.planned < row.whole / 3 and not row.replicated


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIXTURE, DENSE, "tiny:gemma2?num_hidden_layers=2", "tiny:qwen3?num_hidden_layers=2"])
@pytest.mark.parametrize("mode", meshes.MODES)
def test_every_mesh(name, mode):
    found = mesh_parity(open_source(name), mode=mode)
    assert found.passed and [row.mesh for row in found.rows] == list(MESHES), found.plain()


@pytest.mark.slow
def test_translated_families_by_the_command():
    from labkit.lab.meshes import meshes as command

    for found in command(["gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "mamba2"]):
        assert found.passed, found.plain()


def judged(monkeypatch, change):
    """The row of a model whose values are right and whose placement `change(variables)` may spoil: only bytes and places are looked at."""
    monkeypatch.setattr(meshes, "measure", lambda *_: {"logits": np.ones(3), "d w": np.ones(3)})
    monkeypatch.setattr(meshes, "count_dispatches", lambda *_: 0)
    source = open_source(MIXTURE)
    with jax.enable_x64(True):
        baseline = meshes._Baseline(source, "exact", False)
    model, _, _ = load_model(source, mesh=build_mesh(fsdp=2, tensor=2, expert=2))
    change(dict(nnx.to_flat_state(nnx.state(model))), model.mesh)
    row = MeshRow((1, 2, 2, 2), "exact")
    meshes.judge(row, baseline, model)
    return row


def test_an_expert_weight_that_every_device_holds_is_seen(monkeypatch):
    def replicate(variables, mesh):
        (variable,) = [variable for path, variable in variables.items() if path[-1] == "gate_up_proj"]
        variable.set_value(jax.device_put(variable.get_raw_value(), jax.NamedSharding(mesh, jax.P())))

    assert judged(monkeypatch, lambda variables, mesh: None).passed
    row = judged(monkeypatch, replicate)
    assert not row.passed and "bytes of parameters on a device" in row.reason and any("gate_up_proj" in path for path in row.replicated)


@pytest.mark.slow
def test_a_sum_that_is_not_made_is_seen(monkeypatch):
    original = Exchange.home
    monkeypatch.setattr(Exchange, "home", lambda self, x, partial, columns: original(self, x, tuple(a for a in partial if a != "tensor"), columns))
    (row,) = mesh_parity(open_source(MIXTURE), meshes=[(1, 2, 2, 2)], decode=False).rows
    assert row.tried and not row.passed and row.logits > 1e-3


def test_what_a_mesh_cannot_hold_is_said_and_not_called_a_pass():
    found = mesh_parity(open_source("tiny:llama?num_hidden_layers=2&intermediate_size=90"), meshes=[(1, 1, 8, 1)], decode=False)
    (row,) = found.rows
    assert row.reason.startswith("not divisible: ") and "mlp" in row.reason and not row.passed and not found.passed


def test_errors_of_gradients():
    wanted = {"logits": np.ones(4), "d a": np.array([1.0, 2.0]), "d zero": np.array([1e-20, 0.0])}
    ours = {"logits": np.ones(4), "d a": np.array([1.0, 2.0 + 2e-9]), "d zero": np.array([0.0, 1e-20])}
    errors = meshes.compare(ours, wanted, "exact")
    assert errors["logits"] == 0 and 0.9e-9 < errors["d a"] < 1.1e-9 and errors["d zero"] < 1e-7, "zero by theory: nothing but rounding"
    assert meshes.compare(ours | {"d a": np.array([np.nan, 2.0])}, wanted, "exact")["d a"] == np.inf
    assert meshes.compare(ours | {"d zero": np.array([0.0, 1e-3])}, wanted, "exact")["d zero"] > 1


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="unknown mode"):
        mesh_parity(open_source(DENSE), mode="float16")
