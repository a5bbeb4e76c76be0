"""The lab's figures: small SVGs with direct labels, units and colour-blind-safe colours (Okabe and Ito).

Each function draws and returns a `Drawing`; `.write(folder, name)` puts it in `<folder>/figures/<name>.svg` and returns the `Figure` of a record.
The same data gives the same bytes.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labkit.lab.records import write_atomically
from labkit.lab.show import Figure, number, visible

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8A8F98"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW)
INK, FAINT = "#22262C", "#D9DCE1"
WIDTH = 7.2
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9AA0A8",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "svg.hashsalt": "labkit",
    "svg.fonttype": "path",
    "figure.constrained_layout.use": True,
    "text.parse_math": False,
}


@dataclass
class Drawing:
    """A drawn figure with its words."""

    figure: object
    title: str
    alt: str
    caption: str = ""

    def write(self, folder: Path, name: str) -> Figure:
        import matplotlib as mpl

        file = f"figures/{name}.svg"
        buffer = io.BytesIO()
        with mpl.rc_context(_STYLE):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "labkit"}, facecolor="white")
        write_atomically(Path(folder) / file, buffer.getvalue())
        return Figure(title=self.title, file=file, alt=self.alt, caption=self.caption).at(Path(folder))


def _axes(height: float, title: str):
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH, height))
        axes = canvas.subplots()
        axes.set_title(visible(title))
    return canvas, axes


def power_of_ten(value: float, _=None) -> str:
    """A tick of a log axis as text: math text is off, because names come from outside."""
    return f"10{str(round(np.log10(value))).translate(_SUPERSCRIPT)}"


def parameter_share(parts: Mapping[str, int], unit: str = "parameters") -> Drawing:
    """Horizontal bars, largest first: each component's count and share. parts: component -> count."""
    parts = dict(sorted(((k, v) for k, v in parts.items() if v), key=lambda kv: -kv[1]))
    total = sum(parts.values())
    scale, short, long = next(s for s in ((1e9, "B", "billions"), (1e6, "M", "millions"), (1e3, "k", "thousands"), (1, "", "")) if total >= s[0])
    canvas, axes = _axes(0.75 + 0.32 * len(parts), f"Where the {total / scale:,.1f} {short} {unit} are")
    bars = axes.barh([visible(k) for k in parts], [v / scale for v in parts.values()], color=BLUE, height=0.66)
    axes.bar_label(bars, [f" {v / scale:,.2f} {short} · {v / total:.1%}" for v in parts.values()], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, max(parts.values()) / scale * 1.28)
    axes.set_xlabel(f"{unit}, {long}".rstrip(", "))
    largest = next(iter(parts))
    return Drawing(
        canvas,
        f"{unit.capitalize()} by component",
        f"Bars of {unit} by component; the largest is {visible(largest)} with {parts[largest] / total:.0%} of {total:,}.",
    )


def decoder_pattern(kinds: Sequence[str], subset: Sequence[int] = ()) -> Drawing:
    """A strip with one tile per layer, coloured by kind; the layers of the subset are underlined."""
    from matplotlib.patches import Patch, Rectangle

    names = list(dict.fromkeys(kinds))
    canvas, axes = _axes(1.55, f"{len(kinds)} decoder layers, {len(names)} kind{'s' * (len(names) != 1)}")
    for i, kind in enumerate(kinds):
        axes.add_patch(Rectangle((i + 0.06, 0), 0.88, 1, color=CYCLE[names.index(kind) % len(CYCLE)]))
        if len(kinds) <= 48:
            axes.text(i + 0.5, 0.5, str(i), ha="center", va="center", color="white", fontsize=7 if len(kinds) > 32 else 8)
    for i in subset:
        axes.plot([i + 0.1, i + 0.9], [-0.28, -0.28], color=INK, lw=2.2, solid_capstyle="butt")
    axes.set_xlim(0, len(kinds))
    axes.set_ylim(-0.55, 1.05)
    axes.axis("off")
    handles = [Patch(color=CYCLE[i % len(CYCLE)], label=f"{visible(n)} × {list(kinds).count(n)}") for i, n in enumerate(names)]
    canvas.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    chosen = f" Underlined: the layers of the subset ({len(subset)})." if subset else ""
    return Drawing(
        canvas,
        "Decoder pattern",
        f"{len(kinds)} layers: " + ", ".join(f"{list(kinds).count(n)} of kind {visible(n)}" for n in names) + ".",
        f"One tile per layer.{chosen}",
    )


