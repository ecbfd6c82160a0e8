"""Runs as bars: accuracy, speed, bubble and memory side by side, the four things that the paper trades.

A row for each run, a panel for each number, so that what a run pays for its speed is found on one line. Only what was
measured is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.plots.palette import INK, PALE_INK, run_colour
from gpipe_cli.reporting.plots.picture import WIDTH_INCHES, Picture, add_axes, new_figure, pixels
from gpipe_cli.reporting.tables.table import Column

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
CHARACTER_INCHES = 0.078
MOST_NAME = 42  # characters of a run's name
GAP_INCHES = 0.3
SHARED_HATCH = "////"


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
            text = [run.text for run in comparison.runs]
            values = [None if hidden else value for hidden, value in zip(text, column.plain_values, strict=True)]
            cells = ["-" if hidden else cell for hidden, cell in zip(text, column.cells, strict=True)]
            column = replace(column, values=values, cells=cells)
        _panel(axes, column, shared if "per_second" in column.key or "bubble" in column.key else [False] * len(shared))
        axes.set_yticks(range(len(shown)), shown if number == 0 else [""] * len(shown), color=INK)
    if any(shared):
        note = "hatched: stages shared a device or cores, with each other or others: not the speed of a pipeline"
        figure.text(left, 0.12, note, transform=figure.dpi_scale_trans, fontsize=8.5, color=PALE_INK)
    return pixels(figure)


def _panel(axes: Axes, column: Column, hatched: Sequence[bool]) -> None:
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
    """A long name without its middle."""
    half = (MOST_NAME - 3) // 2
    return name if len(name) <= MOST_NAME else f"{name[:half]}...{name[-half:]}"
