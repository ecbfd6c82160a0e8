"""What `gpipe reproduce` shows: the paper's numbers, ours, the difference; for people, as Markdown and as JSON.

Every column says where its numbers come from. What was measured and what was simulated, planned or counted never share
one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.run.summary import show_facts, show_line
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration

Origin = Literal["", "paper", "torchgpipe", "measured", "counted", "planned", "simulated", "difference"]
REPRODUCTION = "reproduction"  # .json and .md
_BETWEEN = 3  # blanks between two columns: one on each side, and the box's own


@dataclass(frozen=True)
class Column:
    """``origin`` is where its numbers come from; "" for what names a row."""

    heading: str
    origin: Origin = ""


@dataclass(frozen=True)
class Table:
    """Rows of text, a cell for each column; `-` where there is no number."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True)
class Reproduction:
    """What came out of a recipe."""

    name: str
    title: str
    source: str
    scale: str  # paper, desk
    machine: str
    tables: tuple[Table, ...]
    notes: tuple[tuple[str, str], ...]  # label, line: scaled down, simulated, our choice, what was found
    commands: tuple[str, ...]  # that were run
    files: tuple[tuple[str, str], ...]  # what it is, path
    seconds: float


def show_reproduction(console: Console, reproduction: Reproduction, folder: Path) -> None:
    """Shows it, and writes reproduction.json and reproduction.md into ``folder``."""
    try:
        write_result(folder, asdict(reproduction), f"{REPRODUCTION}.json")
        write_whole(folder / f"{REPRODUCTION}.md", markdown(reproduction))
    finally:  # what cannot be written is shown all the same
        _show(console, reproduction, folder)


def _show(console: Console, reproduction: Reproduction, folder: Path) -> None:
    for table in reproduction.tables:
        console.print()
        show_line(console, table.title, "bold")
        for number, part in enumerate(_parts(table, console.width)):
            if number:
                console.print()
            console.print(_rich(part))
    console.print()
    show_facts(console, reproduction.notes)
    show_facts(console, [("took", f"{duration(reproduction.seconds)} on {reproduction.machine}")])
    show_facts(console, reproduction.files)
    show_facts(console, [("written to", str(folder / f"{REPRODUCTION}.md"))])


def markdown(reproduction: Reproduction) -> str:
    """As a section of recipes/README.md."""
    lines = [f"### {reproduction.name}", "", f"{reproduction.title}. Source: {reproduction.source}.", ""]
    for table in reproduction.tables:
        lines += [f"**{table.title}**", "", *_markdown_table(table), ""]
    lines += [f"* {label}: {line}" for label, line in reproduction.notes]
    lines += [f"* took: {duration(reproduction.seconds)} on {reproduction.machine}", ""]
    return "\n".join(lines)


def _heading(column: Column) -> tuple[str, str]:
    said = column.origin in ("", column.heading) or " - " in column.heading  # `planned - paper`
    return column.heading, "" if said else column.origin


def _parts(table: Table, width: int) -> Iterable[Table]:
    """The table, or several that are each at most ``width`` wide; what names a row stands in all of them."""
    widths = [
        _BETWEEN + max(map(len, (*_heading(column)[0].split(), _heading(column)[1], *(row[at] for row in table.rows))))
        for at, column in enumerate(table.columns)
    ]
    names = [at for at, column in enumerate(table.columns) if not column.origin]
    parts: list[list[int]] = [[]]
    for at in (at for at in range(len(widths)) if at not in names):
        if parts[-1] and sum(widths[one] for one in (*names, *parts[-1], at)) > width:
            parts.append([])
        parts[-1].append(at)
    for part in parts:
        shown = sorted((*names, *part))
        rows = tuple(tuple(row[at] for at in shown) for row in table.rows)
        yield Table(table.title, tuple(table.columns[at] for at in shown), rows)


def _rich(table: Table) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in table.columns:
        heading, origin = _heading(column)
        side: Literal["left", "right"] = "right" if column.origin else "left"
        shown.add_column(f"{heading}\n{origin}", justify=side, overflow="fold", no_wrap=not column.origin)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def _markdown_table(table: Table) -> Iterable[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    headings = [", ".join(part for part in _heading(column) if part) for column in table.columns]
    yield line(headings)
    yield line(["---:" if column.origin else "---" for column in table.columns])
    for row in table.rows:
        yield line(row)
