"""Tables and notes that a recipe's file describes, made of results.

A key such as `trained.test.top1` names a value: of the row, else of its table, else of the whole experiment, where each
run has its result under its own name. Titles, notes, folders and settings are templates: `{trained.steps:plural step}`
is the value of a key in one of the formats of ``format_cell``.
"""

import string
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.config.schema import quote
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.summary import describe_speed_kind
from gpipe_cli.reporting.tables.table import NONE, Column, Origin, Table
from gpipe_cli.reproduction.runner import Scale
from gpipe_cli.units import count, plural, size

Values = Mapping[str, Any]
EVERY_SCALE: tuple[Scale, ...] = ("smoke", "small", "paper")


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column of a table: the value of a key in each row, or the difference of two."""

    heading: str = ""
    key: str = ""  # may be a template: `measured.breakdown.{share}`
    origin: Origin = ""
    format: str = ""  # may be a template, so that each row has its own; "": text
    number: bool = False  # whether a text is right-aligned, as a number is
    quantity: str = ""
    minus: str | None = None  # makes a column of differences: the key of the number that is subtracted
    ratio: bool = False  # whether the difference is taken relative to that number, in percent
    always: bool = False  # whether the difference is taken even where other data or sizes are not the paper's
    digits: int = 2  # decimal places of a difference, which is in points for percentages
    needs: str | None = None  # the column is left out if no row has a value of this key
    scales: tuple[Scale, ...] = EVERY_SCALE

    def values(self, rows: Sequence[Values]) -> list[Any]:
        values = [look_up(row, fill_template(self.key, row) or "") for row in rows]
        texts = not self.format  # may also be templates
        return [
            fill_template(value, row) if texts and isinstance(value, str) else value
            for value, row in zip(values, rows, strict=True)
        ]

    def column(self, values: Sequence[Any], rows: Sequence[Values], heading: str) -> Column:
        formats = [fill_template(self.format, row) or "" for row in rows]
        cells = [
            NONE if value is None else format_cell(value, form) for value, form in zip(values, formats, strict=True)
        ]
        programs = [None if isinstance(value, str) else value for value in values]
        plain = not self.origin or not self.format or "{" in self.format
        return Column(
            heading, self.origin, cells, self.number, values=None if plain else programs, quantity=self.quantity
        )

    def differences(self, ours: "ColumnSpec", rows: Sequence[Values], comparable: bool) -> Column:
        """The difference of each row from the number ``minus``; `-` if a number is missing or not ``comparable``."""
        heading = fill_template(self.heading, rows[0]) or ""
        cells = []
        unit = " %" if self.ratio and "%" not in heading else ""
        for row, number in zip(rows, ours.values(rows), strict=True):
            theirs = look_up(row, self.minus or "")
            if not (comparable or self.always) or isinstance(number, str) or None in (number, theirs):
                cells.append(NONE)
                continue
            times = 100 if (fill_template(ours.format, row) or "").endswith("%") else 1
            off = 100 * number / theirs - 100 if self.ratio else times * number - times * theirs
            cells.append(f"{round(off, self.digits) + 0.0:+.{self.digits}f}{unit}")
        return Column(heading, "difference", cells, minuend=fill_template(ours.heading, rows[0]))


@dataclass(frozen=True, slots=True)
class Note:
    """A line below the tables; it is left out if any of its values is missing."""

    label: str
    text: str
    each: str | None = None  # the key of a list, whose members have a line each
    when: str | None = None  # the line is left out unless this value is true

    def lines(self, results: Values) -> Iterator[tuple[str, str]]:
        for member in [{}] if self.each is None else look_up(results, self.each) or []:
            values = ChainMap(member, {**results})
            if self.when is None or look_up(values, self.when):
                text = fill_template(self.text, values)
                if text is not None:
                    yield self.label, text


def make_table(title: str, columns: Sequence[ColumnSpec], rows: Sequence[Values], comparable: bool) -> Table:
    """A table; ``comparable``: whether differences are taken. A row is left out if its value `when` is missing."""
    rows = [row for row in rows if "when" not in row or look_up(row, row["when"]) is not None]
    filled_columns = []
    for column in columns:
        values = column.values(rows)
        if column.needs is not None and all(look_up(row, column.needs) is None for row in rows):
            continue
        if column.minus is None:
            filled_columns.append(column.column(values, rows, fill_template(column.heading, rows[0]) or ""))
        else:
            ours = next((other for other in columns if other.key == column.key and other.minus is None), column)
            filled_columns.append(column.differences(ours, rows, comparable))
    return Table(fill_template(title, rows[0]) or "", filled_columns)


class _MissingError(Exception):
    """A template names a value that is None."""


class _Template(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return look_up(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise _MissingError
        return format_cell(value, format_spec)


def fill_template(template: str, values: Values) -> str | None:
    """The text of a template; None if any of its values is missing."""
    try:
        return _Template().vformat(template, (), values)
    except _MissingError:
        return None
    except (TypeError, ValueError) as error:
        raise InputError(f"{template}: cannot be filled in: {error}") from error


def look_up(values: Values, key: str) -> Any:
    """The value of a dotted key; None if there is none. Raises InputError if a result has other values only."""
    first, *rest = key.split(".")
    value = values.get(first)
    for part in rest:
        if value is None:
            return None
        if part not in value:
            raise InputError(f"{key}: there is no {part}; choose one of {', '.join(value)}")
        value = value[part]
    return value


def format_cell(value: Any, form: str) -> str:
    """A value as text, by `plural sample`, a name in ``FORMATS``, a format of shares, `.1%`, or a format of Python,
    `,.2f`. Words instead of a number stay as they are."""
    noun = form.removeprefix("plural ")
    if noun != form:
        return plural(value, noun)
    if form in FORMATS:
        return FORMATS[form](value)
    if isinstance(value, str):
        return value
    return f"{100 * value:{form[:-1]}f} %" if form.endswith("%") else format(value, form)


def _mini_batch(result: Values) -> str:
    """The size of a training's mini-batch."""
    tokens = result.get("global_batch_tokens")
    return f"at most {tokens:,} tokens" if tokens else plural(result["global_batch"], "sample")


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "count": count,
    "size": size,
    "quoted": quote,
    "speed kind": describe_speed_kind,
    "mini-batch": _mini_batch,
    "figures": lambda value: f"{value:,.{max(0, 3 - len(str(int(value)))) if value >= 1 else 3}f}",
    "points": "{:,.3f} points".format,
}
