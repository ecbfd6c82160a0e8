"""A table that is wider than the terminal, in parts: a broken word or number cannot be read."""

from dataclasses import replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table


def show_in_parts(console: Console, table: Table) -> None:
    """Print a table; if its words do not fit side by side in several tables, which all begin with its first column."""
    first, *others = table.columns
    between = 1 + table.padding[1] + table.padding[3]
    parts: list[list[Column]] = [[first]]
    for column in others:
        width = sum(_least(console, one) + between for one in (*parts[-1], column)) - between
        if len(parts[-1]) > 1 and width > console.width:
            parts.append([first])
        parts[-1].append(column)
    for part in parts:
        shown = Table(box=table.box, show_edge=False, pad_edge=False, padding=table.padding)
        shown.columns = [replace(column, _index=at) for at, column in enumerate(part)]
        shown.rows = table.rows
        console.print(shown)


def _least(console: Console, column: Column) -> int:
    """The characters that it needs; of one that may wrap: its longest word."""
    cells = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
    return max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
