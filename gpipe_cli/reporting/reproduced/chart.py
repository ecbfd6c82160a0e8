"""Plots of the tables of a reproduction: the paper's numbers and ours over the same axis, as SVG in the page.

A plot shows the values of a table's columns and nothing else. Marks, not colours alone, tell the origin: the paper's
are hollow circles on a dashed line, ours are filled.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gpipe_cli.reporting.tables.table import Column, Table

WIDTH, HEIGHT = 400, 240  # size of a plot in pixels of the page
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 26, 40  # its margins
OURS = ("measured", "counted", "planned", "simulated")
OTHERS = ("paper", *OURS)
_LOGARITHMIC = 30.0  # an axis is logarithmic if its numbers differ by more than this factor


@dataclass(frozen=True)
class Line:
    name: str
    origin: str  # the column's origin: the CSS class of its marks
    values: Sequence[float | None]  # None where the table has none
    cells: Sequence[str]  # texts as in the table


@dataclass(frozen=True)
class Chart:
    title: str
    places: Sequence[str]  # labels on the horizontal axis
    lines: Sequence[Line]
    unit: str  # the label below the axis: what `places` are


def charts(table: Table) -> Iterator[Chart]:
    """A plot of throughput over K for each M; in other tables, one for each heading that the paper and we share."""
    named = {column.heading: column for column in table.columns if not column.origin}
    paper = next((column for column in table.columns if column.origin == "paper"), None)
    if paper is not None and {"K", "M"} <= named.keys():
        speeds = [column for column in table.columns if column.origin in OTHERS and column.same_quantity(paper)]
        yield from _over_partitions(speeds, named)
        return
    for paper in table.columns:
        ours = [column for column in table.columns if column.origin in OURS and column.heading == paper.heading]
        if paper.origin == "paper" and paper.heading and ours and len(table.rows) > 1:
            lines = [line for column in (paper, *ours) if (line := _line(column.origin, column))]
            if len(lines) > 1:
                yield Chart(paper.heading, table.columns[0].cells, lines, "")


def _over_partitions(columns: Sequence[Column], named: dict[str, Column]) -> Iterator[Chart]:
    partitions, micro_batches = named["K"].cells, named["M"].cells
    names = named[""].cells if "" in named else ()
    if names:  # named rows are no curve over K
        lines = [line for column in columns if (line := _line(_name(column), column))]
        yield Chart("throughput", names, lines, "")
        return
    for m in dict.fromkeys(micro_batches):
        rows = [at for at, one in enumerate(micro_batches) if one == m]
        lines = [line for column in columns if (line := _line(_name(column), column, rows))]
        yield Chart(f"M = {m}", [partitions[at] for at in rows], lines, "K")


def _name(column: Column) -> str:
    return f"{column.heading}, {column.origin}" if column.origin_line else column.heading


def _line(name: str, column: Column, rows: Sequence[int] = ()) -> Line | None:
    """The line of a column, or None if it has no number."""
    at = rows or range(len(column.cells))
    values = [None if column.values is None else column.values[row] for row in at]
    cells = [column.cells[row] for row in at]
    return Line(name, column.origin, values, cells) if any(one is not None for one in values) else None


def to_svg(chart: Chart, top: float | None = None) -> str:
    """The plot as an `svg` element, whose vertical axis reaches ``top``, by default the greatest value."""
    known = [one for line in chart.lines for one in line.values if one is not None]
    positive = [one for one in known if one > 0]
    logarithmic = len(positive) == len(known) and max(known) > _LOGARITHMIC * min(known)
    ticks = _decades(min(known), max(known)) if logarithmic else _ticks(max(known) if top is None else top)
    scale = math.log10 if logarithmic else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    step = (WIDTH - LEFT - RIGHT) / len(chart.places)

    def x(at: int) -> float:
        return LEFT + (at + 0.5) * step

    def y(number: float) -> float:
        return HEIGHT - BOTTOM - (scale(number) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    said = escape(f"{chart.title}: {', '.join(line.name for line in chart.lines)}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">']
    parts.append(f'<text class="title" x="{LEFT}" y="14">{escape(chart.title)}</text>')
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for at, place in enumerate(chart.places):
        for down, words in enumerate(_broken(place, step)):
            below = HEIGHT - BOTTOM + 16 + 11 * down
            parts.append(f'<text x="{x(at):.1f}" y="{below}" text-anchor="middle">{escape(words)}</text>')
    if chart.unit:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(chart.unit)}</text>')
    for line in reversed(chart.lines):  # the paper's above ours
        points = [(x(at), y(one), line.cells[at]) for at, one in enumerate(line.values) if one is not None]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py, _ in points)
        parts.append(f'<g class="{line.origin}"><path class="line" d="M{path}"/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{escape(f"{line.name}: {cell}")}</title></circle>'
            for px, py, cell in points
        ]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def legend(lines: Sequence[Line]) -> str:
    """What the marks mean, as HTML."""
    origins = {line.name: line.origin for line in lines}
    return "".join(
        f'<span><svg viewBox="0 0 26 12" aria-hidden="true"><g class="{origin}"><path class="line" d="M1 6H25"/>'
        f'<circle cx="13" cy="6" r="4"/></g></svg>{escape(name)}</span>'
        for name, origin in origins.items()
    )


def _ticks(most: float) -> list[float]:
    """Numbers from 0 to at least ``most``, in three to six even steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most or 1.0))
    step = next(step for factor in (0.2, 0.5, 1.0, 2.0) if most <= 6 * (step := factor * power))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _decades(least: float, most: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]


def _short(number: float) -> str:
    """A number on an axis: `0.5`, `100 M`."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:g} {unit}"
    return f"{number:g}"


def _broken(name: str, width: float) -> list[str]:
    """The lines of a label, at most two: one wider than ``width`` pixels is broken at a hyphen or a blank."""
    if len(name) * 6.2 <= width:
        return [name]
    first, mark, rest = next((name.partition(mark) for mark in ("-", " ") if mark in name), (name, "", ""))
    return [first + mark.strip(), rest] if rest else [name]
