"""The figures of phase 5: devices under their mesh axes, memory and time by chip, what moves between devices, a loss curve, routing imposed and free."""

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.lab.figures import BLUE, CYCLE, FAINT, GREEN, GREY, INK, ORANGE, PINK, RED, SKY, Drawing, _axes
from labkit.lab.show import number, visible


def mesh(sizes: Mapping[str, int], processes: Sequence[int] = ()) -> Drawing:
    """Devices as tiles. sizes: mesh axis -> size; the two largest axes span rows and columns, further ones repeat the block. processes: the process of each
    device, in mesh order; tiles of one process share a colour."""
    from matplotlib.patches import Rectangle

    names = [name for name, size in sizes.items() if size > 1] or list(sizes)[:1]
    total = int(np.prod(list(sizes.values())))
    outer, row, column = ([None, None] + names)[-3] if len(names) > 2 else None, names[-2] if len(names) > 1 else None, names[-1]
    columns = sizes[column]
    rows = total // columns
    canvas, axes = _axes(0.95 + 0.46 * min(rows, 16), f"{total} devices: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
    for index in range(total):
        x, y = index % columns, rows - 1 - index // columns
        owner = processes[index] if processes else 0
        axes.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, color=CYCLE[owner % len(CYCLE)]))
        places = np.unravel_index(index, tuple(sizes.values()))
        text = " ".join(f"{name[0]}{place}" for name, place in zip(sizes, places) if sizes[name] > 1) or "0"
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=8)
    axes.set_xlim(0, columns)
    axes.set_ylim(0, rows)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(f"{column} →")
    axes.set_ylabel(" × ".join(name for name in (outer, row) if name) + (" →" if row else ""))
    for side in axes.spines.values():
        side.set_visible(False)
    caption = "One tile per device; letters are axes, numbers places on them." + (" A colour per process." if processes else "")
    return Drawing(canvas, "Mesh", f"{total} devices in {rows} rows of {columns}.", caption)


def memory(rows: Sequence[Mapping], title: str = "Memory of one device") -> Drawing:
    """Stacked bars per compiled program against the chip's memory. rows: name; arguments, temporaries, outputs, limit: bytes."""
    canvas, axes = _axes(1.05 + 0.36 * len(rows), title)
    names = [visible(row["name"]) for row in rows]
    left = np.zeros(len(rows))
    for part, colour in (("arguments", BLUE), ("temporaries", ORANGE), ("outputs", GREEN)):
        values = np.asarray([row[part] for row in rows], float) / 2**30
        axes.barh(names, values, left=left, color=colour, height=0.6, label=part)
        left += values
    for y, row in enumerate(rows):
        limit = row["limit"] / 2**30
        axes.plot([limit, limit], [y - 0.4, y + 0.4], color=RED, lw=2)
        axes.text(left[y], y, f" {_bytes(left[y] * 2**30)} of {limit:.0f} GiB", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*left, *(row["limit"] / 2**30 for row in rows)]) * 1.32)
    axes.set_xlabel("GiB; the red mark is the chip's memory")
    canvas.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    fits = sum(total * 2**30 <= row["limit"] for total, row in zip(left, rows))
    return Drawing(canvas, title, f"{fits} of {len(rows)} programs fit into the chip's memory.")


