"""Plots of the tables of a reproduction: the paper's numbers and ours over the same axis, as pictures in the page.

A plot shows only the values of a table's columns. Markers as well as colours show the origin: the paper's are hollow
circles on a dashed line, ours are filled.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

from matplotlib.ticker import EngFormatter, ScalarFormatter

from gpipe_cli.reporting.plots.palette import INK, PALE_INK
from gpipe_cli.reporting.plots.picture import Picture, new_figure, to_pixels
from gpipe_cli.reporting.reproduced.verdict import OUR_ORIGINS
from gpipe_cli.reporting.tables.table import Column, Table

WIDTH_INCHES, HEIGHT_INCHES = 3.6, 2.4  # size of a plot
_RUN_COLOUR, _SIMULATED_COLOUR = "#0b6e4f", "#1d5fbf"
COLOURS = {
    "paper": "#b45309",
    "measured": _RUN_COLOUR,
    "counted": _RUN_COLOUR,
    "simulated": _SIMULATED_COLOUR,
    "planned": _SIMULATED_COLOUR,
}
_LOGARITHMIC_RATIO = 30.0  # an axis is logarithmic if its numbers differ by more than this factor


class Line(NamedTuple):
    name: str
    origin: str  # the origin of the column
    values: Sequence[float | None]  # None where the table has no number


class Chart(NamedTuple):
    title: str
    places: Sequence[str]  # labels on the horizontal axis
    lines: Sequence[Line]
    unit: str  # the label below the axis: what `places` are


def charts(table: Table) -> Iterator[Chart]:
    """A plot of throughput over K for each M; of other tables, a plot of each heading that the paper and we share."""
    named = {column.heading: column for column in table.columns if not column.origin}
    paper = next((column for column in table.columns if column.origin == "paper"), None)
    if paper is not None and {"K", "M"} <= named.keys():
        speeds = [column for column in table.columns if column.origin in COLOURS and column.same_quantity(paper)]
        yield from _charts_over_partitions(speeds, named)
        return
    for paper in table.columns:
        ours = [column for column in table.columns if column.origin in OUR_ORIGINS and column.heading == paper.heading]
        if paper.origin == "paper" and paper.heading and ours and len(table.rows) > 1:
            lines = [line for column in (paper, *ours) if (line := _line(column.origin, column))]
            if len(lines) > 1:
                yield Chart(paper.heading, table.columns[0].cells, lines, "")


def _charts_over_partitions(columns: Sequence[Column], named: dict[str, Column]) -> Iterator[Chart]:
    partitions, micro_batches = named["K"].cells, named["M"].cells
    names = named[""].cells if "" in named else ()
    if names:  # named rows do not form a curve over K
        lines = [line for column in columns if (line := _line(_name(column), column))]
        yield Chart("throughput", names, lines, "")
        return
    for m in dict.fromkeys(micro_batches):
        rows = [row for row, cell in enumerate(micro_batches) if cell == m]
        lines = [line for column in columns if (line := _line(_name(column), column, rows))]
        yield Chart(f"M = {m}", [partitions[row] for row in rows], lines, "K")


def _name(column: Column) -> str:
    return f"{column.heading}, {column.origin}" if column.origin_line else column.heading


def _line(name: str, column: Column, rows: Sequence[int] = ()) -> Line | None:
    """The line of a column, or None if it has no number."""
    rows = rows or range(len(column.cells))
    values = [None if column.values is None else column.values[row] for row in rows]
    return Line(name, column.origin, values) if any(value is not None for value in values) else None


def draw(charts: Sequence[Chart]) -> Picture:
    """The plots of a table side by side, with the same vertical axis if they differ only in M."""
    figure = new_figure(HEIGHT_INCHES, WIDTH_INCHES * len(charts))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(charts), sharey=bool(charts[0].unit), squeeze=False)[0]
    for axes, chart in zip(panels, charts, strict=True):
        for line in reversed(chart.lines):  # the paper's line is drawn last, on top of ours
            points = [(position, value) for position, value in enumerate(line.values) if value is not None]
            face, style = ("white", "--") if line.origin == "paper" else (COLOURS[line.origin], "-")
            look = {"marker": "o", "linestyle": style, "markerfacecolor": face, "color": COLOURS[line.origin]}
            axes.plot(*zip(*points, strict=True), label=line.name, **look)
        numbers = [value for line in chart.lines for value in line.values if value is not None]
        if min(numbers) > 0 and max(numbers) > _LOGARITHMIC_RATIO * min(numbers):
            axes.set_yscale("log")
        else:
            axes.axhline(0, linewidth=0)  # makes the axis begin at 0
            axes.yaxis.set_major_formatter(EngFormatter() if max(numbers) >= 1000 else ScalarFormatter())
        axes.set_title(chart.title, fontsize=9, color=INK, loc="left")
        words = ["\n".join(wrap(place, max(8, 48 // len(chart.places)))) for place in chart.places]
        axes.set_xticks(range(len(words)), words, fontsize=8)
        axes.set_xlim(-0.5, len(chart.places) - 0.5)
        axes.tick_params(labelsize=8, labelcolor=PALE_INK)
        axes.set_xlabel(chart.unit, fontsize=8, color=PALE_INK, loc="right")
        axes.legend(fontsize=7, frameon=False)
    return to_pixels(figure)
