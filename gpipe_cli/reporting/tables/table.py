"""The table type of the whole program, and its output: to a console, and as JSON, CSV, Markdown and HTML."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from typing import Any, Literal, Self

from rich.cells import cell_len
from rich.console import Console

from gpipe_cli.errors import format_value
from gpipe_cli.reporting.run.lines import show_line, show_text, wrap
from gpipe_cli.results.files import as_json
from gpipe_cli.results.metrics import Metric
from gpipe_cli.units import plural

Origin = Literal["", "paper", "published", "measured", "counted", "planned", "simulated", "difference"]
SYMBOLS = {"partitions": "K", "micro_batches": "M"}  # the paper's symbols, as column headings
MIN_TEXT_WIDTH = 12  # characters to which a wide column of texts may shrink
NONE = "-"
TABLE = "table"
FORMATS = (TABLE, "json", "csv", "latex")  # formats of lists: the first for people, json and csv for programs
_LATEX = str.maketrans({character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "\n": " ",
})  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A heading and a cell for each row."""

    heading: str  # may contain line breaks
    origin: Origin = ""  # the source of the numbers; "" for columns that name a row or have no source
    cells: Sequence[str] = ()  # text for people; `-` where there is no value
    number: bool = False  # right-aligned and never broken, like columns with an origin; texts are left-aligned
    key: str = ""  # the name in JSON and CSV; "": the heading
    values: Sequence[Any] | None = None  # for programs, with None where there is no value; None: programs get `cells`
    printed: bool = True  # False: the column is in files, but not on consoles
    quantity: str = ""  # the quantity, if the heading names only its source: `speed` of `Lingvo's cut`
    minuend: str | None = None  # in a column of differences `x - paper`: the heading of column x

    @classmethod
    def of(
        cls, key: str, heading: str, values: Sequence[Any], form: Callable[[Any], str], *, printed: bool = True
    ) -> Self:
        """A column of numbers, None where a row has none; ``form`` formats them for people."""
        cells = [NONE if value is None else form(value) for value in values]
        return cls(heading, cells=cells, number=True, key=key, values=values, printed=printed)

    @classmethod
    def of_measure(
        cls, metric: Metric, values: Sequence[Any], alike: Sequence[Any] | None = None, *, printed: bool = True
    ) -> Self:
        """A column of a measure. The heading has a unit, chosen for all of ``alike``; None: each cell has a unit."""
        if alike is None:
            return cls.of(metric.key, metric.heading, values, metric.unit.full, printed=printed)
        unit, bare = metric.unit.scale(alike)
        return cls.of(metric.key, metric.column_heading(unit), values, bare, printed=printed)

    @property
    def is_right_aligned(self) -> bool:
        """Whether the column is right-aligned: it holds numbers."""
        return self.number or self.origin != ""

    @property
    def origin_line(self) -> str:
        """The origin, or "" if the heading contains it, like `planned - paper`."""
        return "" if self.origin == self.heading or " - " in self.heading else self.origin

    def same_quantity(self, other: "Column") -> bool:
        """Whether both columns hold the same quantity, so that their numbers can be compared."""
        return (self.quantity or self.heading) == (other.quantity or other.heading)

    def has_value(self, row: int) -> bool:
        return self.plain_values[row] not in (None, NONE)

    @property
    def plain_values(self) -> Sequence[Any]:
        """The values that programs read."""
        return self.cells if self.values is None else self.values


@dataclass(frozen=True)
class Table:
    """Columns with the same number of cells."""

    title: str
    columns: Sequence[Column]
    names: int = 1  # number of leading columns that name a row; even the narrowest terminal shows them

    def __post_init__(self) -> None:
        assert len({len(column.cells) for column in self.columns}) <= 1, self.title

    @classmethod
    def of_rows(cls, title: str, columns: Iterable[Column], rows: Iterable[Sequence[str]], names: int = 1) -> Self:
        """A table from columns without cells, and rows with a cell for each column."""
        columns, rows = tuple(columns), tuple(rows)
        assert all(len(row) == len(columns) for row in rows), title
        return cls(
            title, [replace(column, cells=[row[at] for row in rows]) for at, column in enumerate(columns)], names
        )

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


def show_table(console: Console, table: Table, gap: int = 2, elsewhere: str = "", piped: int | None = None) -> None:
    """Print a table in lines that fit the terminal, broken between words only.

    A narrow terminal gets the columns that name the rows and, from the left, the others that fit; a line below tells
    where all are: `elsewhere`, such as `format=csv`. If that is empty, no column is left out. A pipe or a file gets
    every column, and one line per row, as with ps and kubectl, for grep and awk; of at most `piped` characters.
    """
    columns = shown = [column for column in table.columns if column.printed]
    width = console.width if console.is_terminal else piped
    if width is not None and elsewhere:
        shown = columns[: table.names]
        for column in columns[table.names :]:
            if sum(_min_width(other) + gap for other in (*shown, column)) - gap <= width:
                shown.append(column)
    rule = "\u2500" if console.encoding.startswith("utf") else "-"
    for line, style in _lines(shown, _widths(shown, width, gap), gap, rule):
        show_line(console, line, style)
    if len(shown) < len(columns):
        left_out = plural(len(columns) - len(shown), "more column")
        show_text(console, f"{left_out}: {elsewhere}, or a wider terminal")


def to_text(table: Table, form: str) -> str:
    """A table for programs, `json` or `csv`, or for papers, `latex`."""
    if form == "latex":
        return to_latex(table)
    return to_csv(table) if form == "csv" else as_json(to_rows(table))


