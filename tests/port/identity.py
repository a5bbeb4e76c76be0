"""A parameter list that says `ours == memory` for any model of transformers: enough to test rules without a translator."""

import re
from collections import Counter, defaultdict

from labkit.layers.plan import LayerPlan
from labkit.port.rules import Parameter


def identity(state: dict, tied: dict):
    """(parameters, plan, {path: shape}, {path: [in-memory name, one per row]}) of a state dict name -> array; the longest list of layers is the main stack."""
    names = [name for name in state if name not in tied]
    stacks = defaultdict(set)
    for name in names:
        if match := re.match(r"(.*?\.)(\d+)\.", name):
            stacks[match[1]].add(int(match[2]))
    prefix = max(stacks, key=lambda p: len(stacks[p]))
    layers = defaultdict(dict)
    for name in names:
        if match := re.fullmatch(rf"{re.escape(prefix)}(\d+)\.(.*)", name):
            layers[int(match[1])][match[2]] = state[name].shape
    kinds, seen = [], {}
    for layer in range(max(layers) + 1):
        kinds.append(seen.setdefault(tuple(sorted(layers[layer].items())), f"kind_{len(seen)}"))
    plan = LayerPlan.from_kinds(kinds)
    parameters, shapes, rows = {}, {}, {}
    for name in names:
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)\.(.*)", name)
        if match:
            rest, letters = match[2], iter("ijk")
            general = re.sub(r"(?<=\.)\d+(?=\.|$)", lambda _: "{" + next(letters) + "}", rest)
            parameters[f"layers.{general}"] = Parameter(f"layers.{general}", prefix + "{layer}." + general, state[name].shape)
            segment, position, index = plan.locate(int(match[1]))
            path = f"{plan.parameter_path(segment, position)}.{rest}"
            rows.setdefault(path, []).append(name)
            shapes[path] = (len(plan.layers_at(segment, position)), *state[name].shape)
        else:
            letters = iter("ijk")
            general = re.sub(r"(?<=\.)\d+(?=\.|$)", lambda _: "{" + next(letters) + "}", name)
            parameters[f"plain.{general}"] = Parameter(f"plain.{general}", general, state[name].shape)
            rows[f"plain.{name}"], shapes[f"plain.{name}"] = [name], tuple(state[name].shape)
    assert Counter(n for group in rows.values() for n in group) == Counter(names)
    return list(parameters.values()), plan, shapes, rows
