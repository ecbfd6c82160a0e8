"""Whether a table agrees with the paper: the number that stands for its claim, ours, and whether all rows agree."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.units import plural

OUR_ORIGINS = ("measured", "counted", "planned", "simulated")  # the origins of our numbers
AGREEMENT_TOLERANCE = 0.1  # greatest difference of a number that agrees, as a fraction of the paper's; a heuristic


class Verdict(NamedTuple):
    what: str  # `parameters, Pipeline-8`, `K = 8, M = 32`
    paper: str
    ours: str
    origin: str
    difference: str
    words: str  # `agrees`, `differs in 4 of 5 rows, ...`, `not comparable`


def judge_columns(table: Table) -> Iterator[Verdict]:
    """A verdict for each column of the paper's numbers and each origin of ours: numbers that were run are judged
    separately from those that were not."""
    for paper in (column for column in table.columns if column.origin == "paper"):
        for origin in OUR_ORIGINS:
            ours = [column for column in table.columns if column.origin == origin and column.same_quantity(paper)]
            ours.sort(key=lambda column: _differences(table, column) is None)  # columns with a difference come first
            rows = [row for row in range(len(table.rows)) if ours and paper.has_value(row) and ours[0].has_value(row)]
            if rows:
                yield _judge(table, paper, ours[0], rows)


def _judge(table: Table, paper: Column, ours: Column, rows: list[int]) -> Verdict:
    """The verdict of `rows`. In a table of growing sizes, the last row makes the paper's point; in a table of different
    quantities, the first."""
    grows = paper.heading not in ("", "paper") or any(column.heading == "K" for column in table.columns)
    row = rows[-1 if grows else 0]
    differences = _differences(table, ours)
    difference = NONE if differences is None else differences.cells[row]
    unit = " %" if differences and differences.heading.endswith("%") and difference != NONE else ""
    compared = {at: off for at in rows if (off := _relative_error(paper, ours, at)) is not None}
    without = differences is None or all(differences.cells[at] == NONE for at in rows)
    if without and (differences or ours.origin in ("measured", "counted")):
        compared = {}  # the numbers are of other data or sizes
    apart = [at for at, off in compared.items() if off > AGREEMENT_TOLERANCE]
    words = "agrees" if compared else "not comparable"
    if apart:
        furthest = max(apart, key=compared.__getitem__)
        worst = f"{', '.join(_words(table, '', furthest))}: {ours.cells[furthest]} for {paper.cells[furthest]}"
        words = f"differs in {len(apart)} of {plural(len(compared), 'row')}, most in {worst}"
    what = ", ".join(_words(table, ours.heading if ours.heading == paper.heading else "", row))
    return Verdict(what, paper.cells[row], ours.cells[row], ours.origin, difference + unit, words)


def _differences(table: Table, ours: Column) -> Column | None:
    return next((column for column in table.columns if column.minuend == ours.heading), None)


def _relative_error(paper: Column, ours: Column, row: int) -> float | None:
    """The difference as a fraction of the paper's number; for words 0 or infinity. None if the paper's number is 0."""
    theirs, value = (column.plain_values[row] for column in (paper, ours))
    try:
        theirs, value = (float(str(cell).split()[0].replace(",", "")) for cell in (theirs, value))
    except ValueError:
        return 0.0 if theirs == value else inf
    return abs(value - theirs) / abs(theirs) if theirs else None


def _words(table: Table, quantity: str, row: int) -> Iterator[str]:
    if quantity:
        yield quantity
    for column in table.columns:
        if not column.origin and column.cells[row]:
            yield f"{column.heading} = {column.cells[row]}" if column.heading in ("K", "M") else column.cells[row]
