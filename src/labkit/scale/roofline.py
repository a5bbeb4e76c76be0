"""A lower bound on a step's time from published figures: how long compute, memory and links would each take alone."""

from pydantic import BaseModel

from labkit.scale.chips import Chip
from labkit.scale.collectives import Collective


class Roofline(BaseModel):
    """Seconds that one step needs at least, by resource, and what they were computed from. All figures are of one device.

    overlapped: the largest of the three, when everything hides behind it. serial: their sum, when nothing overlaps.
    """

    compute: float
    memory: float
    links: float
    flops: float
    hbm_bytes: float
    link_bytes: float
    peak_flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    torus: int
    source: str

    @property
    def overlapped(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def serial(self) -> float:
        return self.compute + self.memory + self.links

    @property
    def bound_by(self) -> str:
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


def link_seconds(collective: Collective, chip: Chip, coordinates: list[tuple[int, ...]], devices_per_chip: int = 1) -> float:
    """Time of one collective on links: its group uses those torus dimensions along which its chips lie apart, both directions of each. A group that reaches
    over several slices takes the network between them for all it moves, an upper bound.

    coordinates: of every device's chip and, last, its slice, by the number that the program gives the device.
    """
    places = {coordinates[device] for device in collective.group if device < len(coordinates)}
    apart = [len(set(along)) > 1 for along in zip(*places)]
    if apart and apart[-1] and chip.dcn_bandwidth is not None:
        return collective.total * devices_per_chip / chip.dcn_bandwidth
    dimensions = min(sum(apart[:-1]) or 1, chip.torus)
    return collective.total / (chip.ici_bandwidth / devices_per_chip * dimensions / chip.torus)


def roofline(
    *, flops: float, hbm_bytes: float, collectives: list[Collective], chip: Chip, coordinates: list[tuple[int, ...]], devices_per_chip: int = 1
) -> Roofline:
    """flops, hbm_bytes: of one device in one step. A device is a chip, or one of the cores that share it equally."""
    peak, bandwidth = chip.peak_flops / devices_per_chip, chip.hbm_bandwidth / devices_per_chip
    return Roofline(
        compute=flops / peak,
        memory=hbm_bytes / bandwidth,
        links=sum(link_seconds(c, chip, coordinates, devices_per_chip) for c in collectives),
        flops=flops,
        hbm_bytes=hbm_bytes,
        link_bytes=sum(c.total for c in collectives),
        peak_flops=peak,
        hbm_bandwidth=bandwidth,
        ici_bandwidth=chip.ici_bandwidth / devices_per_chip,
        torus=chip.torus,
        source=chip.source,
    )
