"""labkit: brings a Hugging Face causal LM up in JAX and proves that the port computes the same function."""

import glob
import importlib.util
import os
import sys
from pathlib import Path

__version__ = "0.1.0"

_SAID = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_HOST_BOUNDS")
_PCI_VENDOR, _NETWORK_CARD = "0x1ae0", "0x0042"  # of TPUs, and of ordinary cloud machines


def tpu_attached(pci: str = "/sys/bus/pci/devices", devices: str = "/dev") -> bool:
    """True for anything that may be a TPU: a PCI device of its vendor other than a network card, or an accelerator's device file."""

    def number(path: Path) -> str:
        return path.read_text().strip() if path.is_file() else ""

    found = [Path(path) for path in glob.glob(f"{pci}/*") if number(Path(path) / "vendor") == _PCI_VENDOR]
    return any(number(path / "device") != _NETWORK_CARD for path in found) or bool(glob.glob(f"{devices}/accel*"))


def leave_absent_tpu_alone() -> None:
    """Where libtpu is installed for its compiler and no TPU is attached, keep jax from starting it: it would print alarming lines and lock itself.

    Nothing is touched with a TPU, or where a variable (`_SAID`) already tells jax or libtpu what to use. Child processes inherit what is set. Where jax has
    plug-ins for other accelerators, those stay in use, and libtpu is told enough to give up in silence.
    """
    if any(name in os.environ for name in _SAID) or importlib.util.find_spec("libtpu") is None or tpu_attached():
        return
    os.environ.update({"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"})
    if importlib.util.find_spec("jax_plugins") is None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules and sys.modules["jax"].config.jax_platforms is None:
            sys.modules["jax"].config.update("jax_platforms", "cpu")


leave_absent_tpu_alone()
