"""From the reference's source to a slice: what it is made of, its donor, its delta list."""

from labkit.port.delta import DeltaList, delta_list
from labkit.port.donor import nearest, ranking

__all__ = ["DeltaList", "delta_list", "nearest", "ranking"]
