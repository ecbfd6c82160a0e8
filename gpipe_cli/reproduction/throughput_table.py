"""The tables of the paper's tables 2 and 3 and its figure 3: what it says of a cell, and what came out for it here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NONE, difference, number
from gpipe_cli.units import plural

IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the paper: speed relative to the first row's."""

    partitions: int
    micro_batches: int
    paper: float
    torchgpipe: float | None = None
    name: str = ""  # `pipeline-2`; "" where K and M say it
    recompute: str | None = None  # None: as the recipe says


@dataclass(frozen=True, slots=True)
class Model:
    """A table: one model over K and M."""

    name: str  # as the paper writes it
    rows: tuple[Row, ...]
    figures: tuple[str, ...]  # settings: the paper's hardware
    settings: tuple[str, ...] = ()  # of a second model, beside the recipe's
    desk: tuple[str, ...] = ()  # in place of the recipe's settings for a desk; (): those


@dataclass(frozen=True)
class Speed:
    """What came out for a row: relative to the first row, or a word in its place."""

    relative: float | None
    word: str = NONE
    reason: str = ""  # why it is impossible

    @property
    def text(self) -> str:
        return self.word if self.relative is None else number(self.relative, 2)


def throughput_table(
    model: Model,
    measured: Sequence[Speed],
    timed: Sequence[Speed],
    figured: Sequence[Speed],
    sizes: str,
    *,
    desk: bool,
    comparable: bool,
) -> Table:
    """A row for each of the paper's numbers. What nobody has is no column.

    Args:
        sizes: the samples of a mini-batch, in words.
        desk: what is measured is of another size than the paper's.
        comparable: what is simulated at the paper's size is of that size.
    """
    rows = model.rows
    columns = [
        Column("", cells=[row.name for row in rows]),
        Column("K", cells=[str(row.partitions) for row in rows]),
        Column("M", cells=[str(row.micro_batches) for row in rows]),
        Column("paper", "paper", [number(row.paper, 2) for row in rows]),
        Column("torchgpipe", "torchgpipe", [number(row.torchgpipe, 2) for row in rows]),
        Column("here", "measured", [speed.text for speed in measured]),
        Column("layers", "simulated", [speed.text for speed in timed]),
        Column("full size", "simulated", [speed.text for speed in figured]),
        _differences("here - paper", measured, rows, comparable and not desk),
        _differences("full size - paper", figured, rows, comparable),
    ]
    left_out = {
        "": not any(row.name for row in rows),
        "torchgpipe": all(row.torchgpipe is None for row in rows),
        "here - paper": all(speed.text == NONE for speed in measured),
    }
    base = rows[0].name or cell(rows[0])
    title = f"{model.name}: throughput relative to {base} of each column; {sizes}"
    return Table(title, [column for column in columns if not left_out.get(column.heading)])


def _differences(heading: str, speeds: Sequence[Speed], rows: Sequence[Row], comparable: bool) -> Column:
    cells = [difference(speed.relative, row.paper, comparable) for speed, row in zip(speeds, rows, strict=True)]
    return Column(heading, "difference", cells)


def found(
    model: Model, measured: Sequence[Speed], timed: Sequence[Speed], figured: Sequence[Speed], comparable: bool
) -> Iterator[tuple[str, str]]:
    """Notes: how far from the paper, where the first row is 1 everywhere and does not count; and which cells have no
    number."""
    rows = range(1, len(model.rows))
    for whose in ("paper", "torchgpipe") if comparable else ():
        off = [
            abs(ours - theirs)
            for at in rows
            if (ours := figured[at].relative) is not None and (theirs := getattr(model.rows[at], whose)) is not None
        ]
        if off:
            yield (
                "found",
                f"{model.name}, simulated at the paper's size: off from {_possessive(whose)} by {mean(off):.2f} in the "
                f"mean of {plural(len(off), 'cell')}",
            )
    worded = [at for at, speed in enumerate(measured) if speed.relative is None and speed.word != NONE]
    refused = [at for at in worded if not measured[at].reason]
    if refused:
        yield "found", f"{model.name}: not to be measured here: {_cells(model, refused)}"
    impossible: dict[str, dict[int, None]] = {}
    for column in (measured, timed, figured):
        for at, speed in enumerate(column):
            if speed.reason:
                impossible.setdefault(speed.reason, {})[at] = None
    for reason, cells in impossible.items():
        yield IMPOSSIBLE, f"{model.name}, {_cells(model, cells)}: {reason}"


def cell(row: Row) -> str:
    return f"K = {row.partitions}, M = {row.micro_batches}"


def _cells(model: Model, rows: Iterable[int]) -> str:
    return "; ".join(cell(model.rows[at]) for at in rows)


def _possessive(whose: str) -> str:
    return "the paper's" if whose == "paper" else f"{whose}'s"
