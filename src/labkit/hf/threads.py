"""How the reference's threads wait, and when it had better use one."""

import contextlib
from collections.abc import Iterator

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For processes that run the reference beside others: idle OpenMP threads sleep instead of spinning. With more runnable threads than cores, spinning made a
decode of 64 tokens take minutes. Must be in the environment before torch is loaded; a value that the user has set goes first."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread inside the block. Tiny models gain nothing from more, and beside other work each operation waits for its helpers: a
    mixture of experts of 5 layers took 25 times as long with two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stay_on_one_thread() -> None:
    """This process's torch computes on one thread from now on."""
    import torch

    torch.set_num_threads(1)