def to_latex(table: Table) -> str:
    """The columns that a console shows, as a `tabular` for LaTeX's package booktabs."""
    columns = [column for column in table.columns if column.printed]

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    begin = rf"\begin{{tabular}}{{{''.join('r' if column.is_right_aligned else 'l' for column in columns)}}}"
    rows = map(line, Table("", columns).rows)
    lines = [begin, r"\toprule", line(column.heading for column in columns), r"\midrule", *rows, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", ""])


def to_rows(table: Table) -> list[dict[str, Any]]:
    """A dictionary for each row, with all columns by their keys, and None where a row has no value."""
    keys = [column.key or column.heading for column in table.columns]
    values = zip(*(column.plain_values for column in table.columns), strict=True)
    return [dict(zip(keys, row, strict=True)) for row in values]


def to_csv(table: Table) -> str:
    """All columns as CSV, values with all their digits; a missing value is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.key or column.heading for column in table.columns])
    for values in zip(*(column.plain_values for column in table.columns), strict=True):
        writer.writerow(
            [value if isinstance(value, str) else "" if value is None else format_value(value) for value in values]
        )
    return file.getvalue()


def to_markdown(table: Table) -> str:
    """The table as a Markdown pipe table; every line ends with a newline."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    headings = line(", ".join(filter(None, (column.heading, column.origin_line))) for column in table.columns)
    ruler = line("---:" if column.is_right_aligned else "---" for column in table.columns)
    return headings + ruler + "".join(map(line, table.rows))


def to_html(table: Table) -> str:
    """The table as a `table` element."""
    heads = []
    for column in table.columns:
        origin = f"<small>{column.origin_line}</small>" if column.origin_line else ""
        heads.append(f'<th scope="col"{_class(column)}>{escape(column.heading)}{origin}</th>')
    lines = [f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"]
    for name, *cells in table.rows:
        line = f'<th scope="row">{escape(name)}</th>'
        for column, cell in zip(table.columns[1:], cells, strict=True):
            line += f"<td{_class(column, cell)}>{escape(cell)}</td>"
        lines.append(f"<tr>{line}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _class(column: Column, cell: str = "") -> str:
    words = [column.origin] * (column.origin != "") + ["text"] * (not column.is_right_aligned)
    words += ["failed"] * _is_failure(column, cell)
    return f' class="{" ".join(words)}"' if words else ""


def _is_failure(column: Column, cell: str) -> bool:
    return column.heading == "status" and cell.startswith(("failed", "interrupted"))


def _lines(columns: Sequence[Column], widths: Sequence[int], gap: int, rule: str) -> Iterator[tuple[str, str]]:
    """The lines of a table, and their styles."""
    origins = any(column.origin_line for column in columns)
    headings = []
    for column, width in zip(columns, widths, strict=True):
        parts = [*column.heading.split("\n"), *([column.origin_line] if origins else [])]
        headings.append([line for part in parts for line in _wrap_cell(part, width)])
    most = max(map(len, headings))
    headings = [[""] * (most - len(lines)) + lines for lines in headings]  # aligned at the bottom

    def line(cells: Iterable[str]) -> str:
        padded = []
        for column, width, cell in zip(columns, widths, cells, strict=True):
            pad = " " * (width - cell_len(cell))
            padded.append(f"{pad}{cell}" if column.is_right_aligned else f"{cell}{pad}")
        return (" " * gap).join(padded).rstrip()

    for cells in zip(*headings, strict=True):
        yield line(cells), "bold"
    yield rule * (sum(widths) + gap * (len(columns) - 1)), ""
    for row in Table("", columns).rows:
        failed = any(_is_failure(column, cell) for column, cell in zip(columns, row, strict=True))
        cell_lines = (_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True))
        for cells in zip_longest(*cell_lines, fillvalue=""):
            yield line(cells), "red" if failed else ""


def _wrap_cell(text: str, width: int) -> Sequence[str]:
    """`text` in lines of at most `width` characters; a longer word loses its middle."""
    if cell_len(text) <= width:
        return [text]
    words = (
        word if len(word) <= width else f"{word[: width // 2 - 1]}...{word[2 - width + width // 2 :]}"
        for word in text.split()
    )
    return wrap(" ".join(words), width)


def _widths(columns: Sequence[Column], width: int | None, gap: int) -> list[int]:
    """The width of each column in characters, in a table of at most ``width``, or of any width if that is None. Spare
    room goes first to columns of numbers, then to texts; missing room is taken from the widest texts."""
    if width is None:
        return [_max_width(column) for column in columns]
    widths = [_min_width(column) for column in columns]
    room = width - gap * (len(columns) - 1) - sum(widths)
    for at in sorted(range(len(columns)), key=lambda at: not columns[at].is_right_aligned):
        more = max(0, min(room, _max_width(columns[at]) - widths[at]))
        widths[at] += more
        room -= more
    texts = [at for at, column in enumerate(columns) if not column.is_right_aligned]
    while room < 0 and texts and widths[at := max(texts, key=widths.__getitem__)] > MIN_TEXT_WIDTH:
        widths[at] -= 1
        room += 1
    return widths


def _min_width(column: Column) -> int:
    """The least width of a column: the longest number, or the longest word of its heading or texts."""
    words = [*column.heading.split(), column.origin_line]
    words += column.cells if column.is_right_aligned else [word for cell in column.cells for word in cell.split()]
    return max(map(cell_len, words))


def _max_width(column: Column) -> int:
    """The width of a column in which nothing is wrapped."""
    return max(map(cell_len, (*column.heading.split("\n"), column.origin_line, *column.cells)))
