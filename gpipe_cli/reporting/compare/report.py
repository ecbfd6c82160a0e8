"""What `gpipe compare` shows and leaves: a table at 80 columns, CSV, pictures and the page.

A row for each run, as in the paper's tables 2 and 5. Where the columns do not fit beside each other there are several
tables under each other, and the numbers of the runs tell which rows belong together.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpipe_cli.reporting.compare.comparison import Column, Comparison
from gpipe_cli.reporting.compare.notes import TRAINED, notes, same_curve_notes
from gpipe_cli.reporting.compare.page import write_page
from gpipe_cli.reporting.compare.run_names import listed
from gpipe_cli.reporting.run.lines import LABEL_WIDTH, show_facts, show_line
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import plural

CSV, PAGE, CURVES, BARS = "comparison.csv", "comparison.html", "curves.png", "bars.png"
MOST_WIDE = 32  # characters of a name or a setting's value in a line; longer ones are folded
MOST_SETTING_TABLES = 2  # more would be read by nobody; the page has all


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Prints the table, and what must be said beside it."""
    printed = [column for column in comparison.columns if column.printed]
    settings = [column for column in printed if column.setting]
    results = [column for column in printed if not column.setting]
    statuses = {run.status for run in comparison.runs}
    if statuses == {TRAINED}:  # the heading says it
        results = [column for column in results if column.key != "status"]
    title = f"{plural(len(comparison.runs), 'run')}, {TRAINED}" if statuses == {TRAINED} else None
    show_line(console, title or plural(len(comparison.runs), "run"), "bold")
    numbers = tuple(str(number) for number in range(1, len(comparison.runs) + 1))
    first = [Column("run", "run", tuple(range(1, len(numbers) + 1)), numbers)]
    named = first if comparison.by_settings else [*first, Column("name", "name", comparison.names, comparison.names)]
    tables, left_out = _tables(named, first, settings, results, console.width)
    for columns in tables:
        console.print(_table(columns))
        console.print()
    if left_out:
        keys = listed([column.key for column in left_out])
        _show_notes(console, [f"{plural(len(left_out), 'more setting')} differ: {keys}; {PAGE} has all"])
    _show_notes(console, notes(comparison))


def _show_notes(console: Console, found: Sequence[str]) -> None:
    """Labelled as facts are; long ones go on below their own beginning."""
    grid = Table.grid(padding=0)
    grid.add_column(width=LABEL_WIDTH + 1)
    grid.add_column(overflow="fold")
    for note in found:
        grid.add_row("note", Text(note, "red" if " failed: " in note else ""))
    if found:
        console.print(grid)


def to_csv(comparison: Comparison) -> str:
    """All columns; units stand in the headings, numbers have all their digits, what a run does not have is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", *(column.key for column in comparison.columns)])
    for position, name in enumerate(comparison.names):
        values = (
            ("" if (text := column.texts[position]) == "-" else text) if column.setting else column.values[position]
            for column in comparison.columns
        )
        writer.writerow([name, *("" if value is None else value for value in values)])
    return file.getvalue()


def write_comparison(console: Console, comparison: Comparison, folder: Path) -> None:
    """Writes all files into ``folder``, which must exist, and says what they are; curves are read now."""
    from gpipe_cli.reporting.compare.curves import compared_tags
    from gpipe_cli.reporting.plots.bars import draw_bars
    from gpipe_cli.reporting.plots.curves import draw_curves
    from gpipe_cli.reporting.plots.timeline import write_picture

    tags = compared_tags(comparison.runs)
    same = [note for tag in tags[:1] for note in same_curve_notes(comparison, tag)]
    if not tags:
        same = ["no run has curves, so there are none to draw"]
    pictures = [(CURVES, "curves", draw_curves(comparison.runs, tags) if tags else None)]
    pictures.append((BARS, "bars", draw_bars(comparison)))
    for name, _, picture in pictures:
        if (folder / PAGE).exists():
            (folder / name).unlink(missing_ok=True)  # of a comparison of other runs
        if picture is not None:
            write_picture(folder / name, picture)
    drawn = [(name, alt) for name, alt, picture in pictures if picture is not None]
    write_whole(folder / CSV, to_csv(comparison))
    write_page(folder / PAGE, comparison, [*notes(comparison), *same], [(folder / name, alt) for name, alt in drawn])
    _show_notes(console, same)  # after all is written: who reads may have gone
    show_facts(console, [("page", str(folder / PAGE)), ("table", str(folder / CSV))])
    show_facts(console, [("picture", str(folder / name)) for name, _ in drawn])


def _tables(
    named: Sequence[Column], first: Sequence[Column], settings: Sequence[Column], results: Sequence[Column], width: int
) -> tuple[list[list[Column]], list[Column]]:
    """Columns of each table; and the settings for which there is no room.

    Args:
        named: what the first table begins with; all others begin with ``first``.
    """
    if _width([*named, *settings, *results]) <= width:
        return [[*named, *settings, *results]], []
    tables = list(_packed(named, first, settings, width)) if settings else []
    left_out = [column for table in tables[MOST_SETTING_TABLES:] for column in table if column.setting]
    tables = tables[:MOST_SETTING_TABLES]
    return [*tables, *_packed(first if tables else named, first, results, width)], left_out


def _packed(
    begin: Sequence[Column], again: Sequence[Column], columns: Sequence[Column], width: int
) -> Iterator[list[Column]]:
    table = list(begin)
    for column in columns:
        if _width([*table, column]) > width and len(table) > 1 and table != list(begin):
            yield table
            table = list(again)
        table.append(column)
    yield table


def _width(columns: Sequence[Column]) -> int:
    """Characters across, with a blank between columns."""
    return sum(_widest(column) + 1 for column in columns) - 1


def _widest(column: Column) -> int:
    heading = max(map(len, column.heading.split("\n")))
    cells = max(map(len, column.texts))
    return max(heading, min(cells, MOST_WIDE) if column.setting or column.key == "name" else cells)


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)  # a blank between columns
    for column in columns:
        table.add_column(
            Text(column.heading),
            justify="right" if column.numeric else "left",
            overflow="fold",
            vertical="top",
            width=_widest(column),
        )
    for cells in zip(*(column.texts for column in columns), strict=True):
        table.add_row(*(Text(cell, "red" if cell == "failed" else "") for cell in cells))
    return table
