"""Where a parameter lies on disk: scanned, one array with its layer axis; unscanned, one entry per Hugging Face layer (a layout that exists on disk only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.layers.plan import LayerPlan
from labkit.models.mapping import Shape


@dataclass(frozen=True)
class Placement:
    """path: the parameter. layers: its Hugging Face layers in stack order, () when it is not stacked. keys: its entries on disk, one, or one per layer."""

    path: str
    shape: Shape
    layers: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def entry_shape(self) -> Shape:
        return self.shape if len(self.keys) == 1 and not self.unscanned else self.shape[1:]

    @property
    def unscanned(self) -> bool:
        return bool(self.layers) and self.keys != (self.path,)

    @property
    def row_shape(self) -> Shape:
        """The shape of one layer, or of the whole where nothing is stacked."""
        return self.shape[1:] if self.layers else self.shape

    def row(self, index: int | None) -> tuple[str, int | None]:
        """(key, chunk on axis 0) of one row: the whole parameter (None), or one layer of it."""
        if index is None:
            return self.keys[0], None
        return (self.keys[index], None) if self.unscanned else (self.path, index)

    def rows(self) -> list[int | None]:
        return list(range(len(self.layers))) if self.layers else [None]


def placements(plan: LayerPlan, shapes: Mapping[str, Shape], scan: bool) -> dict[str, Placement]:
    """path -> placement of every parameter of a model whose parameters have these paths and shapes."""
    prefixes = {plan.parameter_path(s, p) + ".": tuple(plan.layers_at(s, p)) for s, p, _ in plan.positions()}
    out = {}
    for path, shape in shapes.items():
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        layers = prefixes.get(prefix, ())
        keys = (path,) if scan or not layers else tuple(f"layers.{layer}.{path.removeprefix(prefix)}" for layer in layers)
        out[path] = Placement(path, tuple(shape), layers, keys)
    return out
