"""A trial: a square matrix that was put in untransposed, or transposed once too often. Its shape shows nothing; the transposed matrix makes the place right."""

import sys
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.models import get_family
from labkit.models.mapping import Rule, Transpose
from labkit.models.name_patterns import pattern_regex
from labkit.parity.capture import capture
from labkit.parity.citation import Line, cite, in_slice
from labkit.parity.compare import relative_error
from labkit.parity.components import ComponentTable, Fault, compare_components, tail

MOST = 12


def transposed_matrix(fault: Fault, model, model_type: str, config, tokens, captured, table: ComponentTable):
    """(cause, evidence, fix, True, line of the rule) when one transposed square matrix under the place of `fault` makes it the reference's, else None.

    captured: the reference's `Capture` of tokens [batch, length]; table: the checklist that has the fault.
    """
    if fault.what != "output":
        return None
    for target, others in list(_square(model, config, fault.place.split("#")[0]).items())[:MOST]:
        trial = capture(_with_transposed(model, others), tokens, inject=captured)
        if fault.place not in trial:
            continue
        after = {(f.place, f.what) for f in compare_components(trial, trial, captured, limit=table.limit).isolated_faults}
        if (fault.place, fault.what) in after:
            continue
        alike = [f for f in table.isolated_faults if f.what == "output" and tail(f.place) == tail(fault.place)]
        mended = sum((f.place, f.what) not in after for f in alike)
        wanted = np.asarray(captured.outputs[fault.place])
        error = relative_error(np.asarray(trial[fault.place]).reshape(wanted.shape), wanted)
        change, line = _change(model_type, config, target, len(others[0][1]))
        return (
            f"the matrix {target} is transposed: it is square, so that its shape does not show it",
            f"with it transposed the error falls to {error:.1e}, and {mended} of {len(alike)} places agree",
            change,
            True,
            line,
        )
    return None


def _square(model, config, place: str) -> dict[str, list[tuple[tuple, tuple[int, ...]]]]:
    """Rule target -> (path, shape of one layer's matrices) of every parameter below a place whose last two sizes are equal, in every stack that has it."""
    parts, prefix = place.split("."), ""
    stacked = parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit()
    rest = ".".join(parts[2:]) if stacked else place
    if stacked:
        segment, position, _ = config.plan.locate(int(parts[1]))
        prefix = config.plan.parameter_path(segment, position) + "."
    stacks = {config.plan.parameter_path(s, p) + "." for s, p, _ in config.plan.positions()} if stacked else {""}
    flat = {".".join(map(str, path)): (path, leaf.shape) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    found = {}
    for name, (_, shape) in flat.items():
        tail = name.removeprefix(prefix)
        own = shape[1:] if stacked else shape
        if not name.startswith(prefix) or not f"{tail}.".startswith(f"{rest}." if rest else "") or len(own) < 2 or own[-1] != own[-2]:
            continue
        everywhere = [flat[stack + tail] for stack in sorted(stacks) if stack + tail in flat]
        found["layers." * stacked + tail] = [(path, shape[1:] if stacked else shape) for path, shape in everywhere]
    return found


def _with_transposed(model, parameters):
    """A copy whose parameters have their last two axes swapped."""
    graphdef, state = nnx.split(model)
    leaves = dict(nnx.to_flat_state(state))
    for path, _ in parameters:
        leaves[path] = leaves[path].replace(jnp.swapaxes(leaves[path].get_raw_value(), -1, -2))
    return nnx.merge(graphdef, nnx.from_flat_state(list(leaves.items())))


def _change(model_type: str, config, target: str, rank: int) -> tuple[str, Line | str]:
    """(what to change, where) in the rule that fills a target. rank: axes of one layer's array."""
    rule, line = rule_line(model_type, config, target)
    if rule is None:
        return f"transpose {target} where the checkpoint is read", line
    layout = rule.layouts[0]
    steps = ", ".join(map(str, layout.steps))
    called = f" (made from {line.through})" if isinstance(line, Line) and line.through else ""
    line = Line(line.file, line.number) if isinstance(line, Line) else line
    told = f"the rule{called} {', '.join(rule.targets)} <- {', '.join(layout.sources)}{f' by {steps}' if steps else ''}"
    turn = next((step for step in layout.steps if isinstance(step, Transpose)), None)
    if turn is not None:
        return f"take {turn} out of {told}", line
    axes = (*range(rank - 2), rank - 1, rank - 2)
    return f"add Transpose({', '.join(map(str, axes))}) to the steps of {told}", line


def rule_line(model_type: str, config, target: str) -> tuple[Rule | None, Line | str]:
    """(the rule that fills `target`, the line of the family's folder that makes it). A rule made when its file was read is found by its text."""
    family, made = get_family(model_type), {}
    with _noting(made):
        table = family.rules(config)
    rule = next((rule for rule in table.rules if any(pattern_regex(t).fullmatch(target) for t in rule.targets)), None)
    if rule is None:
        return None, cite(family.rules)
    frames = made.get(id(rule), [])
    inside = [line for line in frames if str(family.path) in line.file] or frames
    if inside:
        # A helper makes many rules: the line that calls it is told beside it.
        outer = next((str(line) for line in inside if str(line) != str(inside[0])), "")
        return rule, Line(inside[0].file, inside[0].number, outer)
    for file in sorted(family.path.glob("checkpoint_mappings_*.py")):
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if any(f'"{t}"' in text for t in rule.targets):
                return rule, Line(str(file), number)
    return rule, cite(family.rules)


@contextmanager
def _noting(made: dict):
    """Within the block `made[id(rule)]` gets the lines of slices that make a rule, the innermost first. The rules must outlive what is done with it."""
    original = Rule.__init__

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        frame, lines = sys._getframe(1), []
        while frame is not None:
            if in_slice(frame.f_code.co_filename):
                lines.append(Line(frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        made[id(self)] = lines

    Rule.__init__ = noted
    try:
        yield
    finally:
        Rule.__init__ = original
