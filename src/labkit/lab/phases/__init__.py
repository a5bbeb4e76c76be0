"""The phases, by number. A phase's module is imported when it is asked for."""

import importlib

PHASES = {1: "discover", 2: "layers", 3: "convert", 4: "verify", 5: "scale"}
PROVING = (1, 2, 3, 4)
"""The phases whose gates together prove a port; phase 5 says how it scales and trains."""


def phase_class(number: int):
    """The class of phase `number`: `labkit.lab.phases.<name>.<Name>`."""
    name = PHASES[number]
    return getattr(importlib.import_module(f"labkit.lab.phases.{name}"), name.capitalize())
