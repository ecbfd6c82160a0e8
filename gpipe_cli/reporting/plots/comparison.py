"""The pictures of a comparison: curves over each other, as the paper's figure of consistent training, and bars.

Curves that are the same bits hide each other: K = 1, 2, 4 and 8 would look like one run. So the first of them is drawn
wide and pale and the last one thin and dark, each within the one before, and the panel names them.
Bars show what the paper trades, accuracy, speed, bubble and memory: a row for each run, a panel for each number.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.compare.run_record import SPEEDS, same_curves
from gpipe_cli.reporting.plots.palette import INK, PALE_INK, run_colour
from gpipe_cli.reporting.plots.picture import WIDTH_INCHES, Picture, add_axes, add_legend, new_figure, pixels
from gpipe_cli.reporting.tables.table import Column

PANEL_INCHES, TITLE_INCHES, AXIS_INCHES = 2.6, 0.42, 0.36
LEFT_INCHES, RIGHT_INCHES, LINE_INCHES = 0.85, 0.25, 0.24
THIN, WIDE = 1.4, 9.0  # line widths in points
MEDIAN_STEPS, LONG = 21, 60  # of a running median; and the steps above which speeds are drawn as one
MARKED_POINTS = 30  # curves with no more than these show their points
LOGARITHMIC = 30  # ratio of the largest to the smallest value from which on an axis is logarithmic
MOST_TITLE = 100  # characters of the title at the right
CHARACTER_INCHES = 0.078
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)))
DASHED_FROM = 6  # runs; fewer are told apart by their colours

# Columns of the comparison, and what a panel calls them.
PANELS = {
    "test_top1": ("top-1", "test, %"),
    "test_perplexity": ("perplexity", "test, less is better"),
    "samples_per_second": ("samples/s", "median"),
    "tokens_per_second": ("tokens/s", "median"),
    "bubble_measured": ("bubble", "measured, %"),
    "memory_bytes_fullest": ("memory", "fullest stage, "),  # and the unit
}
ROW_INCHES, TOP_INCHES, BOTTOM_INCHES = 0.34, 0.6, 0.42
MOST_NAME = 42  # characters of a run's name
GAP_INCHES = 0.3
SHARED_HATCH = "////"


def draw_curves(comparison: Comparison, tags: Sequence[str]) -> Picture:
    """A panel for each tag, under each other, every run in each; an image of shape (height, width, 3).

    Nothing is smoothed but speeds of long runs, whose panel then has a note.
    """
    assert tags, "no curves to draw"
    runs, shown = comparison.runs, comparison.labels
    room = WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES
    across = max(1, min(len(shown), int(room / (0.75 + CHARACTER_INCHES * max(map(len, shown))))))
    legend = 0.2 + LINE_INCHES * math.ceil(len(shown) / across)
    top = len(tags) * (TITLE_INCHES + PANEL_INCHES) + AXIS_INCHES + 0.15 + legend
    figure = new_figure(top)
    last_step = max((run.curves[tag].steps[-1] for run in runs for tag in tags if tag in run.curves), default=1)
    for tag in tags:
        top -= TITLE_INCHES + PANEL_INCHES
        axes = add_axes(figure, LEFT_INCHES, top, room, PANEL_INCHES)
        axes.set_xlim(0, last_step * 1.01)
        axes.grid(color="#e3e4e9", linewidth=0.6)
        axes.tick_params(labelbottom=tag == tags[-1])
        _panel(axes, comparison, tag)
    axes.set_xlabel("steps", fontsize=9, color=PALE_INK, loc="right", labelpad=3)
    made = styles(len(runs), same_curves([run.curves.get(tags[0]) for run in runs]))
    handles = [
        Line2D([], [], label=name, **one | {"linewidth": min(one["linewidth"], 6)})
        for name, one in zip(shown, made, strict=True)
    ]
    add_legend(figure, handles, LEFT_INCHES, 0.1, ncols=across, fontsize=9, handlelength=2.6)
    return pixels(figure)


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


def logarithmic(values: Sequence[float]) -> bool:
    """Whether an axis with these values is."""
    return bool(values) and min(values) > 0 and LOGARITHMIC * min(values) < max(values) < math.inf


def _panel(axes: Axes, comparison: Comparison, tag: str) -> None:
    """The curves of all runs, and above them what is to be known of them."""
    curves = [run.curves.get(tag) for run in comparison.runs]
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
    if logarithmic([least, highest]):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        remarks.append("logarithmic")
    if tag.endswith(("top1", "top5", "accuracy")):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    words = [tag.replace("_", " "), *remarks]
    axes.set_title("  ·  ".join(words), loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    if groups:
        named = f"identical to the last bit: {'  |  '.join(map(comparison.referred, groups))}"
        counted = "identical to the last bit" + f": {len(groups)} groups" * (len(groups) > 1)
        text = named if len(named) <= MOST_TITLE else counted
        axes.set_title(text, loc="right", fontsize=8.5, color=PALE_INK, pad=7)


def draw_bars(comparison: Comparison) -> Picture | None:
    """Bars as an image of shape (height, width, 3); None if no run has anything to draw."""
    drawn = [column for column in comparison.columns if column.key in PANELS and column.printed]
    if not drawn:
        return None
    shown = [_shortened(name) for name in comparison.labels]
    height = ROW_INCHES * len(shown)
    figure = new_figure(TOP_INCHES + height + BOTTOM_INCHES)
    left = 0.25 + CHARACTER_INCHES * max(map(len, shown))
    room = (WIDTH_INCHES - left - 0.15) / len(drawn)
    shared = [run.shared for run in comparison.runs]
    for number, column in enumerate(drawn):
        axes = add_axes(figure, left + number * room, BOTTOM_INCHES, room - GAP_INCHES, height)
        if column.key == "samples_per_second":  # of text it would be sentences, beside images
            text = [run.result.text for run in comparison.runs]
            values = [None if hidden else value for hidden, value in zip(text, column.plain_values, strict=True)]
            cells = ["-" if hidden else cell for hidden, cell in zip(text, column.cells, strict=True)]
            column = replace(column, values=values, cells=cells)
        _bar_panel(
            axes, column, shared if "per_second" in column.key or "bubble" in column.key else [False] * len(shared)
        )
        axes.set_yticks(range(len(shown)), shown if number == 0 else [""] * len(shown), color=INK)
    if any(shared):
        note = "hatched: stages shared a device or cores, with each other or others: not the speed of a pipeline"
        figure.text(left, 0.12, note, transform=figure.dpi_scale_trans, fontsize=8.5, color=PALE_INK)
    return pixels(figure)


def _bar_panel(axes: Axes, column: Column, hatched: Sequence[bool]) -> None:
    """One number of all runs, with its value behind each bar."""
    rows = len(column.cells)
    values = [v if isinstance(v, int | float) and math.isfinite(v) else 0.0 for v in column.plain_values]
    largest = max(values) or 1.0
    bars = axes.barh(
        range(rows), values, height=0.68, color=[run_colour(row, rows, lightness=0.7) for row in range(rows)],
        edgecolor="white", linewidth=0, hatch=[SHARED_HATCH if shared else "" for shared in hatched],
    )  # fmt: skip
    for label in axes.bar_label(bars, column.cells, padding=2, fontsize=8.5, color=INK):
        label.set_verticalalignment("center_baseline")  # as the names of the runs
    axes.set_xlim(0, largest * 1.32)  # room for the number behind the longest bar
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xticks([])
    axes.spines["left"].set(visible=True, color="#cfd0d8")
    title, below = PANELS[column.key]
    below += column.heading.partition("\n")[2] if below.endswith(" ") else ""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=19)
    axes.text(0, 1, below, transform=axes.transAxes, fontsize=8, color=PALE_INK, va="bottom")


def _shortened(name: str) -> str:
    half = (MOST_NAME - 3) // 2
    return name if len(name) <= MOST_NAME else f"{name[:half]}...{name[-half:]}"
