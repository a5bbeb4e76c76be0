"""Check 1: pure NNX, `nnx.Param` the only trainable variable, and a gradient for every parameter, layer by layer and expert by expert."""

import ast
import re
from pathlib import Path

import numpy as np
from flax import nnx

from labkit.converters.filling import dotted
from labkit.converters.loading import assignments_by_path, audit
from labkit.layers.variables import Buffer
from labkit.parity.conformance.report import Found
from labkit.parity.gradients import NEGLIGIBLE

FOREIGN = ("flax.linen", "flax.nnx.bridge", "flax.nnx.compat", "haiku", "equinox")
TRIES = 4
"""Batches tried until one reaches every expert."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "num_experts_per_token")


def check(subject) -> Found:
    """value: the smallest gradient of a parameter's layer or expert that is not declared to be zero, over the largest of all."""
    found = Found(problems=[*foreign_modules(subject.model), *foreign_imports(subject.family.path), *untrained(subject)])
    rows = smallest = None
    for seed in range(subject.seed, subject.seed + TRIES):
        gradients = subject.step(tokens=subject.tokens if seed == subject.seed else subject.drawn(seed)).gradients
        rows = relative_rows(gradients, subject.placements, expert_count(subject.source.config.effective))
        missed = [row for row in rows if row[2] is not None and not rows[row] > NEGLIGIBLE]
        if smallest is None or len(missed) < smallest[0]:
            smallest = (len(missed), seed, rows)
        if not missed:
            break
    _, seed, rows = smallest
    found.problems += [f"the gradient of {_name(row)} is not finite" for row, value in rows.items() if not np.isfinite(value)]
    zero = [row for row, value in rows.items() if np.isfinite(value) and not value > NEGLIGIBLE]
    if zero:
        wanted = subject.wanted[1] if seed == subject.seed else subject.reference_gradients(subject.drawn(seed))[1]
        theirs = relative_rows(wanted, subject.placements, expert_count(subject.source.config.effective))
        declared: dict[str, list[str]] = {}
        for row in zero:
            if theirs.get(row, np.inf) <= NEGLIGIBLE:
                declared.setdefault(reason_for(row[0], subject.source.config.effective), []).append(_name(row))
            else:
                found.problems.append(f"the gradient of {_name(row)} is {rows[row]:.0e} of the largest, the reference's {theirs.get(row, np.nan):.0e}")
        found.notes += [
            f"zero by theory: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {why}" for why, names in declared.items()
        ]
    found.value = min((value for row, value in rows.items() if row not in zero), default=None)
    return found


def foreign_modules(model) -> list[str]:
    """Nodes of the graph whose class comes from Linen or a bridge."""
    problems = []
    for path, node in nnx.iter_graph(model):
        origin = next((cls.__module__ for cls in type(node).__mro__ if cls.__module__.startswith(FOREIGN)), None)
        if origin is not None:
            problems.append(f"{dotted(path) or 'the model'} is a {type(node).__name__} of {origin}")
    return problems


def foreign_imports(folder: Path) -> list[str]:
    """Imports of Linen or a bridge in the files of a slice, by file and line."""
    problems = []
    for file in sorted(Path(folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            problems += [f"{file.name}:{node.lineno} imports {name}" for name in names if name.startswith(FOREIGN)]
    return problems


def untrained(subject) -> list[str]:
    """Variables of a type that is neither `nnx.Param` nor a `Buffer`, and those whose type is not what the reference trains or leaves alone."""
    from labkit.hf.gradients import frozen_tensors

    frozen, problems = frozen_tensors(subject.reference), []
    fills = assignments_by_path(audit(subject.source, subject.family, subject.config).expansion)
    for path, variable in subject.variables.items():
        trained = isinstance(variable, nnx.Param)
        if not trained and not isinstance(variable, Buffer):
            problems.append(f"{path} is a {type(variable).__module__}.{type(variable).__name__}, neither nnx.Param nor a Buffer: no optimiser would touch it")
            continue
        sources = {name for assignment, _, _ in fills.get(path, ()) for name in assignment.names}
        if sources and trained is bool(sources & frozen):
            problems.append(f"{path} is a {type(variable).__name__}, and the reference {'does not train' if trained else 'trains'} {min(sources)}")
    return problems


def expert_count(config: dict) -> int | None:
    """How many experts the config has, None for a dense one."""
    return next((config[key] for key in EXPERT_KEYS if isinstance(config.get(key), int) and config[key] > 1), None)


def relative_rows(gradients: dict, placements: dict, experts: int | None) -> dict[tuple, float]:
    """(path, layer or None, expert or None) -> the largest gradient in that part over the largest of all. Experts: on the dimension of their number in what is
    called an expert's, a router's or a gate's."""
    largest = max((float(np.abs(g).max()) for g in gradients.values()), default=0.0) or 1.0
    rows = {}
    for path, gradient in gradients.items():
        layers = placements[path].layers
        for index, layer in enumerate(layers or (None,)):
            part = np.abs(gradient[index] if layers else gradient)
            axis = _expert_axis(path, part.shape, experts)
            if axis is None:
                rows[path, layer, None] = float(part.max()) / largest
            else:
                each = np.moveaxis(part, axis, 0).reshape(part.shape[axis], -1).max(1) / largest
                rows |= {(path, layer, expert): float(value) for expert, value in enumerate(each)}
    return rows


def _expert_axis(path: str, shape: tuple[int, ...], experts: int | None) -> int | None:
    if experts is None or not re.search(r"expert|router|(^|\.)gate(\.|$)", path) or re.search(r"shared_expert", path):
        return None
    return next((axis for axis, size in enumerate(shape) if size == experts), None)


def reason_for(path: str, config: dict) -> str:
    """Why a gradient that is zero on both sides has to be."""
    if re.search(r"(^|[._])(k|key)(_proj|_lin|_linear)?\.bias$", path):
        return "a key bias adds the same to every score of a query, and softmax takes no notice"
    if re.search(r"router|(^|\.)gate(\.|$)", path) and any(config.get(key) == 1 for key in CHOSEN_KEYS):
        return "the weight of a single expert is renormalised to 1, whatever the router says"
    return "the reference's own gradient is zero as well"


def _name(row: tuple) -> str:
    path, layer, expert = row
    return path + ("" if layer is None else f", layer {layer}") + ("" if expert is None else f", expert {expert}")
