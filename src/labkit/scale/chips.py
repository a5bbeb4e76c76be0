"""Published figures of TPU chips, and topologies by name (`v5p:4x4x8`). Nothing here is measured."""

import dataclasses
import math
import re

from labkit.errors import InputError

GIB, GB, TERA = 2**30, 10**9, 10**12


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. hbm_bytes; peak_flops: bf16, per second; hbm_bandwidth: bytes per second; ici_bandwidth: bytes per second that a chip receives over all of its
    links (half of the published figure, which counts both directions); torus: dimensions of the interconnect; source: where the figures stand;
    dcn_bandwidth: bytes per second and chip between slices, None where no figure is published; devices_per_chip: how many devices the compiler makes of one
    chip, which share its figures equally."""

    name: str
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    torus: int
    accelerator_type: str
    source: str
    dcn_bandwidth: float | None = None
    devices_per_chip: int = 1


_CLOUD = 'Google Cloud documentation, page "TPU {}", as of November 2026'
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * GIB, 275 * TERA, 1200 * GB, 300 * GB, 3, "v4-8", _CLOUD.format("v4") + "; links: arXiv 2304.01433 (6 of 50 GB/s each way)"),
        Chip("v5e", 16 * GB, 197 * TERA, 819 * GB, 200 * GB, 2, "v5litepod-4", _CLOUD.format("v5e"), 3.125 * GB),
        Chip("v5p", 95 * GIB, 459 * TERA, 2765 * GB, 600 * GB, 3, "v5p-8", _CLOUD.format("v5p"), 6.25 * GB),
        Chip("v6e", 32 * GB, 918 * TERA, 1638 * GB, 400 * GB, 2, "v6e-4", _CLOUD.format("v6e"), 12.5 * GB),
        Chip("tpu7x", 192 * GIB, 2307 * TERA, 7380 * GB, 600 * GB, 3, "tpu7x-8", _CLOUD.format("TPU7x (Ironwood)"), 12.5 * GB, 2),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of chips. shape: chips along each dimension. slices: how many such slices, joined by the data-center network."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")


def parse_topology(text: str) -> Topology:
    """`v5p:4x4x8`, or `v5e:16x16*2` for two slices of it. Raises InputError for an unknown chip or a shape with the wrong number of dimensions."""
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)(?:\*(\d+))?", text.strip().lower())
    if match is None:
        raise InputError(f"a topology is written like v5p:4x4x8, not {text!r}", "--topology", f"chips: {', '.join(CHIPS)}")
    chip = CHIPS.get(match[1])
    if chip is None:
        raise InputError(f"no TPU chip is called {match[1]!r}", "--topology", f"one of {', '.join(CHIPS)}")
    shape = tuple(int(n) for n in match[2].split("x"))
    if len(shape) != chip.torus or min(shape) < 1:
        raise InputError(
            f"{chip.name} slices have {chip.torus} dimensions, {text!r} gives {len(shape)}",
            "--topology",
            "for example " + ("v5p:4x4x8" if chip.torus == 3 else "v5e:4x4"),
        )
    return Topology(chip, shape, int(match[3] or 1))
