"""The phases, by number. A phase's module is imported when it is asked for."""

import importlib

PHASES = {1: "discover", 2: "layers", 3: "convert", 4: "verify"}


def phase_class(number: int):
    """The class of phase `number`: `labkit.lab.phases.<name>.<Name>`."""
    name = PHASES[number]
    return getattr(importlib.import_module(f"labkit.lab.phases.{name}"), name.capitalize())
