"""The update: parts of a batch add up to the whole, packed documents to their sum, however layers run; only Params change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from labkit.converters import load_model
from labkit.errors import InputError
from labkit.hf import open_source
from labkit.layers.stack import REMAT_POLICIES
from labkit.layers.variables import Buffer
from labkit.parity.conformance.subject import QUICK
from labkit.train.data import PackedData, split_batch
from labkit.train.engine import TrainingEngine, family_engine
from labkit.train.loop import train_loop
from labkit.train.metrics import MetricsFile, read_metrics, step_record
from labkit.train.optimizer import learning_rate_schedule, make_optimizer
from labkit.train.parts import split_model
from labkit.train.settings import TrainSettings
from labkit.train.step import new_state, train_step

DENSE, MIXTURE = "tiny:llama?num_hidden_layers=2", "tiny:qwen3_moe?num_hidden_layers=2"
SETTINGS = TrainSettings(steps=4, batch=4, length=24, warmup=1, learning_rate=1e-2)


@functools.cache
def packed(vocab: int, batch: int = 4) -> PackedData:
    """Documents of uneven sizes: parts of a batch count different numbers of tokens."""
    sizes = (60, 3, 11, 25, 8, 31)
    return PackedData.pack([np.random.RandomState(i).randint(0, vocab, n) for i, n in enumerate(sizes)], length=24, batch=batch, seed=1)


def load(name, dtype=jnp.float64):
    source = open_source(name)
    return load_model(source, dtype=dtype)[0], source.config.model_type


def gradients_and_metrics(model, model_type, batch, *, engine=None):
    """Of one update by plain gradient descent: the parameters' change over the learning rate is the gradient."""
    parts, params, frozen = split_model(model)
    optimizer = optax.sgd(1.0)
    step = functools.partial(train_step, parts=parts, engine=engine or family_engine(model_type), optimizer=optimizer)
    run = jax.jit(step, compiler_options=QUICK)
    state, metrics = run(new_state(params, optimizer), frozen, batch)
    return {name: np.asarray(params[name] - state.params[name]) for name in params}, jax.tree.map(np.asarray, metrics)


def largest_difference(a, b):
    return max(np.abs(a[name] - b[name]).max() / max(np.abs(b[name]).max(), 1e-3) for name in b)


def test_parts_of_a_batch_add_up_to_the_whole():
    with jax.enable_x64(True):
        model, kind = load(DENSE)
        batch = packed(model.config.vocab_size).at(0)
        counted = (split_batch(batch, 4)["targets_segmentation"] != 0).sum((1, 2))
        assert len(set(counted.tolist())) > 1
        whole, one = gradients_and_metrics(model, kind, split_batch(batch, 1))
        for parts in (2, 4):
            summed, many = gradients_and_metrics(model, kind, split_batch(batch, parts))
            assert largest_difference(summed, whole) < 1e-12
            assert abs(many["loss"] - one["loss"]) < 1e-12 and many["tokens"] == one["tokens"] == counted.sum()
        # The control: the plain mean over parts, which is what a trainer without token weights computes.
        apart = [gradients_and_metrics(model, kind, split_batch({n: a[i : i + 1] for n, a in batch.items()}, 1))[0] for i in range(4)]
        assert largest_difference({name: np.mean([g[name] for g in apart], 0) for name in whole}, whole) > 1e-3


