"""Check 2: a call changes nothing. Graph definition and state are the same after it, in the model and in each layer that a runner rebuilds; nothing is sown."""

import contextlib

import jax
import numpy as np
from flax import nnx

from labkit.converters.filling import dotted
from labkit.parity.conformance.report import Found

LENGTH = 6


def check(subject) -> Found:
    """The call is traced by scan and by loop, with and without a cache, with its aux. value: how many modules were watched."""
    found, tokens, watched = Found(), subject.tokens[:2, :LENGTH], 0
    graphdef, state = nnx.split(subject.model)
    leaves = jax.tree.leaves(state)
    for way, cache, options in (
        ("scan", None, {"scan": True}),
        ("loop", None, {"scan": False}),
        ("aux", None, {"return_aux": True}),
        ("cache", subject.model.init_cache(2, LENGTH + 2), {"scan": True}),
        ("cache by loop", subject.model.init_cache(2, LENGTH + 2), {"scan": False}),
    ):
        with watched_merges() as merged:

            def call(state, tokens, cache, options=options, merged=merged):
                result = nnx.merge(graphdef, state)(tokens, segment_ids=np.ones_like(tokens), cache=cache, **options)
                # Compared while the traces that the layers belong to are still known.
                merged.compare()
                return result

            jax.eval_shape(lambda state, cache: call(state, tokens, cache), state, cache)
        watched += merged.count
        found.problems += [f"{what} ({way})" for what in dict.fromkeys(merged.problems)]
    after_graphdef, after = nnx.split(subject.model)
    if after_graphdef != graphdef or any(a is not b for a, b in zip(jax.tree.leaves(after), leaves, strict=True)):
        found.problems.append("the model itself is another after the calls")
    found.value = float(watched)
    return found


class Merged:
    """Modules made by `nnx.merge`, each with what it was made of."""

    def __init__(self, split):
        self._split, self._entries, self.problems, self.count, self.graphdefs = split, [], [], 0, []

    def add(self, module):
        graphdef, state = self._split(module)
        self._entries.append((module, graphdef, _values(state)))
        self.count += 1
        self.graphdefs.append((type(module), graphdef))

    def compare(self):
        """Adds to `problems` what changed in a module since it was made."""
        for module, graphdef, before in self._entries:
            now_graphdef, now = self._split(module)
            name, after = type(module).__name__, _values(now)
            for path in sorted(after.keys() - before.keys()):
                self.problems.append(f"{name} has {path} after the call: sown or set in it")
            for path in sorted(before.keys() - after.keys()):
                self.problems.append(f"{name} has lost {path} in the call")
            for path in sorted(before.keys() & after.keys()):
                if before[path] is not after[path]:
                    self.problems.append(f"{name}.{path} is another value after the call")
            if now_graphdef != graphdef and before.keys() == after.keys():
                self.problems.append(f"the graph definition of {name} is another after the call: an attribute was set in it")
        self._entries.clear()


def _values(state) -> dict:
    """path -> the array itself: a state shares its variables with the module, and a variable that is written keeps its identity."""
    return {dotted(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)}


@contextlib.contextmanager
def watched_merges():
    """Within the block every `nnx.merge` of whatever code is on record: the runners rebuild each layer in their loop, where a change would be lost unseen."""
    original, record = nnx.merge, Merged(nnx.split)

    def merge(graphdef, *states, **options):
        module = original(graphdef, *states, **options)
        record.add(module)
        return module

    nnx.merge = merge
    try:
        yield record
        record.compare()
    finally:
        nnx.merge = original
