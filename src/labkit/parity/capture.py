"""Record one forward of a model of the garden under the reference's names; optionally with the reference's values put in at every module.

Calls of `nnx.Module`s are intercepted by path while the recording lasts; points inside a module arrive through `labkit.layers.tags`. The model runs eagerly and
by loop, so that every layer is a call of its own. With `inject`, each module gets the reference's recorded input and hands on the reference's recorded output:
what is recorded is then what each piece of code makes of exact inputs, so that one forward isolates every piece at once.
"""

import collections
import sys
from contextlib import ExitStack, contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from labkit.layers.tags import current_layer, observing
from labkit.parity.citation import Line, running_line

ROUTER_LOGITS = "router_logits"
"""What routers report for the auxiliary loss: on record as the router's own output, where the module returns its choice alone."""


class Recording(dict):
    """name -> what a module or tagged point gave, float64 or as computed.

    inputs: name -> the first array that reached a module (before any injection). classes: name -> our class. places: name -> the slice's line that ran when a
    point was tagged; calls: name -> the slice's line that called a module. order: (name, "input" or "output") as they came. result: the call's whole answer.
    unmatched: names whose reference value has another size than ours and was not put in. model_class: the class of the model.
    """

    def __init__(self):
        super().__init__()
        self.inputs: dict[str, np.ndarray] = {}
        self.classes: dict[str, type] = {}
        self.places: dict[str, Line] = {}
        self.calls: dict[str, Line] = {}
        self.order: list[tuple[str, str]] = []
        self.result = None
        self.unmatched: list[str] = []
        self.model_class: type | None = None


def capture(model, tokens, *, inject=None, **call) -> Recording:
    """Run `model(tokens, scan=False, **call)` and record it; logits are under `logits`.

    tokens: int [batch, length]. inject: a reference `Capture` (anything with `inputs` and `outputs` dicts), or None for a free run.
    """
    recording = Recording()
    recording.model_class = type(model)
    with intercepting(model, Interceptor(model, recording, inject)):
        result = model(jnp.asarray(tokens, jnp.int32), scan=False, **call)
    recording.result = result
    recording["logits"] = np.asarray(result[0] if isinstance(result, tuple) else result)
    return recording