def test_a_packed_row_is_the_sum_of_its_documents():
    with jax.enable_x64(True):
        model, kind = load(DENSE)
        vocab = model.config.vocab_size
        first, second = np.random.RandomState(0).randint(0, vocab, 9), np.random.RandomState(1).randint(0, vocab, 14)
        row = PackedData.pack([first, second], length=24, batch=1).at(0)
        assert sorted(set(row["inputs_segmentation"][0].tolist())) == [0, 1, 2]
        both, metrics = gradients_and_metrics(model, kind, split_batch(row, 1))
        alone = [gradients_and_metrics(model, kind, split_batch(PackedData.pack([d], length=24, batch=1).at(0), 1)) for d in (first, second)]
        weights = [8 / 21, 13 / 21]
        assert abs(metrics["loss"] - sum(w * m["loss"] for w, (_, m) in zip(weights, alone))) < 1e-12
        assert largest_difference(both, {name: sum(w * g[name] for w, (g, _) in zip(weights, alone)) for name in both}) < 1e-12
        # The control: one segment, so the second document sees the first.
        mixed = {**row, "inputs_segmentation": np.minimum(row["inputs_segmentation"], 1)}
        assert largest_difference(gradients_and_metrics(model, kind, split_batch(mixed, 1))[0], both) > 1e-3


def test_remat_and_the_loop_give_the_same_gradients():
    with jax.enable_x64(True):
        model, kind = load(DENSE)
        batch = split_batch(packed(model.config.vocab_size, 2).at(0), 1)
        plain, _ = gradients_and_metrics(model, kind, batch)
        saved, (parts, params, frozen) = {}, split_model(model)
        for scan, remat in [(False, None), *((True, policy) for policy in REMAT_POLICIES)]:
            engine = family_engine(kind, scan=scan, remat=remat)
            assert largest_difference(gradients_and_metrics(model, kind, batch, engine=engine)[0], plain) < 1e-12, (scan, remat)
            loss = lambda params, engine=engine: engine.loss(parts.merge(params, frozen), {n: a[0] for n, a in batch.items()})[0]
            kept = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
            saved[scan, remat] = sum(leaf.size for leaf in jax.tree.leaves(kept))
        # The control: the policies differ in what they keep.
        assert saved[True, "full"] < saved[True, "attention"] < saved[True, "dots"]
    with pytest.raises(ValueError, match="remat policy 'all'"):
        TrainingEngine().with_forward(remat="all")


def test_only_params_are_trained_and_their_buffers_are_donated():
    model, kind = load(DENSE, jnp.float32)
    model.norm.weight = Buffer(model.norm.weight[...])
    before = np.asarray(model.norm.weight[...])
    parts, params, frozen = split_model(model)
    held = {name: np.asarray(jnp.copy(array)) for name, array in params.items()}  # a view of the array itself would keep it from being donated
    assert "norm.weight" not in params and len(jax.tree.leaves(frozen)) == 1
    run = train_loop(model, kind, packed(model.config.vocab_size), dataclasses.replace(SETTINGS, steps=2, warmup=0))
    assert np.array_equal(run.model.norm.weight[...], before) and type(run.model.norm.weight) is Buffer
    assert all(not np.array_equal(array, held[name]) for name, array in run.state.params.items())
    assert all(array.is_deleted() for array in params.values())
    assert run.finished and run.step == 2 == int(run.state.step) and [r["step"] for r in run.records] == [1, 2]


def test_a_mixture_reports_its_router_and_the_auxiliary_loss_reaches_it():
    with jax.enable_x64(True):
        model, kind = load(MIXTURE)
        config = model.config
        batch = split_batch(packed(config.vocab_size, 2).at(0), 1)
        gradients, metrics = gradients_and_metrics(model, kind, batch)
        load_, entropy = metrics["expert_load"], float(metrics["router_entropy"])
        assert load_.shape[-1] == config.num_experts and np.allclose(load_.sum(-1), 1) and (load_ >= 0).all()
        assert 0 < entropy < np.log(config.num_experts)
        masked = {**batch, "targets_segmentation": np.zeros_like(batch["targets_segmentation"])}
        alone, _ = gradients_and_metrics(model, kind, masked)
        routers = [name for name in gradients if name.endswith("mlp.gate.kernel")]
        # With every target masked the auxiliary loss is all that is left: it reaches the router, and not the head.
        assert routers and all(np.abs(alone[name]).max() > 0 for name in routers) and np.abs(alone["lm_head.kernel"]).max() == 0
        engine = TrainingEngine().with_loss_fn(lambda model, batch: family_engine("llama").loss(model, batch)[0])
        without, silent = gradients_and_metrics(model, kind, batch, engine=engine)
        assert "router_entropy" not in silent
        assert max(np.abs(gradients[name] - without[name] - alone[name]).max() / np.abs(alone[name]).max() for name in routers) < 1e-9


