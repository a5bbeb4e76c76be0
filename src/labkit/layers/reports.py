"""`report`: a value inside a layer that the call's aux is to hold."""

import contextlib
import contextvars

from labkit.layers.tags import tag

_sink = contextvars.ContextVar("labkit_report_sink", default=None)


def report(name: str, value):
    """Add `value` to the aux of the running call: inside a layer's step it is stacked over the layers that report it. Returns `value`.

    A second value of one name in one step becomes `name#1`. Whoever records the call sees it under its name too.
    """
    value = tag(value, name)
    sink = _sink.get()
    if sink is not None:
        count = sum(key == name or key.startswith(f"{name}#") for key in sink)
        sink[f"{name}#{count}" if count else name] = value
    return value


@contextlib.contextmanager
def collecting():
    """Within the block reports go into the dict that it yields."""
    sink: dict = {}
    token = _sink.set(sink)
    try:
        yield sink
    finally:
        _sink.reset(token)


def start_collecting():
    """(dict, token) for a call whose beginning and end are two functions; `stop_collecting(token)` ends it."""
    sink: dict = {}
    return sink, _sink.set(sink)


def stop_collecting(token) -> None:
    _sink.reset(token)
