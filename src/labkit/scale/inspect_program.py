"""One program compiled and read: memory, operations, collectives, bounds on time, gates."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from labkit.scale.chips import Topology
from labkit.scale.collectives import Collective, is_expert
from labkit.scale.hlo_cost import Product
from labkit.scale.programs import ModelPrograms
from labkit.scale.reading import read_program
from labkit.scale.report import CollectiveRow, FlopsCheck, Gate, MemoryUse, PhaseReport, TrafficRow
from labkit.scale.roofline import link_seconds

FLOPS_LIMIT = 0.05
"""How far compiled products with weights may lie from the family's formula."""

SHOWN = 6
"""How many of the instructions that move most through HBM a report lists."""

_ATTENTION = re.compile(r"bkm[a-z],bks[a-z]->")
"""The products of queries, keys and values in `layers/attention.py`."""


def inspect_program(programs: ModelPrograms, phase: str, topology: Topology, *, keep: str | None = None) -> PhaseReport:
    """Compile one phase of a model and read the result. keep: a folder that gets the program as text."""
    read = read_program(programs.program(phase), programs.mesh, keep=None if keep is None else Path(keep) / f"{phase}.hlo")
    seconds = dict(trace_seconds=read.trace_seconds, compile_seconds=read.compile_seconds, compile_cpu_seconds=read.compile_cpu_seconds)
    common = dict(phase=phase, batch=programs.batch, length=programs.length, detail=read.told, **seconds)
    if read.compiled is None:
        return PhaseReport(**common, status="does not fit")
    flops = check_flops(programs, phase, read.products, read.compiled)
    memory = read.memory(topology)
    seconds_of = lambda collective: link_seconds(collective, topology.chip, list(read.coordinates), topology.chip.devices_per_chip)
    gates = [expert_gate(read.collectives), replication_gate(programs), fit_gate(memory)]
    if flops.ratio is not None:
        off = abs(flops.ratio - 1)
        gates.append(Gate(name="operations as the formula counts", passed=off <= FLOPS_LIMIT, detail=f"weights off by {off:.2%}, limit {FLOPS_LIMIT:.0%}"))
    return PhaseReport(
        **common,
        status="compiled",
        memory=memory,
        flops=flops,
        collectives=collective_rows(read.collectives, seconds_of),
        traffic=[TrafficRow(shape=t.shape, executions=t.times, bytes=t.total, source=_short(t.op_name)) for t in read.traffic[:SHOWN]],
        roofline=read.roofline(topology, max(flops.total, flops.formula_weights)),
        gates=gates,
        notes=[f"a loop whose length depends on data is counted {times} times: {name}" for name, times in read.unknown],
    )