def test_the_optimiser_clips_warms_up_and_decays_matrices_only():
    schedule = learning_rate_schedule(TrainSettings(steps=10, warmup=2, learning_rate=1.0))
    rates = [float(schedule(step)) for step in range(11)]
    assert np.allclose(rates[:3], [1 / 3, 2 / 3, 1]) and rates[2:] == sorted(rates[2:], reverse=True) and np.isclose(rates[10], 0.1)
    assert np.isclose(float(learning_rate_schedule(TrainSettings(steps=10, learning_rate=1.0))(0)), 1)
    model, _ = load(DENSE, jnp.float32)
    parts, params, _ = split_model(model)
    decayed = parts.matrices({name: array.shape for name, array in params.items()})
    assert decayed["layers.self_attn.q_proj.kernel"] and decayed["embed_tokens.embedding"]
    assert not decayed["layers.input_layernorm.weight"] and not decayed["norm.weight"]
    still = make_optimizer(TrainSettings(steps=10, learning_rate=1.0, weight_decay=0.5), decayed)
    updates, _ = still.update(jax.tree.map(jnp.zeros_like, params), still.init(params), params)
    assert np.allclose(updates["embed_tokens.embedding"], -0.5 * params["embed_tokens.embedding"]) and not np.asarray(updates["norm.weight"]).any()
    steep = {name: jnp.full_like(array, 100.0) for name, array in params.items()}
    inner = [make_optimizer(TrainSettings(steps=10, clip=clip), decayed) for clip in (1.0, None)]
    moments = [optax.tree_utils.tree_get(o.update(steep, o.init(params), params)[1], "mu") for o in inner]
    assert np.isclose(float(optax.tree.norm(moments[0])), 0.1, rtol=1e-5) and float(optax.tree.norm(moments[1])) > 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch": 4, "accumulate": 3}, "a multiple of accumulate"),
        ({"warmup": 9}, "warmup is 9"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"remat": "all"}, "remat is all"),
    ],
)
def test_settings_that_cannot_be_are_named(change, says):
    with pytest.raises(InputError, match=says):
        dataclasses.replace(SETTINGS, **change).check()


def test_a_loss_that_is_not_finite_ends_the_run():
    from labkit.errors import LabError

    model, kind = load(DENSE, jnp.float32)
    with pytest.raises(LabError, match="the loss is nan at step"):
        train_loop(model, kind, packed(model.config.vocab_size), dataclasses.replace(SETTINGS, learning_rate=1e30, warmup=0, clip=None))


def test_records_and_their_file(tmp_path):
    metrics = {"loss": np.float32(2), "gradient_norm": np.float32(1), "tokens": np.int32(100), "expert_load": np.asarray([[0.5, 0.5], [0.9, 0.1]])}
    record = step_record(3, metrics, 0.5, tflops=2.0, peak_tflops=8.0)
    assert record["mfu"] == 0.5 and record["tokens_per_second"] == 200 and record["expert_load"] == [0.7, 0.3] and record["max_expert_load"] == 1.8
    assert step_record(3, metrics, 0.5, tflops=2.0)["mfu"] is None and "mfu" not in step_record(3, metrics, 0.5)
    file = tmp_path / "metrics.jsonl"
    lines = MetricsFile(file)
    for step in (1, 2, 3):
        lines.add({"step": step})
    with open(file, "a") as cut:
        cut.write('{"step": 4, "lo')
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]
    MetricsFile(file, 2).add({"step": 3, "again": True})
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3] and read_metrics(file)[-1]["again"]
