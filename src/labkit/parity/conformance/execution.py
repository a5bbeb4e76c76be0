"""Checks 3 and 4: the layers by scan, by loop and under every remat policy are one model with one set of paths, outputs and gradients."""

import jax
import numpy as np
from flax import nnx

from labkit.layers.stack import REMAT_POLICIES
from labkit.parity.compare import relative_error
from labkit.parity.conformance.jaxpr_walk import Weights, equations, walk
from labkit.parity.conformance.placement import stored_marks
from labkit.parity.conformance.report import Found
from labkit.parity.conformance.stillness import watched_merges
from labkit.parity.gradients import NEGLIGIBLE

LIMIT = 1e-12
REMAT_PRIMITIVES = ("checkpoint", "remat", "remat2")


def scan_and_loop(subject) -> Found:
    """Check 3. value: the worst relative error of logits, loss and gradients."""
    found = Found(problems=scan_and_loop_forms(subject))
    if not _repeated(subject):
        found.notes.append("no segment of the plan repeats: there is nothing to scan over")
    _same_results(found, subject.step(scan=False), subject.step(), "by loop")
    return found


def scan_and_loop_forms(subject) -> list[str]:
    """What the two programs have wrong, from their traces alone."""
    scan, loop = (_traced(subject, scan=by) for by in (True, False))
    problems = _same_modules(scan, loop, "by loop")
    problems += [f"by scan, the program does not scan over {path}" for path in sorted(_repeated(subject) - scan.scanned)]
    problems += [f"by loop, the program scans over {path}" for path in sorted(loop.scanned)]
    return problems + own_indices(subject.model, subject.config.plan)


def _repeated(subject) -> set[str]:
    return {path for path, placed in subject.placements.items() if len(placed.layers) > 1}


def remat(subject) -> Found:
    """Check 4. value: the worst relative error over the policies."""
    found = Found(problems=[problem for policy in REMAT_POLICIES for problem in remat_form(subject, policy)])
    for policy in REMAT_POLICIES:
        _same_results(found, subject.step(remat=policy), subject.step(), f"under remat {policy!r}")
    return found


def remat_form(subject, policy: str) -> list[str]:
    """What a policy's program has wrong, from its trace alone."""
    plain, traced = _traced(subject, scan=True), _traced(subject, scan=True, remat=policy)
    problems = _same_modules(plain, traced, f"under remat {policy!r}")
    if traced.tags != plain.tags:
        problems.append(f"remat {policy!r} renames: {', '.join(sorted(traced.tags ^ plain.tags))}")
    if not sum(map(traced.count, REMAT_PRIMITIVES)) > sum(map(plain.count, REMAT_PRIMITIVES)):
        problems.append(f"remat {policy!r} changes nothing in the program: it is not applied")
    return problems


def own_indices(model, plan) -> list[str]:
    """Attributes in which stacks keep the index of their layer: these alone would make every layer a kind of its own, which no scan can run."""
    stacks = [(segment.layer(p, 0), plan.parameter_path(s, p)) for s, segment in enumerate(plan.segments) for p in range(len(segment.cycle))]
    if len(stacks) < 2:
        return []
    kept: dict[str, list[bool]] = {}
    for layer, path in stacks:
        module = model
        for part in path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        for place, node in nnx.iter_graph(module):
            for name, value in vars(node).items() if isinstance(node, nnx.Module) else ():
                if type(value) is int:
                    kept.setdefault(".".join(map(str, (*place, name))), []).append(value == layer)
    return [f"layers keep their own index as {name}" for name, same in kept.items() if len(same) == len(stacks) and all(same)]


class _Traced:
    """The modules that a call rebuilt, how often each primitive stands in it, the names of its tagged points, and the parameters that it scans over."""

    def __init__(self, jaxpr, state, merged):
        self._names = [equation.primitive.name for equation in equations(jaxpr)]
        self.tags = {equation.params["name"] for equation in equations(jaxpr) if equation.primitive.name == "name"}
        self.scanned: set[str] = set()
        walk(jaxpr, stored_marks(state), self._look)
        self.modules = {(cls, graphdef) for cls, graphdef in merged.graphdefs}

    def _look(self, equation, inputs):
        if equation.primitive.name == "scan":
            over = inputs[equation.params["num_consts"] + equation.params["num_carry"] :]
            self.scanned |= {path for mark in over if isinstance(mark, Weights) and mark.spec is not None for path in mark.paths}

    def count(self, name: str) -> int:
        return self._names.count(name)


def _traced(subject, **options) -> _Traced:
    graphdef, state = nnx.split(subject.model)
    tokens = subject.tokens[:2, :6]
    with watched_merges() as merged:
        jaxpr = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(tokens, segment_ids=np.ones_like(tokens), **options))(state)
    return _Traced(jaxpr.jaxpr, state, merged)


def _same_modules(ours: _Traced, other: _Traced, how: str) -> list[str]:
    """Layers rebuilt in one form and not in the other: another graph definition, or another class."""
    odd = sorted({cls.__name__ for cls, _ in ours.modules ^ other.modules})
    return [f"{', '.join(odd)} has another graph definition {how}: its paths or its attributes differ"] if odd else []


def _same_results(found: Found, ours, plain, how: str) -> None:
    found.within(relative_error(ours.logits, plain.logits), LIMIT, f"logits {how}")
    found.within(relative_error(np.asarray([ours.loss]), np.asarray([plain.loss])), LIMIT, f"loss {how}")
    if ours.gradients.keys() != plain.gradients.keys():
        odd = sorted(ours.gradients.keys() ^ plain.gradients.keys())
        found.problems.append(f"{how} the parameters have other paths: {', '.join(odd[:3])}")
        return
    largest = max(np.abs(g).max() for g in plain.gradients.values())
    for path, gradient in plain.gradients.items():
        negligible = np.abs(gradient).max() <= NEGLIGIBLE * largest
        error = np.abs(ours.gradients[path] - gradient).max() / largest if negligible else relative_error(ours.gradients[path], gradient)
        found.within(float(error), LIMIT, f"gradient of {path} {how}")
