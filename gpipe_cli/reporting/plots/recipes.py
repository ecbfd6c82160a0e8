"""Pictures of recipes: shares of a step as stacked bars, which compare more easily than the paper's pie chart
(NeurIPS), and efficiency over the number of devices, weak and strong scaling side by side."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.reporting.plots.palette import GRID, INK, PALE_INK, oklch, run_colour
from gpipe_cli.reporting.plots.picture import Picture, hide_frame, new_figure, to_pixels
from gpipe_cli.reporting.plots.timeline_values import SHARES
from gpipe_cli.reporting.run.step_breakdown import share_label

MIN_LABELED_FRACTION = 0.03  # smaller parts of a bar have no room for a number
# Lightness, chroma, hue: useful work is dark, repeated work lighter, waiting and the rest pale.
COLOURS = {
    "compute": (0.55, 0.13, 262.0),
    "recompute": (0.76, 0.10, 262.0),
    "bubble": (0.72, 0.14, 45.0),
    "imbalance": (0.84, 0.11, 70.0),
    "transfer": (0.72, 0.11, 150.0),
    "update": (0.62, 0.12, 325.0),
    "set_up": (0.80, 0.02, 262.0),
}
Lines = Mapping[str, Sequence[tuple[int, float]]]  # name of a line -> its points: number of devices, efficiency


def draw_shares(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Picture:
    """A stacked bar per (name, shares by name, which sum to 1), as an image of shape (height, width, 3)."""
    figure = new_figure(1.05 + 0.55 * len(bars))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    for name in SHARES:
        widths = [shares.get(name, 0.0) for _, shares in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.66, left, color=oklch(*COLOURS[name]), label=share_label(name))
        words = [f"{100 * width:.1f}" if width >= MIN_LABELED_FRACTION else "" for width in widths]
        axes.bar_label(drawn, words, label_type="center", fontsize=9, color="white" if COLOURS[name][0] < 0.6 else INK)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9.5, color=INK)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    hide_frame(axes)
    figure.legend(loc="outside upper left", ncols=len(SHARES), frameon=False, fontsize=9)
    return to_pixels(figure)


def draw_scaling(panels: Mapping[str, Lines]) -> Picture:
    """A panel for each kind of scaling, `weak` and `strong`, as an image of shape (height, width, 3)."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure = new_figure(4.2 + 0.13 * len(names))
    figure.set_layout_engine("constrained")
    handles = {}
    for axes, (kind, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set_title(f"{kind} scaling", loc="left", fontweight="bold", fontsize=11, color=INK)
        for name, points in lines.items():
            number = names.index(name)
            thickness = 1.5 + 1.5 * (len(names) - 1 - number)  # lines that coincide stay visible
            look: dict[str, Any] = {"color": run_colour(number, len(names)), "marker": "o", "linewidth": thickness}
            (handles[name],) = axes.plot(*zip(*points, strict=True), label=name, markersize=3 + 2 * thickness, **look)
        axes.set_xscale("log", base=2)
        ticks = sorted({devices for points in lines.values() for devices, _ in points})
        axes.set_xticks([tick for tick in ticks if math.log2(tick).is_integer()])
        axes.xaxis.set_major_formatter(lambda devices, _: f"{devices:,.0f}")
        axes.set_ylim(0, max([1.0, *(efficiency for points in lines.values() for _, efficiency in points)]) * 1.05)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_xlabel("devices", fontsize=9, color=PALE_INK, loc="right")
        hide_frame(axes)
    figure.axes[0].set_ylabel("samples/s per device, relative to the fewest devices", fontsize=9, color=PALE_INK)
    figure.legend(
        handles=[handles[name] for name in names], loc="outside lower left", ncols=2, frameon=False, fontsize=9
    )
    return to_pixels(figure)