def kl_by_position(
    series: Mapping[str, Sequence[float]], limit: float, loose: Mapping[str, float] | None = None, title: str = "KL divergence per position, float32"
) -> Drawing:
    """Lines on a log scale, one per prompt: nats at each position; the limit drawn and named, looser limits in grey. Zeros sit on the floor of the axis."""
    canvas, axes = _axes(3.1, title)
    floor = 1e-16
    top = max([max(np.max(np.asarray(v, float), initial=0.0) for v in series.values()), limit, *(loose or {}).values()])
    longest = max(len(v) for v in series.values())
    for i, (name, values) in enumerate(series.items()):
        values = np.maximum(np.asarray(values, float), floor)
        axes.plot(
            np.arange(len(values)),
            values,
            ".-" if len(values) < 40 else "-",
            color=CYCLE[i % len(CYCLE)],
            lw=1.1,
            ms=3.5,
            label=f"{visible(name)} (max {number(float(values.max()))})",
        )
    axes.axhline(limit, color=RED, lw=1.4)
    axes.text(longest, limit, f"limit {number(limit)} ", color=RED, va="bottom", ha="right", fontsize=8.5)
    for name, value in (loose or {}).items():
        axes.axhline(value, color=GREY, lw=1, ls=(0, (4, 3)))
        axes.text(longest, value, f"{visible(name)} ", color="#5B616A", va="bottom", ha="right", fontsize=8.5)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(power_of_ten)
    axes.set_ylim(floor / 2, top * 20)
    axes.set_xlim(-0.5, longest + 0.5)
    axes.set_xlabel("position in the prompt, tokens")
    axes.set_ylabel("KL(reference ‖ ours), nats")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.minorticks_off()
    canvas.legend(frameon=False, fontsize=8.5, loc="outside lower left", ncols=min(3, len(series)))
    worst = max(float(np.max(v)) for v in series.values())
    return Drawing(
        canvas, title, f"Largest KL {number(worst)} against the limit {number(limit)}.", "Lower is better; the worst position of each prompt is in the legend."
    )