def _bytes(count: float) -> str:
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def collectives(rows: Sequence[Mapping], title: str = "What moves between devices") -> Drawing:
    """Bars of bytes per device by program and kind, those that move weights set apart. rows: name, kind, moves ("weights" | "activations" | ...), bytes."""
    rows = [row for row in rows if row["bytes"]]
    canvas, axes = _axes(1.0 + 0.32 * max(1, len(rows)), title)
    colours = {"weights": ORANGE, "activations": BLUE, "gradients": GREEN}
    for y, row in enumerate(rows):
        axes.barh(y, row["bytes"] / 2**20, color=colours.get(row["moves"], GREY), height=0.64)
        axes.text(row["bytes"] / 2**20, y, f" {_bytes(row['bytes'])}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{visible(row['name'])}: {visible(row['kind'])}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max([row["bytes"] / 2**20 for row in rows], default=1) * 1.2)
    axes.set_xlabel("MiB per device and call")
    from matplotlib.patches import Patch

    kinds = list(dict.fromkeys(row["moves"] for row in rows))
    if kinds:
        canvas.legend(
            handles=[Patch(color=colours.get(kind, GREY), label=visible(kind)) for kind in kinds],
            loc="outside lower left",
            ncols=4,
            frameon=False,
            fontsize=8.5,
        )
    return Drawing(canvas, title, f"{len(rows)} kinds of collectives; the largest moves {_bytes(max([row['bytes'] for row in rows], default=0))}.")


def roofline(rows: Sequence[Mapping], title: str = "Roofline estimate") -> Drawing:
    """Grouped bars per program: seconds that the chip's published peaks allow for arithmetic, memory and interconnect. rows: name, compute, memory, network."""
    canvas, axes = _axes(1.1 + 0.62 * len(rows), title)
    parts = (("compute", BLUE), ("memory", SKY), ("network", PINK))
    top = max([row[part] for row in rows for part, _ in parts], default=1e-9) or 1e-9
    for y, row in enumerate(rows):
        bound = max(parts, key=lambda part: row[part[0]])[0]
        for offset, (part, colour) in zip((-0.27, 0, 0.27), parts):
            axes.barh(y + offset, row[part] * 1e3, height=0.25, color=colour, label=part if y == 0 else None)
            axes.text(
                row[part] * 1e3, y + offset, f" {number(round(row[part] * 1e3, 4))} ms" + (" (bound)" if part == bound else ""), va="center", fontsize=7.5
            )
    axes.set_yticks(range(len(rows)), [visible(row["name"]) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, top * 1e3 * 1.25)
    axes.set_xlabel("milliseconds at the chip's published peaks")
    canvas.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    return Drawing(canvas, title, f"{len(rows)} programs; the longest bar of each is what bounds it.", "An estimate from published figures, not a measurement.")


def loss_curve(losses: Sequence[float], title: str = "Training loss", extra: Mapping[str, Sequence[float]] | None = None) -> Drawing:
    """Loss by step in nats per token, first and last value named; `extra` are further curves of the same steps."""
    canvas, axes = _axes(2.7, title)
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, ".-", color=BLUE, lw=1.3, ms=4, label="loss")
    for (name, values), colour in zip((extra or {}).items(), CYCLE[1:]):
        axes.plot(steps, values, ".-", color=colour, lw=1.1, ms=3, label=visible(name))
    for i in (0, len(losses) - 1):
        axes.annotate(f"{losses[i]:.3f}", (steps[i], losses[i]), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.margins(y=0.2)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    if extra:
        canvas.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return Drawing(canvas, title, f"Loss from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps.")


def routing(agreement: Sequence[float], free: Sequence[float], frozen: Sequence[float], title: str = "Routing, free and imposed") -> Drawing:
    """Left: share of equal expert choices by layer. Right: KL by position, our own choices against the reference's imposed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    from labkit.lab.figures import _STYLE, WIDTH, power_of_ten

    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH, 2.8))
        left, right = canvas.subplots(1, 2, width_ratios=(2, 3))
        canvas.suptitle(visible(title), x=0.012, ha="left", fontsize=10.5, fontweight="bold")
        left.bar(range(len(agreement)), np.asarray(agreement, float) * 100, color=BLUE, width=0.7)
        left.set_ylim(0, 108)
        left.set_ylabel("equal choices, percent")
        left.set_xlabel("mixture layer")
        left.set_xticks(range(0, len(agreement), max(1, len(agreement) // 12)))
        floor = 1e-16
        for values, colour, name in ((free, ORANGE, "own choices"), (frozen, BLUE, "the reference's imposed")):
            right.plot(np.maximum(np.asarray(values, float), floor), color=colour, lw=1.1, label=f"{name} (mean {number(float(np.mean(values)))})")
        right.set_yscale("log")
        right.yaxis.set_major_formatter(power_of_ten)
        right.minorticks_off()
        right.set_xlabel("position")
        right.set_ylabel("KL, nats")
        right.grid(axis="y", color=FAINT, lw=0.6)
        canvas.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8.5)
    alt = (
        f"Lowest agreement {min(agreement):.1%}; mean KL {number(float(np.mean(free)))} free and {number(float(np.mean(frozen)))} with the reference's choices."
    )
    return Drawing(canvas, title, alt, "What stays when the choices are imposed is arithmetic; the rest is routing.")
