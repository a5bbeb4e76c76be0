"""FrozenTopK: the reference's choice of experts imposed on our forward, so that rounding and routing are told apart.

A mixture in bfloat16 differs from its float32 reference for two reasons: its arithmetic rounds, and a rounded router may choose other experts. With the
reference's choices and weights imposed at every router only the first is left. Routers are found by what they return, not by name, and the forward is compiled
like any other: the same entry point serves full weights on an accelerator.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.errors import GateError, InputError
from labkit.parity.capture import Interceptor, Recording, intercepting, is_router, is_whole
from labkit.parity.compare import kl_per_position

SHOWN_FLIPS = 40


@dataclasses.dataclass(frozen=True)
class FrozenTopK:
    """A recorded routing by router (`layers.3.mlp.gate`): indices int [tokens, top_k], weights [tokens, top_k], logits [tokens, experts] where the router gives
    them."""

    indices: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    logits: dict[str, np.ndarray]

    @classmethod
    def recorded(cls, capture) -> FrozenTopK:
        """Of a reference `Capture`. Raises InputError when no router of it gave its choice as indices with weights."""
        names = [key.removesuffix(".indices") for key in capture.outputs if key.endswith(".indices")]
        names = [name for name in names if f"{name}.weights" in capture.outputs]
        if not names:
            raise InputError("no router of the reference gives its choice as indices and weights", next="frozen routing is for mixtures that choose by token")
        rows = lambda array: np.asarray(array).reshape(-1, array.shape[-1])
        logits = {name: rows(capture.outputs[name]) for name in names if name in capture.outputs and capture.outputs[name].shape[-1:] != (0,)}
        return cls({n: rows(capture.outputs[f"{n}.indices"]) for n in names}, {n: rows(capture.outputs[f"{n}.weights"]) for n in names}, logits)


@dataclasses.dataclass(frozen=True)
class Routed:
    """One forward: logits [batch, length, vocab] in the model's dtype, and what every router chose itself, before anything was imposed on it."""

    logits: np.ndarray
    chosen: FrozenTopK


@dataclasses.dataclass(frozen=True)
class Flip:
    """A token at a layer for which we choose other experts than the reference, all layers before it being fed alike.

    margin: by how much the reference's logit of the last of its experts that we leave out exceeds that of the best one that we take instead; noise: how far
    our logits of these are from the reference's. A margin below twice the noise is a tie that rounding decided. None for a router that does not choose the
    largest logits (corrected by a bias, limited to groups): what it compares is not on record.
    """

    layer: int
    position: int
    ours: tuple[int, ...]
    reference: tuple[int, ...]
    margin: float | None
    noise: float | None


@dataclasses.dataclass(frozen=True)
class FrozenReport:
    """KL in nats from the reference's float32 logits, per position [batch, length]: free (our own routing), frozen (the reference's), own (the reference in
    bfloat16 against itself, None when not given). agreement: by router, the share of tokens that are sent to the same experts while all layers before are fed
    alike; free_agreement: the same in the free run. followed: every router of ours had a recorded choice, and gave it on."""

    free: np.ndarray
    frozen: np.ndarray
    own: np.ndarray | None
    agreement: dict[str, float]
    free_agreement: dict[str, float]
    flips: tuple[Flip, ...]
    followed: bool

    @property
    def within_noise(self) -> bool | None:
        """Every flip is a tie that rounding decided; None where a margin is not known and the others are ties."""
        known = [flip for flip in self.flips if flip.margin is not None and flip.noise is not None]
        tied = all(flip.margin <= 2 * flip.noise for flip in known)
        return tied if len(known) == len(self.flips) or not tied else None

    def plain(self) -> str:
        mean = lambda agreement: np.mean(list(agreement.values()))
        own = "" if self.own is None else f", the reference's own {self.own.mean():.2e}"
        lines = [
            f"mean KL free {self.free.mean():.2e}, frozen {self.frozen.mean():.2e}{own}",
            f"routing agreement {mean(self.agreement):.2%} (free run {mean(self.free_agreement):.2%}), {len(self.flips)} flips",
        ]
        lines += [
            f"  layer {f.layer} token {f.position}: {f.reference} -> {f.ours}, margin {_number(f.margin)}, noise {_number(f.noise)}"
            for f in self.flips[:SHOWN_FLIPS]
        ]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1e}"


def run_routed(model, tokens, frozen: FrozenTopK | None = None, *, segment_ids=None) -> Routed:
    """One compiled forward of tokens int [batch, length], by loop; `frozen` is imposed on every router that it names.

    Under the model's mesh (`jax.set_mesh`) for a sharded model. Raises GateError when an imposed choice does not fit the router's own in shape.
    """
    graphdef, state = nnx.split(model)
    imposed = {} if frozen is None else {name: (jnp.asarray(frozen.indices[name], jnp.int32), jnp.asarray(frozen.weights[name])) for name in frozen.indices}
    segments = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    logits, chosen = _run(graphdef, state, jnp.asarray(tokens, jnp.int32), segments, imposed)
    part = lambda which: {name: np.asarray(choice[which]) for name, choice in chosen.items() if choice[which] is not None}
    return Routed(np.asarray(logits), FrozenTopK(part(0), part(1), part(2)))


@partial(jax.jit, static_argnums=0)
def _run(graphdef, state, tokens, segment_ids, imposed):
    model = nnx.merge(graphdef, state)
    routers = _Routers(model, imposed)
    with intercepting(model, routers):
        logits = model(tokens, segment_ids=segment_ids, scan=False)
    return logits, routers.chosen


