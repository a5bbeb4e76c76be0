"""The engine adapter: loss and every gradient equal the reference's, the auxiliary loss included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from labkit.converters import load_model
from labkit.hf import open_source
from labkit.hf.exact import exact_mode
from labkit.hf.reference import Reference
from labkit.models import get_family
from labkit.train.engine import TrainingEngine

MODELS = ["tiny:llama?num_hidden_layers=2", "tiny:qwen3_moe?num_hidden_layers=2"]


def batch_for(vocab):
    tokens = np.random.RandomState(0).randint(0, vocab, (2, 18))
    segmentation = np.ones((2, 17), np.int32)
    segmentation[1, 11:] = 0
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "targets_segmentation": segmentation}


def reference_loss(source, batch):
    """(loss, the loss without its auxiliary part, gradients by published name of the tensors that are stored as they are)."""
    reference = Reference.load(source.path, "exact")
    model = reference.model.requires_grad_(True)
    with exact_mode():
        out = model(torch.from_numpy(batch["inputs"]), **({"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}))
        picked = torch.log_softmax(out.logits, -1).gather(-1, torch.from_numpy(batch["targets"].copy())[..., None])[..., 0]
        counted = torch.from_numpy(batch["targets_segmentation"] != 0)
        plain = -(picked * counted).sum() / counted.sum()
        loss = plain + (model.config.router_aux_loss_coef * out.aux_loss if getattr(out, "aux_loss", None) is not None else 0)
        loss.backward()
    return float(loss.detach()), float(plain.detach()), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", [pytest.param(MODELS[0], marks=pytest.mark.slow), MODELS[1]])
def test_loss_and_gradients_equal_the_reference(name):
    source = open_source(name)
    with jax.enable_x64(True):
        model, config, _ = load_model(source, dtype=jnp.float64)
        batch = batch_for(config.vocab_size)
        engine = get_family(source.config.model_type).configure_engine(TrainingEngine())
        run = nnx.jit(engine.loss_and_gradients)
        loss, aux, gradients = run(model, batch)
        _, masked_aux, masked = run(model, {**batch, "targets_segmentation": np.zeros_like(batch["targets_segmentation"])})
        flat = {".".join(map(str, path)): np.asarray(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(gradients)}
    if aux:
        # With every target masked the cross-entropy is gone; the auxiliary loss and the router's gradient are not.
        assert float(masked_aux["moe_lb_loss"]) == float(aux["moe_lb_loss"]) > 0
        largest = {".".join(map(str, path)): float(np.abs(leaf.get_raw_value()).max()) for path, leaf in nnx.to_flat_state(masked)}
        routers = [value for name, value in largest.items() if name.endswith("mlp.gate.kernel")]
        assert routers and min(routers) > 0 and largest["lm_head.kernel"] == 0
    want, plain, reference = reference_loss(source, batch)
    assert abs(float(loss) - want) < 1e-12 * abs(want)
    assert ("moe_lb_loss" in aux) == ("moe" in name) == (abs(want - plain) > 1e-4)
    assert all(np.abs(g).max() > 0 for g in flat.values())
    checked = 0
    for layer in range(config.num_hidden_layers):
        s, p, index = config.plan.locate(layer)
        ours = config.plan.parameter_path(s, p)
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.up_proj"):
            if f"{ours}.{part}.kernel" in flat:
                a, b = flat[f"{ours}.{part}.kernel"][index].T, reference[f"model.layers.{layer}.{part}.weight"]
                assert np.abs(a - b).max() < 1e-9 * np.abs(b).max(), (layer, part)
                checked += 1
    assert checked >= 3 * config.num_hidden_layers


def test_an_engine_without_a_loss_says_so():
    with pytest.raises(ValueError, match="no loss"):
        TrainingEngine().loss_and_gradients(None, {})
