"""Curves of several runs over each other, as the paper's figure of consistent training would show them.

Curves that are the same bits hide each other: K = 1, 2, 4 and 8 would look like one run. So the first of them is drawn
wide and pale and the last one thin and dark, each within the one before, and the panel names them.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.compare.run_record import SPEEDS, Curve, same_curves
from gpipe_cli.reporting.plots.palette import INK, PALE_INK, run_colour
from gpipe_cli.reporting.plots.picture import WIDTH_INCHES, Picture, add_axes, add_legend, new_figure, pixels

PANEL_INCHES, TITLE_INCHES, AXIS_INCHES = 2.6, 0.42, 0.36
LEFT_INCHES, RIGHT_INCHES, LINE_INCHES = 0.85, 0.25, 0.24
THIN, WIDE = 1.4, 9.0  # line widths in points
MEDIAN_STEPS, LONG = 21, 60  # of a running median; and the steps above which speeds are drawn as one
MARKED_POINTS = 30  # curves with no more than these show their points
LOGARITHMIC = 30  # ratio of the largest to the smallest value from which on an axis is logarithmic
MOST_ENTRIES = 30  # of the legend
MOST_TITLE = 100  # characters of the title at the right
CHARACTER_INCHES = 0.075
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)))
DASHED_FROM = 6  # runs; fewer are told apart by their colours


def draw_curves(comparison: Comparison, tags: Sequence[str]) -> Picture:
    """A panel for each tag, under each other, every run in each; an image of shape (height, width, 3).

    Nothing is smoothed but speeds of long runs, whose panel then has a note.
    """
    assert tags, "no curves to draw"
    return pixels(_figure(comparison, tags))


def styles(count: int, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """How each of ``count`` curves is drawn, as matplotlib has it; those in a group lie over each other."""
    made: list[dict[str, Any]] = []
    for n in range(count):
        dashes = DASHES[n % len(DASHES)] if count >= DASHED_FROM else "-"
        made.append({"color": run_colour(n, count), "linewidth": THIN, "linestyle": dashes, "zorder": 2 + n})
    for group in groups:
        for rank, position in enumerate(group):
            depth = 1 - rank / (len(group) - 1)  # 1: the widest, behind all others
            colour, width = run_colour(position, count, lightness=0.42 + 0.44 * depth), THIN + (WIDE - THIN) * depth
            made[position] = {"color": colour, "linewidth": width, "linestyle": "-", "zorder": 2 + rank}
    return made


def running_median(values: Sequence[float], width: int = MEDIAN_STEPS) -> list[float]:
    """The median of ``width`` values around each, of fewer at both ends."""
    half = width // 2
    return [median(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def _figure(comparison: Comparison, tags: Sequence[str]) -> Figure:
    runs, known = comparison.runs, comparison.labels
    shown = [*known[:MOST_ENTRIES]] + ([f"and {len(runs) - MOST_ENTRIES} more"] if len(runs) > MOST_ENTRIES else [])
    room = WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES
    across = max(1, min(len(shown), int(room / (0.75 + CHARACTER_INCHES * max(map(len, shown))))))
    legend = 0.2 + LINE_INCHES * math.ceil(len(shown) / across)
    height = len(tags) * (TITLE_INCHES + PANEL_INCHES) + AXIS_INCHES + 0.15 + legend
    figure = new_figure(height)
    last = max((run.curves[tag].steps[-1] for run in runs for tag in tags if tag in run.curves), default=1)
    top = height
    for tag in tags:
        top -= TITLE_INCHES + PANEL_INCHES
        _panel(add_axes(figure, LEFT_INCHES, top, room, PANEL_INCHES), comparison, tag, last, lowest=tag == tags[-1])
    _legend(figure, shown, styles(len(runs), same_curves(_curves(comparison, tags[0]))), across)
    return figure


def _curves(comparison: Comparison, tag: str) -> list[Curve | None]:
    return [run.curves.get(tag) for run in comparison.runs]


def _panel(axes: Axes, comparison: Comparison, tag: str, last_step: int, lowest: bool) -> None:
    curves = _curves(comparison, tag)
    groups = same_curves(curves)
    smoothed = False
    highest, least = -math.inf, math.inf
    for curve, style in zip(curves, styles(len(curves), groups), strict=True):
        if curve is None:
            continue
        values = [value if math.isfinite(value) else math.nan for value in curve.values]
        finite = [value for value in values if value == value]
        long = tag in SPEEDS and len(values) > LONG and len(finite) == len(values)
        smoothed |= long
        drawn = running_median(values) if long else values
        highest, least = max([highest, *finite]), min([least, *finite])
        points = {"marker": "o", "markersize": style["linewidth"] + 2.5} if len(values) <= MARKED_POINTS else {}
        axes.plot(curve.steps, drawn, solid_capstyle="round", **style, **points)
    remarks = []
    if smoothed:
        remarks.append(f"running median of {MEDIAN_STEPS} steps, of runs with more than {LONG}")
    if least > 0 and highest > LOGARITHMIC * least and highest < math.inf:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        remarks.append("logarithmic")
    if tag.endswith(("top1", "top5", "accuracy")):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    _frame(axes, tag, remarks, [comparison.referred(group) for group in groups], last_step, lowest)


def _frame(axes: Axes, tag: str, remarks: Sequence[str], groups: Sequence[str], last_step: int, lowest: bool) -> None:
    """Everything around the curves."""
    axes.set_xlim(0, last_step * 1.01)
    axes.grid(color="#e3e4e9", linewidth=0.6)
    if lowest:
        axes.set_xlabel("steps", fontsize=9, color=PALE_INK, loc="right", labelpad=3)
    else:
        axes.tick_params(labelbottom=False)
    words = [f"{tag.replace('_', ' ')}", *remarks]
    axes.set_title("  ·  ".join(words), loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    if groups:
        text = f"identical to the last bit: {'  |  '.join(groups)}"
        if len(text) > MOST_TITLE:
            text = (
                f"identical to the last bit: {len(groups)} groups" if len(groups) > 1 else "identical to the last bit"
            )
        axes.set_title(text, loc="right", fontsize=8.5, color=PALE_INK, pad=7)


def _legend(figure: Figure, shown: Sequence[str], made: Sequence[dict[str, Any]], across: int) -> None:
    handles = [Line2D([], [], **one | {"linewidth": min(one["linewidth"], 6)}) for one in made[:MOST_ENTRIES]]
    handles += [Line2D([], [], color="white")] * (len(shown) - len(handles))  # `and 3 more`
    for line, name in zip(handles, shown, strict=True):
        line.set_label(name)
    add_legend(figure, handles, LEFT_INCHES, 0.1, ncols=across, fontsize=9, handlelength=2.6)