def activation_errors(free: np.ndarray, isolated: np.ndarray, components: Sequence[str], layers: Sequence[str], limit: float, title: str) -> Drawing:
    """Two heat maps of log10 relative error, component by layer: fed by our own previous layer, and fed by the reference's input.

    free, isolated: [components, layers], NaN where a layer has no such component.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH, max(2.4, 1.2 + 0.2 * len(components))))
        left, right = canvas.subplots(1, 2, sharey=True)
        canvas.suptitle(visible(title), x=0.012, ha="left", fontsize=10.5, fontweight="bold")
        top = float(np.log10(limit))
        low = min(-17.0, top - 6)
        image = None
        for axes, data, name in ((left, free, "free run"), (right, isolated, "isolated")):
            logs = np.log10(np.maximum(np.asarray(data, float), 10.0**low))
            image = axes.imshow(logs, aspect="auto", cmap="cividis", vmin=low, vmax=top + 1, interpolation="nearest")
            for y, x in np.argwhere(np.asarray(data, float) > limit):
                axes.add_patch(mpl.patches.Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, ec=RED, lw=1.6))
            worst = np.nanmax(data) if np.isfinite(data).any() else float("nan")
            axes.set_title(f"{name}: worst {number(float(worst))}", fontsize=9, fontweight="normal", pad=6)
            step = max(1, len(layers) // 10)
            axes.set_xticks(range(0, len(layers), step), [str(layers[i]) for i in range(0, len(layers), step)], fontsize=8)
            axes.set_xlabel("layer")
        left.set_yticks(range(len(components)), [visible(c) for c in components], fontsize=8)
        bar = canvas.colorbar(image, ax=[left, right], fraction=0.04, pad=0.015)
        bar.set_label(f"log₁₀ relative error (red line: limit {number(limit)})", fontsize=8)
        bar.ax.axhline(top, color=RED, lw=1.8)
    over = int((np.asarray(free, float) > limit).sum() + (np.asarray(isolated, float) > limit).sum())
    alt = f"Relative errors of {len(components)} components over {len(layers)} layers; {over} above the limit {number(limit)}."
    return Drawing(
        canvas,
        title,
        alt,
        "Blue is exact, yellow is near the limit, a red frame is above it. In a free run a fault spreads; isolated, only the faulty part shows.",
    )


def greedy_strip(ours: Sequence[int], reference: Sequence[int], ties: Sequence[int] = (), words: Sequence[str] = (), title: str = "Greedy tokens") -> Drawing:
    """A tile per decoded token: same, tie (the reference's own top two are closer than the noise), or different."""
    from matplotlib.patches import Patch, Rectangle

    count = max(len(ours), len(reference))
    per_row = 16
    rows = -(-count // per_row)
    canvas, axes = _axes(0.95 + 0.52 * rows, f"{title}: {sum(a == b for a, b in zip(ours, reference))} of {count} identical")
    colours = {"same": GREEN, "tie": ORANGE, "different": RED}
    seen = set()
    for i in range(count):
        same = i < len(ours) and i < len(reference) and ours[i] == reference[i]
        state = "same" if same else "tie" if i in ties else "different"
        seen.add(state)
        x, y = i % per_row, rows - 1 - i // per_row
        axes.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, color=colours[state], alpha=0.92))
        text = visible(words[i]).replace("\n", "⏎") if i < len(words) else str(reference[i])
        axes.text(x + 0.5, y + 0.5, text if len(text) <= 8 else text[:7] + "…", ha="center", va="center", color="white", fontsize=6.6)
    axes.set_xlim(0, per_row)
    axes.set_ylim(0, rows)
    axes.axis("off")
    canvas.legend(handles=[Patch(color=colours[s], label=s) for s in colours if s in seen], loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    return Drawing(
        canvas,
        title,
        f"{count} decoded tokens; " + ", ".join(sorted(seen)) + ".",
        "In reading order; each tile shows the token's text." if words else "In reading order; each tile shows the token's id.",
    )


def durations(steps: Mapping[str, float], title: str, note: str = "") -> Drawing:
    """A timeline: steps one after another, seconds on the axis and beside each bar."""
    canvas, axes = _axes(0.75 + 0.32 * len(steps), title)
    start = 0.0
    total = sum(steps.values()) or 1.0
    for i, (name, seconds) in enumerate(steps.items()):
        axes.barh(visible(name), seconds, left=start, color=CYCLE[i % len(CYCLE)], height=0.62)
        axes.text(start + seconds + total * 0.01, i, f"{seconds:.2f} s", va="center", fontsize=8.5)
        start += seconds
    axes.invert_yaxis()
    axes.set_xlim(0, total * 1.12)
    axes.set_xlabel("seconds since the first step began")
    axes.grid(axis="x", color=FAINT, lw=0.6)
    return Drawing(canvas, title, f"{len(steps)} steps, {total:.1f} seconds.", note)


def time_by_phase(cells: Sequence[tuple[int, str, float]], phases: Mapping[int, str]) -> Drawing:
    """One bar per phase, split into its cells; cells that take a tenth of the longest bar carry their name. cells: (phase, cell name, seconds)."""
    numbers = sorted({n for n, _, _ in cells})
    totals = {n: sum(s for p, _, s in cells if p == n) for n in numbers}
    longest = max(totals.values()) or 1.0
    canvas, axes = _axes(0.85 + 0.42 * len(numbers), f"Where the run's {sum(totals.values()):.0f} s went")
    for row, n in enumerate(numbers):
        left = 0.0
        for i, (_, name, seconds) in enumerate(c for c in cells if c[0] == n):
            axes.barh(row, seconds, left=left, color=CYCLE[row % 3], alpha=1.0 if i % 2 == 0 else 0.72, height=0.66)
            if seconds > 0.022 * longest * (len(name) * 0.55):
                axes.text(left + seconds / 2, row, visible(name).replace("_", " "), ha="center", va="center", fontsize=7, color="white")
            left += seconds
        axes.text(left + longest * 0.01, row, f"{left:.1f} s", va="center", fontsize=8.5)
    axes.set_yticks(range(len(numbers)), [f"{n} {phases.get(n, '')}" for n in numbers])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel("seconds")
    slowest = max(numbers, key=totals.get)
    return Drawing(canvas, "Where the time went", f"Seconds by phase; the longest is phase {slowest} with {totals[slowest]:.1f} s.", "A shade per cell.")
