"""What experiments show: the paper's numbers, ours, the differences between the two, and phrases of notes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.reporting.run.summary import describe_speed_kind
from gpipe_cli.reporting.tables.table import NONE, Column, Origin, Table
from gpipe_cli.units import count, plural, size

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A number of ours, in a format of ``format_cell``, next to the paper's."""

    name: str
    ours: float | None = None
    form: str = ""
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A column with the value of a key in each row."""

    heading: str
    key: str
    form: str = ""  # of `format_cell`; "": text
    origin: Origin = ""
    number: bool = False  # whether a text is right-aligned, as a number is
    quantity: str = ""

    def column(self, rows: Sequence[Values], comparable: bool) -> Column:
        values = [row.get(self.key) for row in rows]
        numbers = [None if isinstance(value, str) else value for value in values]
        return Column(
            self.heading, self.origin, [format_cell(value, self.form) for value in values], self.number,
            values=numbers if self.origin and self.form else None, quantity=self.quantity,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A column with the difference of the values of a column and of a key, in points for shares."""

    heading: str
    ours: Shown
    minus: str  # the key
    digits: int = 2  # decimal places
    relative: bool = False  # whether it is in percent of the number that is subtracted

    def column(self, rows: Sequence[Values], comparable: bool) -> Column:
        cells = [self.cell(row.get(self.ours.key), row.get(self.minus)) if comparable else NONE for row in rows]
        return Column(self.heading, "difference", cells, minuend=self.ours.heading)

    def cell(self, ours: Any, theirs: float | None) -> str:
        if ours is None or theirs is None or isinstance(ours, str):
            return NONE
        times = 100 if self.ours.form.endswith("%") else 1
        off = 100 * ours / theirs - 100 if self.relative else times * ours - times * theirs
        unit = " %" if self.relative and "%" not in self.heading else ""
        return f"{round(off, self.digits) + 0.0:+.{self.digits}f}{unit}"


def make_table(
    title: str, columns: Sequence[Shown | Difference], rows: Sequence[Values], comparable: bool = True
) -> Table:
    """A table of ``rows``; differences are `-` unless these are ``comparable`` with the paper's numbers."""
    return Table(title, [column.column(rows, comparable) for column in columns])


def compare_rows(title: str, rows: Sequence[Row], comparable: bool, paper_form: str = "") -> Table:
    """A table of single numbers; ``paper_form``: the format of the paper's, "" for that of ours."""
    differences = [Difference("", Shown("", "", row.form), "").cell(row.ours, row.paper) for row in rows]
    papers = [row.paper for row in rows]
    return Table(title, [
        Column("", cells=[row.name for row in rows]),
        Column("", "paper", [format_cell(row.paper, paper_form or row.form) for row in rows],
               values=papers if paper_form else None),
        Column("", "measured", [format_cell(row.ours, row.form) for row in rows]),
        Column("", "difference", differences if comparable else [NONE] * len(rows), minuend=""),
    ])  # fmt: skip


def compare_parameters(model: str, paper: float, counted: int) -> Table:
    """The table of a model's size, which is compared at every scale."""
    ours = Shown("parameters", "counted", "count", "counted")
    columns = Shown("model", "model"), Shown("parameters", "paper", "count", "paper"), ours
    off = Difference("", ours, "paper", digits=1, relative=True)
    return make_table("Size", [*columns, off], [{"model": model, "paper": paper, "counted": counted}])


def describe_training(trained: Values) -> str:
    """What a training was, from its result."""
    tokens = trained.get("global_batch_tokens")
    mini_batch = f"at most {tokens:,} tokens" if tokens else plural(trained["global_batch"], "sample")
    model = f"{trained['model']}, {count(trained['model_parameters'])} parameters"
    return f"{model}: {plural(trained['steps'], 'step')} of {mini_batch}, seed {trained['config']['seed']}"


def describe_speed_kinds(measured: Sequence[Values]) -> list[str]:
    """The kinds of measured speeds that are not a pipeline's."""
    kinds = sorted({row["kind"] for row in measured if row["kind"]} - {"measured"})
    return [describe_speed_kind(kind) for kind in kinds]


def format_cell(value: Any, form: str) -> str:
    """A value as text, by a name in ``FORMATS``, a format of shares, `.1%`, or a format of Python, `,.2f`. Words
    instead of a number stay as they are, and None is `-`."""
    if value is None:
        return NONE
    if form in FORMATS:
        return FORMATS[form](value)
    if isinstance(value, str):
        return value
    return f"{100 * value:{form[:-1]}f} %" if form.endswith("%") else format(value, form)


def format_figure(value: float) -> str:
    """At least three digits: `0.123`, `1.23`, `12.3`, `1,234`."""
    return f"{value:,.{max(0, 3 - len(str(int(value)))) if value >= 1 else 3}f}"


FORMATS: Mapping[str, Callable[[Any], str]] = {"count": count, "size": size, "figures": format_figure}