@contextmanager
def intercepting(model, interceptor):
    """Within the block every call of a module of the model's classes, and every tagged value, goes through the interceptor."""
    classes = {type(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
    with ExitStack() as stack:
        for cls in classes:
            # A class may inherit its call: it is patched where it is defined, once.
            owner = next((c for c in cls.__mro__ if "__call__" in vars(c)), None)
            if owner is not None and not hasattr(vars(owner)["__call__"], "_labkit_original"):
                original = vars(owner)["__call__"]
                stack.callback(setattr, owner, "__call__", original)
                owner.__call__ = interceptor.wrap(original)
        stack.enter_context(observing(interceptor.tagged))
        yield


class Interceptor:
    """What becomes of a call: its name by path, what arrives, what leaves."""

    def __init__(self, model, recording, inject):
        self.model, self.recording, self.inject = model, recording, inject
        self.stack: list[tuple[object, str]] = []
        self.counts: dict[str, int] = {}
        self.reported: dict[str, object] = {}

    def wrap(self, original):
        def call(module, *args, **kwargs):
            if module is self.model or (self.stack and self.stack[-1][0] is module):
                return original(module, *args, **kwargs)
            name = self.numbered(self.name_of(module))
            self.recording.classes[name] = type(module)
            self.note(self.recording.calls, name, sys._getframe(1))
            args, kwargs = self.arrive(name, args, kwargs)
            self.stack.append((module, name))
            try:
                result = original(module, *args, **kwargs)
            finally:
                self.stack.pop()
            return self.leave(name, result)

        call._labkit_original = original
        return call

    def note(self, lines, name, frame):
        line = running_line(frame)
        if line is not None:
            lines[name] = line

    def numbered(self, name):
        count = self.counts[name] = self.counts.get(name, -1) + 1
        return f"{name}#{count}" if count else name

    def name_of(self, module) -> str:
        parent, prefix = self.stack[-1] if self.stack else (self.model, "")
        path = _path_within(parent, module)
        if path is None:
            # The loop runner rebuilds each layer from its slice of the stack: it hangs on no parent, and its index is the runner's.
            layer = current_layer()
            path = f"layers.{layer}" if layer is not None and not self.stack else type(module).__name__
        return f"{prefix}.{path}" if prefix else path

    def arrive(self, name, args, kwargs):
        args = list(args)
        for holder, key in [(args, i) for i in range(len(args))] + [(kwargs, k) for k in kwargs]:
            value = holder[key]
            if isinstance(value, jax.Array):
                self.recording.inputs[name] = np.asarray(value)
                self.recording.order.append((name, "input"))
                if self.inject is not None and jnp.issubdtype(value.dtype, jnp.inexact):
                    holder[key] = self.reference(self.inject.inputs, name, value)
                break
        return tuple(args), kwargs

    def leave(self, name, result):
        parts = list(result) if isinstance(result, tuple) else [result]
        first = next((i for i, part in enumerate(parts) if isinstance(part, jax.Array)), None)
        if first is None:
            return result
        self.recording.order.append((name, "output"))
        if is_router(parts):
            if name in self.reported:
                self.recording[name] = np.asarray(self.reported[name])
            parts = self.leave_router(name, parts)
        else:
            self.recording[name] = np.asarray(parts[first])
            if self.inject is not None:
                parts[first] = self.reference(self.inject.outputs, name, parts[first])
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts) if isinstance(result, tuple) else parts[0]

    def leave_router(self, name, parts):
        """Logits (the first float array of another shape than the choice), weights and indices, told apart by type and shape in whatever order they come.

        What the router tagged itself is on record already, from before its tag put the reference's value in.
        """
        choice, seen = next(part.shape for part in parts if is_whole(part)), set()
        for i, part in enumerate(parts):
            if not isinstance(part, jax.Array):
                continue
            key = name + (".indices" if is_whole(part) else ".weights" if part.shape == choice else "")
            if key in seen:
                continue
            seen.add(key)
            if key not in self.recording:
                self.recording[key] = np.asarray(part)
            if self.inject is not None:
                parts[i] = self.reference(self.inject.outputs, key, part)
        return parts

    def tagged(self, tag, value):
        scope = self.stack[-1][1] if self.stack else ""
        if tag == ROUTER_LOGITS:
            self.reported[scope] = value
            return value
        name = self.numbered(f"{scope}.{tag}" if scope else tag)
        self.note(self.recording.places, name, sys._getframe(2))
        self.recording.order.append((name, "output"))
        self.recording[name] = np.asarray(value)
        return value if self.inject is None else self.reference(self.inject.outputs, name, value)

    def reference(self, values, name, ours):
        """The reference's value under `name` in our shape and dtype, or ours when there is none of this size."""
        value = values.get(name)
        if value is None:
            return ours
        if value.size != ours.size:
            self.recording.unmatched.append(name)
            return ours
        return jnp.asarray(np.asarray(value).reshape(ours.shape), ours.dtype)


def is_whole(part) -> bool:
    return isinstance(part, jax.Array) and part.ndim > 1 and jnp.issubdtype(part.dtype, jnp.integer)


def is_router(parts) -> bool:
    """A choice of experts: an integer array and a float array of the same shape."""
    whole = [part.shape for part in parts if is_whole(part)]
    return bool(whole) and any(isinstance(part, jax.Array) and jnp.issubdtype(part.dtype, jnp.inexact) and part.shape == whole[0] for part in parts)


def _path_within(parent, module) -> str | None:
    """The shortest attribute path from `parent` to `module`, through lists, dicts and, where a module is reached by another one's method, through that one."""
    pending = collections.deque(((key,), value) for key, value in vars(parent).items() if not key.startswith("_"))
    seen: set[int] = set()
    while pending:
        path, value = pending.popleft()
        if value is module:
            return ".".join(map(str, path))
        if isinstance(value, (list, tuple, nnx.List)):
            pending += [((*path, i), item) for i, item in enumerate(value)]
        elif isinstance(value, (dict, nnx.Dict)):
            pending += [((*path, key), item) for key, item in value.items()]
        elif isinstance(value, nnx.Module) and id(value) not in seen:
            seen.add(id(value))
            pending += [((*path, key), item) for key, item in vars(value).items() if not key.startswith("_")]
    return None