def collective_rows(found: Sequence[Collective], seconds_of) -> list[CollectiveRow]:
    """Collectives of one kind that move the same thing over the same axes, largest first."""
    groups: dict[tuple, list[Collective]] = {}
    for collective in found:
        axes = "?" if collective.axes is None else ", ".join(collective.axes) or "none"
        groups.setdefault((collective.moves, collective.part, collective.kind, axes), []).append(collective)
    rows = [
        CollectiveRow(
            moves=moves,
            part=part,
            kind=kind,
            axes=axes,
            count=len(members),
            executions=sum(c.times for c in members),
            bytes=sum(c.total for c in members),
            seconds=sum(map(seconds_of, members)),
            weights=list(dict.fromkeys(name for c in members for name in c.names)),
            sources=list(dict.fromkeys(_short(c.source) for c in members)),
        )
        for (moves, part, kind, axes), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _short(op_name: str) -> str:
    """The last two parts of an op name that say something."""
    parts = [part for part in op_name.split("/") if part not in ("while", "body", "closed_call", "checkpoint", "rematted_computation")]
    return "/".join(parts[-2:])


def expert_gate(found: Sequence[Collective]) -> Gate:
    """No collective moves expert weights in the forward pass."""
    offending = [c for c in found if c.moves_experts and c.part in ("forward", "recomputed")]
    names = sorted({name for c in offending for name in c.names if is_expert(name)})
    total = sum(c.total for c in offending)
    detail = f"{', '.join(names)}: {total / 1e6:,.1f} MB per device and step" if offending else "none does"
    return Gate(name="no collective moves expert weights", passed=not offending, detail=detail)


def replication_gate(programs: ModelPrograms) -> Gate:
    """No matrix of 256 or more elements per layer lies whole on every device where the mesh has axes to cut weights over."""
    cutting = programs.mesh.size // programs.mesh.shape["data"]
    plan = programs.config.plan
    prefixes = tuple(plan.parameter_path(s, p) + "." for s, p, _ in plan.positions())
    whole = []
    for name in sorted(programs.trained):
        leaf = programs.state[name]
        own = leaf.shape[1:] if name.startswith(prefixes) else leaf.shape
        size = 1
        for dim in own:
            size *= dim
        if len(own) > 1 and size >= 256 and leaf.sharding.is_fully_replicated:
            whole.append(name)
    passed = cutting == 1 or not whole
    return Gate(name="no parameter is replicated by accident", passed=passed, detail=", ".join(whole) if not passed else "every matrix is cut")


def fit_gate(memory: MemoryUse) -> Gate:
    return Gate(name="fits into HBM", passed=memory.peak <= memory.available, detail=f"{memory.share:.0%} of it at the peak")


def check_flops(programs: ModelPrograms, phase: str, found: Sequence[Product], compiled) -> FlopsCheck:
    """Compiled products by what and part, against the family's formula for the same tokens."""
    experts = max((leaf.shape[1] for name, leaf in programs.state.items() if is_expert(name) and len(leaf.shape) > 2), default=0)
    counted: dict[str, float] = {}
    worst = 0.0
    for product in found:
        what = "attention" if _ATTENTION.search(product.op_name) else "grouped" if product.kind == "ragged" else "weights"
        share = local_share(product, experts)
        label = f"{what}, {product.part}"
        counted[label] = counted.get(label, 0) + product.total * share
        worst += product.total
    analysis = compiled.cost_analysis() or {}
    check = FlopsCheck(compiled=dict(sorted(counted.items())), once=sum(p.flops for p in found), cost_analysis=analysis.get("flops", 0.0), worst_case=worst)
    if worst > check.total * 1.001:
        check.explained.append(f"grouped products are counted at balanced load; if one device's experts got every token it would be {worst / 1e12:.4f}")
    share, length = (1 if phase == "train" else 1 / 3) / programs.mesh.size, 1 if phase == "decode" else programs.length
    formula = programs.family.tflops(programs.config, batch=programs.batch, length=length, log=False)
    check.formula_weights, check.formula_attention = formula.weights * 1e12 * share, formula.attention * 1e12 * share
    if phase == "decode":
        check.formula_attention = None
        check.explained.append("products with single rows are sums of products to the compiler and not among these; the bound on time takes the formula's")
        return check
    mine = lambda *whats: sum(count for label, count in counted.items() if label.split(", ")[0] in whats and not label.endswith("recomputed"))
    counted_weights = mine("weights", "grouped")
    repeated, names = repeated_over_tensor(programs)
    if repeated and abs(counted_weights / (check.formula_weights + repeated * share) - 1) < abs(counted_weights / check.formula_weights - 1):
        check.formula_weights += repeated * share
        check.explained.append(
            f"not cut over `tensor`, so that each device of that axis computes their products whole: {', '.join(names)}; the formula is with it"
        )
    check.ratio = counted_weights / check.formula_weights
    spared = 2 * programs.batch * (programs.length - 1) * _head_size(programs.config) / programs.mesh.size
    if phase == "prefill" and abs(counted_weights / (check.formula_weights - spared) - 1) < abs(check.ratio - 1):
        check.formula_weights -= spared
        check.ratio = counted_weights / check.formula_weights
        check.explained.append(
            "the head runs on the last token of each row: the compiler takes the slice before the product, and the formula is without the rest"
        )
    if phase != "train":
        check.explained.append("the formula's forward third: backward counts as twice forward")
    if check.formula_attention:
        check.explained.append(
            f"attention compiled over formula {mine('attention') / check.formula_attention:.4f}: the formula counts pairs of query and key that meet, "
            "the program whole blocks of them"
        )
    recomputed = sum(count for label, count in counted.items() if label.endswith("recomputed"))
    if recomputed:
        check.explained.append(f"recomputed for the backward pass (remat {programs.remat}): {recomputed / 1e12:.4f}, not in the formula")
    return check


def repeated_over_tensor(programs: ModelPrograms) -> tuple[float, list[str]]:
    """(operations of a training step that devices of the `tensor` axis may repeat, over the whole mesh; the matrices): a head of an odd vocabulary, a router.

    The compiler may as well cut such a product over what it adds up.
    """
    again = programs.mesh.shape["tensor"] - 1
    found = {
        name: leaf
        for name, leaf in programs.state.items()
        if again and name in programs.trained and "tensor" not in jax.tree.leaves(tuple(leaf.sharding.spec)) and _is_product(programs, name)
    }
    weights = sum(math.prod(leaf.shape) for leaf in found.values())
    return 6.0 * programs.batch * programs.length * weights * again, sorted(found)


def _is_product(programs: ModelPrograms, name: str) -> bool:
    """Whether a parameter is a matrix that every token meets: no expert's, and no table that is only looked up."""
    stacked = any(name.startswith(programs.config.plan.parameter_path(s, p) + ".") for s, p, _ in programs.config.plan.positions())
    looked_up = "embed" in name and not getattr(programs.config, "tie_word_embeddings", False)
    return len(programs.state[name].shape) - stacked == 2 and not is_expert(name) and not looked_up


def _head_size(config) -> int:
    """Weights of the product that makes logits, 0 where the config does not tell."""
    return (getattr(config, "vocab_size", 0) or 0) * (getattr(config, "hidden_size", 0) or 0)


def local_share(product: Product, experts: int) -> float:
    """The part of a grouped product's rows that belong to the device's own experts when the load is balanced."""
    if product.kind != "ragged" or not experts:
        return 1.0
    local = next((dims[0] for dims in product.shapes if len(dims) == 3), experts)
    return min(1.0, local / experts)
