"""The one table of the program, and how it is written: in a console, as CSV, as Markdown and as HTML."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gpipe_cli.reporting.run.lines import has_log, log

Origin = Literal["", "paper", "torchgpipe", "measured", "counted", "planned", "simulated", "difference"]
SYMBOLS = {"partitions": "K", "micro_batches": "M"}  # the paper's: headings of columns
MOST_TEXT = 70  # characters of a text without blanks, beside the number of a row; a longer one is broken


@dataclass(frozen=True)
class Column:
    """A heading and a cell for each row."""

    heading: str  # with its line breaks
    origin: Origin = ""  # where the numbers come from; "" for what names a row, or has no origin of its own
    cells: Sequence[str] = ()  # as people read them; `-` where there is none
    number: bool = False  # stands at the right and is never broken, as what has an origin; texts stand at the left
    key: str = ""  # the heading in CSV, "" where it is the same
    values: Sequence[Any] | None = None  # as programs read them, None where there is none; None: the cells
    printed: bool = True  # in the console too, not only in files

    @property
    def right(self) -> bool:
        """Whether it holds numbers."""
        return self.number or self.origin != ""

    @property
    def origin_line(self) -> str:
        """The origin, where the heading does not say it, as `planned - paper` does."""
        return "" if self.origin == self.heading or " - " in self.heading else self.origin

    @property
    def plain_values(self) -> Sequence[Any]:
        """What programs read."""
        return self.cells if self.values is None else self.values


@dataclass(frozen=True)
class Table:
    """Columns of the same number of cells."""

    title: str
    columns: Sequence[Column]

    def __post_init__(self) -> None:
        assert len({len(column.cells) for column in self.columns}) <= 1, self.title

    @classmethod
    def of_rows(cls, title: str, columns: Iterable[Column], rows: Iterable[Sequence[str]]) -> Self:
        """Of columns without cells, and rows with a cell for each of them."""
        columns, rows = tuple(columns), tuple(rows)
        assert all(len(row) == len(columns) for row in rows), title
        return cls(title, [replace(column, cells=[row[at] for row in rows]) for at, column in enumerate(columns)])

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


def show_table(console: Console, table: Table, repeated: int = 1, gap: int = 2) -> None:
    """Prints a table; one that is wider than the console in parts, as a broken word or number cannot be read.

    ``repeated`` columns name the rows, and begin every part; between columns there are ``gap`` blanks.
    """
    columns = [column for column in table.columns if column.printed]
    for number, part in enumerate(_parts(columns[:repeated], columns[repeated:], console.width, gap)):
        if number:
            console.print()
        shown = _rich(part, console.width, gap)
        console.print(shown)
        if has_log():
            plain = Console(file=io.StringIO(), width=console.width, force_terminal=False, color_system=None)
            with plain.capture() as lines:
                plain.print(shown)
            log(lines.get())


def to_csv(table: Table) -> str:
    """All columns, values with all their digits; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.key or column.heading for column in table.columns])
    for values in zip(*(column.plain_values for column in table.columns), strict=True):
        writer.writerow(["" if value is None else value for value in values])
    return file.getvalue()


def to_markdown(table: Table) -> str:
    """As a pipe table, whose lines end in line breaks."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    headings = line(", ".join(filter(None, (column.heading, column.origin_line))) for column in table.columns)
    ruler = line("---:" if column.right else "---" for column in table.columns)
    return headings + ruler + "".join(map(line, table.rows))


def to_html(table: Table, colours: Sequence[str] = (), links: Sequence[str] = ()) -> str:
    """As an element `table`, with squares of ``colours`` before the rows' names, and ``links``, in HTML, behind them;
    scripts can sort rows by `data-value`, which is empty where there is no value."""
    heads = [f'<th scope="col"{_class(column)}>{escape(column.heading)}</th>' for column in table.columns]
    heads[1:1] = ['<th scope="col" class="text plain">see</th>'] if links else []
    lines = [f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"]
    for row, (name, *cells) in enumerate(table.rows):
        mark = f'<i style="background:{colours[row]}"></i>' if colours else ""
        line = f'<th scope="row" data-value="{row}">{mark}{escape(name)}</th>'
        line += f'<td class="text">{links[row]}</td>' if links else ""
        for column, cell in zip(table.columns[1:], cells, strict=True):
            value = column.plain_values[row]
            raw = "" if value is None else str(value) if column.right else cell
            line += f'<td data-value="{escape(raw)}"{_class(column, cell)}>{escape(cell)}</td>'
        lines.append(f"<tr>{line}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _class(column: Column, cell: str = "") -> str:
    words = ["text"] * (not column.right) + ["failed"] * _is_failure(column, cell)
    return f' class="{" ".join(words)}"' if words else ""


def _is_failure(column: Column, cell: str) -> bool:
    return column.heading == "status" and cell.startswith(("failed", "interrupted"))


def _parts(first: list[Column], others: Sequence[Column], width: int, gap: int) -> Iterator[list[Column]]:
    part = list(first)
    for column in others:
        if len(part) > len(first) and sum(_least(one) + gap for one in (*part, column)) - gap > width:
            yield part
            part = list(first)
        part.append(column)
    yield part


def _rich(columns: Sequence[Column], width: int, gap: int) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    widths = _widths(columns, width - gap * (len(columns) - 1))
    origins = any(column.origin_line for column in columns)
    for column, own in zip(columns, widths, strict=True):
        heading = f"{column.heading}\n{column.origin_line}" if origins else column.heading
        shown.add_column(Text(heading), justify="right" if column.right else "left", overflow="fold", width=own)
    for cells in Table("", columns).rows:
        styles = ("red" if _is_failure(column, cell) else "" for column, cell in zip(columns, cells, strict=True))
        shown.add_row(*map(Text, cells, styles))
    return shown


def _widths(columns: Sequence[Column], room: int) -> list[int]:
    """What each column needs; what is left of the room goes to headings of numbers first, then to texts."""
    widths = [_least(column) for column in columns]
    room -= sum(widths)
    for at in sorted(range(len(columns)), key=lambda at: not columns[at].right):
        more = max(0, min(room, _most(columns[at]) - widths[at]))
        widths[at] += more
        room -= more
    return widths


def _least(column: Column) -> int:
    """The characters that a column needs: those of a number, or of a word of a heading or a text."""
    words = [*column.heading.split(), column.origin_line]
    if column.right:
        return max(map(cell_len, (*words, *column.cells)))
    words += [word for cell in column.cells for word in cell.split()]
    return min(MOST_TEXT, max(map(cell_len, words)))


def _most(column: Column) -> int:
    """The characters that a column fills where there is room."""
    return max(map(cell_len, (*column.heading.split("\n"), column.origin_line, *column.cells)))