class _Routers(Interceptor):
    """Notes what every router chooses, and puts the imposed choice in its place."""

    def __init__(self, model, imposed):
        super().__init__(model, Recording(), None)
        self.imposed, self.chosen = imposed, {}

    def arrive(self, name, args, kwargs):
        return args, kwargs

    def tagged(self, tag, value):
        if tag == "router_logits":
            self.reported[self.stack[-1][1] if self.stack else ""] = value
        return value

    def leave(self, name, result):
        parts = list(result) if isinstance(result, tuple) else [result]
        if len(parts) < 2 or not is_router(parts):
            return result
        where = next(i for i, part in enumerate(parts) if is_whole(part))
        shape = parts[where].shape
        floats = [i for i, part in enumerate(parts) if isinstance(part, jax.Array) and not is_whole(part)]
        weight = next(i for i in floats if parts[i].shape == shape)
        logits = next((parts[i] for i in floats if parts[i].shape != shape), self.reported.get(name))
        rows = lambda array: None if array is None else array.reshape(-1, array.shape[-1])
        self.chosen[name] = rows(parts[where]), rows(parts[weight]), rows(logits)
        if name in self.imposed:
            indices, weights = self.imposed[name]
            if indices.size != parts[where].size:
                raise GateError(f"{indices.shape} choices are imposed on {name}, which makes {shape}", next="record the reference on the same tokens")
            parts[where], parts[weight] = indices.reshape(shape).astype(parts[where].dtype), weights.reshape(shape).astype(parts[weight].dtype)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


def frozen_topk(model, captured, tokens, *, own_logits=None) -> FrozenReport:
    """The report of a model, in bfloat16 as a rule, against a reference's float32 `Capture` of the same tokens [batch, length].

    own_logits: those of the reference in the model's dtype. Raises InputError for a reference without routers.
    """
    frozen = FrozenTopK.recorded(captured)
    free, held = run_routed(model, tokens), run_routed(model, tokens, frozen)
    wanted = captured.outputs["logits"]
    kl = lambda logits: kl_per_position(np.asarray(logits, np.float64), wanted)
    followed = set(held.chosen.indices) == set(frozen.indices)
    return FrozenReport(
        kl(free.logits),
        kl(held.logits),
        None if own_logits is None else kl(own_logits),
        _agreement(held.chosen, frozen),
        _agreement(free.chosen, frozen),
        tuple(_flips(held.chosen, frozen)),
        followed,
    )


def _same(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """bool [tokens]: the same experts, in whatever order."""
    return (np.sort(ours, -1) == np.sort(theirs, -1)).all(-1)


def _agreement(chosen: FrozenTopK, frozen: FrozenTopK) -> dict[str, float]:
    return {name: float(_same(chosen.indices[name], frozen.indices[name]).mean()) for name in frozen.indices if name in chosen.indices}


def _flips(chosen: FrozenTopK, frozen: FrozenTopK):
    for name, theirs in frozen.indices.items():
        if name not in chosen.indices:
            continue
        ours, logits, own = chosen.indices[name], frozen.logits.get(name), chosen.logits.get(name)
        if logits is not None and not _same(np.argsort(-logits, -1, kind="stable")[:, : theirs.shape[1]], theirs).all():
            logits = None
        for token in np.flatnonzero(~_same(ours, theirs)):
            left, taken = sorted(set(theirs[token]) - set(ours[token])), sorted(set(ours[token]) - set(theirs[token]))
            margin = noise = None
            if logits is not None and left and taken:
                margin = float(logits[token, left].min() - logits[token, taken].max())
                if own is not None:
                    noise = float(np.abs(own[token, left + taken].astype(np.float64) - logits[token, left + taken]).max())
            layer = next((int(part) for part in name.split(".") if part.isdigit()), -1)
            yield Flip(layer, int(token), tuple(map(int, taken)), tuple(map(int, left)), margin, noise)


def frozen_topk_job(source, *, progress, batch: int = 2, length: int = 64, seed: int = 0) -> dict:
    """The report of a source as plain data: our bfloat16 against the reference's float32 on random tokens; arrays `kl/free`, `kl/frozen`, `kl/own` [batch,
    length]. agreement: by layer. Raises InputError for a source without routers."""
    from labkit.converters import load_model
    from labkit.hf.reference import Reference
    from labkit.hf.source import open_source

    source = open_source(source)
    progress(0.0, "recording the reference's routing in float32")
    reference = Reference.load(source.path, "float32")
    model, config, _ = load_model(source, dtype=jnp.bfloat16)
    tokens = np.random.default_rng(seed).integers(3, config.vocab_size, (batch, length))
    captured = reference.capture(tokens)
    del reference
    progress(0.4, "the reference in bfloat16")
    own = Reference.load(source.path, "bfloat16").logits(tokens)
    progress(0.6, "our model, free and with the reference's routing")
    # As the bfloat16 verdict runs it: in the worker's strict promotion the reference's own mixing of bfloat16 and float32 would be refused.
    with jax.numpy_dtype_promotion("standard"):
        report = frozen_topk(model, captured, tokens, own_logits=own)
    by_layer = lambda agreement: [[next(int(p) for p in name.split(".") if p.isdigit()), value] for name, value in agreement.items()]
    return {
        "agreement": by_layer(report.agreement),
        "free_agreement": by_layer(report.free_agreement),
        "kl": {name: float(getattr(report, name).mean()) for name in ("free", "frozen", "own")},
        "flips": [dataclasses.asdict(flip) for flip in report.flips],
        "within_noise": report.within_noise,
        "followed": report.followed,
        "tokens": [batch, length],
        "arrays": {f"kl/{name}": getattr(report, name) for name in ("free", "frozen", "own")},
    }
