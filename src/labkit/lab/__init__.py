"""Phases as notebooks call them: `lab.discover(model)`, `lab.layers(model)`, `lab.convert(model)`, `lab.verify(model)`, `lab.scale(model)`."""


def discover(model: str, **parameters):
    """Phase 1 on `model`: config, pattern, parameters, tokenizer, walls, subset."""
    from labkit.lab.phases.discover import Discover

    return Discover(model, **parameters)


def layers(model: str, **parameters):
    """Phase 2 on `model`: the component checklist against the reference's own modules."""
    from labkit.lab.phases.layers import Layers

    return Layers(model, **parameters)


def convert(model: str, **parameters):
    """Phase 3 on `model`: to Orbax and back, bit for bit."""
    from labkit.lab.phases.convert import Convert

    return Convert(model, **parameters)


def verify(model: str, **parameters):
    """Phase 4 on `model`: the three verdicts on the subset and on the full model."""
    from labkit.lab.phases.verify import Verify

    return Verify(model, **parameters)


def scale(model: str, **parameters):
    """Phase 5 on `model`: meshes, the TPU compiler, training."""
    from labkit.lab.phases.scale import Scale

    return Scale(model, **parameters)
