"""Efficiency over the number of devices, weak and strong scaling side by side."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.reporting.plots.palette import GRID, INK, PALE_INK, run_colour
from gpipe_cli.reporting.plots.picture import WIDTH_INCHES, Picture, add_axes, add_legend, new_figure, pixels

PANEL_INCHES, TITLE_INCHES, AXIS_INCHES, LEGEND_LINE_INCHES = 3.2, 0.4, 0.5, 0.26
LEFT_INCHES, GAP_INCHES, RIGHT_INCHES = 0.7, 0.5, 0.2
Lines = Mapping[str, Sequence[tuple[int, float]]]  # name of a line -> its points: number of devices, efficiency


def draw_scaling(panels: Mapping[str, Lines]) -> Picture:
    """A panel for each kind of scaling, `weak` and `strong`, as an image of shape (height, width, 3)."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    legend = 0.15 + LEGEND_LINE_INCHES * math.ceil(len(names) / 2)
    figure = new_figure(TITLE_INCHES + PANEL_INCHES + AXIS_INCHES + legend)
    width = (WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES - GAP_INCHES * (len(panels) - 1)) / len(panels)
    handles = {}
    for at, (kind, lines) in enumerate(panels.items()):
        left = LEFT_INCHES + at * (width + GAP_INCHES)
        axes = add_axes(figure, left, legend + AXIS_INCHES, width, PANEL_INCHES)
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
        axes.set_xlabel("devices", fontsize=9, color=PALE_INK, loc="right", labelpad=3)
    figure.axes[0].set_ylabel("samples/s per device, relative to the fewest devices", fontsize=9, color=PALE_INK)
    add_legend(figure, [handles[name] for name in names], LEFT_INCHES, 0.1, ncols=2, fontsize=9)
    return pixels(figure)
