"""The layer plan: a decoder as segments, a segment as a cycle of layer kinds repeated n times (design, "Layer plan")."""

import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Segment:
    """`cycle` repeated `repeats` times from Hugging Face layer `start`: layer l is cycle position (l - start) % len(cycle), stack index (l - start) //
    len(cycle)."""

    cycle: tuple[str, ...]
    repeats: int
    start: int

    @property
    def num_layers(self) -> int:
        return len(self.cycle) * self.repeats

    def layer(self, position: int, index: int) -> int:
        """Hugging Face's index of the layer at a cycle position and stack index."""
        return self.start + index * len(self.cycle) + position


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Segments in order. `variants` tells layers of one kind apart that differ in per-layer data (a window, a rope table): one label per layer."""

    segments: tuple[Segment, ...]
    variants: tuple[str, ...]

    @classmethod
    def from_kinds(cls, kinds: Sequence[str], variants: Sequence[str] | None = None) -> "LayerPlan":
        """The plan with the fewest stacked modules, then the fewest segments, whose layers have `kinds` in order.

        kinds: one name per layer; layers of equal name share code, parameter shapes and cache shapes. variants: one label per layer for what is per-layer data.
        """
        kinds = tuple(kinds)
        return cls(_segments(kinds), tuple(variants) if variants is not None else kinds)

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def kinds(self) -> tuple[str, ...]:
        """One kind per layer, in Hugging Face's order."""
        return tuple(kind for segment in self.segments for _ in range(segment.repeats) for kind in segment.cycle)

    @property
    def homogeneous(self) -> bool:
        """True when one kind of layer is stacked once."""
        return len(self.segments) == 1 and len(self.segments[0].cycle) == 1

    def positions(self) -> list[tuple[int, int, str]]:
        """Every stacked module: (segment, cycle position, kind)."""
        return [(s, p, kind) for s, segment in enumerate(self.segments) for p, kind in enumerate(segment.cycle)]

    def locate(self, layer: int) -> tuple[int, int, int]:
        """(segment, cycle position, stack index) of Hugging Face layer `layer`. Raises IndexError outside the plan."""
        for s, segment in enumerate(self.segments):
            if segment.start <= layer < segment.start + segment.num_layers:
                offset = layer - segment.start
                return s, offset % len(segment.cycle), offset // len(segment.cycle)
        raise IndexError(f"layer {layer} is outside a plan of {self.num_layers} layers")

    def parameter_path(self, segment: int, position: int) -> str:
        """Where the stacked module lives in the model: `layers`, or `layers.<segment>.<position>` when there is more than one."""
        return "layers" if self.homogeneous else f"layers.{segment}.{position}"

    def layers_at(self, segment: int, position: int) -> list[int]:
        """Hugging Face's layer indices in the stack order of one stacked module."""
        chosen = self.segments[segment]
        return [chosen.layer(position, index) for index in range(chosen.repeats)]

    def representative(self) -> int:
        """The number of leading layers that shows every combination of kind and per-layer data at least once."""
        wanted, seen = set(zip(self.kinds, self.variants)), set()
        for count, pair in enumerate(zip(self.kinds, self.variants), start=1):
            seen.add(pair)
            if seen == wanted:
                return count
        return self.num_layers

    def describe(self) -> str:
        """`3 x dense, 58 x moe` or `13 x (sliding, full)`."""
        return ", ".join(f"{s.repeats} x {s.cycle[0] if len(s.cycle) == 1 else '(' + ', '.join(s.cycle) + ')'}" for s in self.segments)


@functools.cache
def _segments(kinds: tuple[str, ...]) -> tuple[Segment, ...]:
    """Shortest description by dynamic programming: cost is (stacked modules, segments); at equal cost the longer first segment wins, which keeps
    remainders last."""
    count = len(kinds)
    best: list = [None] * count + [((0, 0, 0), ())]
    for start in range(count - 1, -1, -1):
        for cycle in range(1, count - start + 1):
            if best[start] is not None and cycle > best[start][0][0]:
                break
            repeats = 1
            while kinds[start + repeats * cycle : start + (repeats + 1) * cycle] == kinds[start : start + cycle]:
                repeats += 1
            for used in range(repeats, 0, -1):
                (modules, segments, _), rest = best[start + used * cycle]
                cost = (modules + cycle, segments + 1, -used * cycle)
                if best[start] is None or cost < best[start][0]:
                    best[start] = (cost, (Segment(kinds[start : start + cycle], used, start), *rest))
    return best[0][1]
