"""The one number of a recipe that stands for its claim: the paper's, ours, and how far they are apart."""

from dataclasses import dataclass

from gpipe_cli.reporting.reproduced.chart import OURS, value
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reporting.tables.table import NONE, Column, Table


@dataclass(frozen=True)
class Verdict:
    what: str = NONE
    paper: str = NONE
    ours: str = NONE
    origin: str = ""
    difference: str = NONE


def verdict(reproduction: Reproduction) -> Verdict:
    """Of the first table that has a number of the paper beside one of ours, its last such row; one with a difference
    from the paper comes before one without."""
    found = [one for table in reproduction.tables if (one := _of(table)) is not None]
    return next((one for one in found if one.difference != NONE), found[0] if found else Verdict())


def _of(table: Table) -> Verdict | None:
    names = [column for column in table.columns if not column.origin]
    pairs = [
        (paper, ours)
        for paper in table.columns
        for ours in table.columns
        if paper.origin == "paper" and ours.origin in OURS and _same(paper, ours)
    ]
    off = [column for column in table.columns if column.origin == "difference"]
    for at in reversed(range(len(table.rows))):
        for paper, ours in reversed(pairs):
            if value(paper.cells[at]) is not None and value(ours.cells[at]) is not None:
                what = ", ".join(
                    f"{column.heading} = {column.cells[at]}" if column.heading else column.cells[at] for column in names
                )
                mine = [one for one in off if one.heading in ("", f"{ours.heading} - paper", f"{ours.origin} - paper")]
                return Verdict(what, paper.cells[at], ours.cells[at], ours.origin, mine[0].cells[at] if mine else NONE)
    return None


def _same(paper: Column, ours: Column) -> bool:
    """Whether both are of the same quantity: in a table of speeds the column of the paper is called so."""
    return ours.heading == paper.heading or paper.heading == "paper"
