"""The numbers that stand for a claim: from each table one number of the paper, ours, and their difference."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpipe_cli.reporting.tables.table import NONE, Column, Table

OURS = ("measured", "counted", "planned", "simulated")  # origins


@dataclass(frozen=True)
class Verdict:
    what: str  # `parameters, Pipeline-8`, `K = 8, M = 32`
    paper: str
    ours: str
    origin: str
    difference: str


def verdict(table: Table) -> Verdict | None:
    """The verdict of a table; None if it has no number of the paper beside one of ours.

    In a table of growing sizes, the last row makes the paper's point; in a table of different quantities, the first. If
    the paper has several columns, the last one counts; of ours, the first one with a difference from it.
    """
    grows = any(column.heading == "K" for column in table.columns)
    for paper in (column for column in reversed(table.columns) if column.origin == "paper"):
        ours = [column for column in table.columns if column.origin in OURS and column.same_quantity(paper)]
        rows = list(range(len(table.rows)))
        if grows or paper.heading not in ("", "paper"):
            rows.reverse()
        for at in rows:
            known = [one for one in ours if paper.has_value(at) and one.has_value(at)]
            found = [_of(table, paper, one, at) for one in known]
            if found:
                return next((one for one in found if one.difference != NONE), found[0])
    return None


def _of(table: Table, paper: Column, ours: Column, at: int) -> Verdict:
    column = next((one for one in table.columns if one.minuend == ours.heading), None)
    unit = " %" if column and column.heading.endswith("%") else ""
    difference = column.cells[at] if column else NONE
    return Verdict(
        ", ".join(_words(table, ours.heading if ours.heading == paper.heading else "", at)),
        paper.cells[at],
        ours.cells[at],
        ours.origin,
        difference + unit if difference != NONE else NONE,
    )


def _words(table: Table, quantity: str, at: int) -> Iterator[str]:
    if quantity:
        yield quantity
    for column in table.columns:
        if not column.origin and column.cells[at]:
            yield f"{column.heading} = {column.cells[at]}" if column.heading in ("K", "M") else column.cells[at]
