"""Names for points inside a module, and the layer that a loop is running. Free at run time; the module code never sows.

`tag` is `jax.ad_checkpoint.checkpoint_name`, which remat policies read. While somebody records (`observing`), the tagged value is also handed to them.
"""

import contextlib
import contextvars

from jax.ad_checkpoint import checkpoint_name

_observer = contextvars.ContextVar("labkit_tag_observer", default=None)
_layer = contextvars.ContextVar("labkit_layer", default=None)


def tag(value, name: str):
    """`value`, known as `name` to remat policies; an observer receives it and may put another array in its place."""
    observer = _observer.get()
    if observer is not None:
        value = observer(name, value)
    return checkpoint_name(value, name)


@contextlib.contextmanager
def observing(observer):
    """Within the block every tagged value passes through `observer(name, value) -> value`."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextlib.contextmanager
def layer_scope(layer: int):
    """Within the block `current_layer()` is `layer`, the index that Hugging Face gives the layer. The loop runner sets it; a scan has no such index."""
    token = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(token)


def current_layer() -> int | None:
    """Hugging Face's index of the layer being run by the loop runner, or None."""
    return _layer.get()
