"""Exact mode: the reference built and run in float64, upcasts included.

Reference code lifts parts of its computation to float32 (norms, softmax, rope tables) whatever the model's dtype is. In a float64 model these lifts are
drops. Inside `exact_mode()` every `torch.float32` argument of a torch function and every `.float()` means float64 instead, and float64 is the default dtype.
"""

from contextlib import contextmanager


def _exact_function_mode():
    import torch
    from torch.overrides import TorchFunctionMode

    def lift(value):
        if value is torch.float32:
            return torch.float64
        if type(value) in (list, tuple):
            return type(value)(lift(v) for v in value)
        return value

    class Exact(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            return func(*(lift(a) for a in args), **{k: lift(v) for k, v in (kwargs or {}).items()})

    return Exact()


@contextmanager
def exact_mode():
    """Run the body with float64 in place of float32 for every torch call; also build models under it, so that rope tables come out in float64.

    The process's default dtype is restored on the way out. Nesting is harmless.
    """
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _exact_function_mode():
            yield
    finally:
        torch.set_default_dtype(before)
