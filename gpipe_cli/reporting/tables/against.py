"""The report of `gpipe check against=torch`: for each schedule of another program whether its gradients equal ours, and
both programs' speed and memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console

from gpipe_cli.reporting.tables.check import write_and_show
from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.units import MIB, plural, rate

Verdict = Literal["identical", "within the order of summation", "differs", "fails", "ours fails", "left out"]
_AGREEING_VERDICTS = ("identical", "within the order of summation")
UNIT_NOTE = (
    "per layer, the largest difference that the order of summation explains: the distance between our gradients summed "
    "from the last micro-batch to the first and from the first to the last, or epsilon sqrt(n) times their norm for "
    "sums of n terms, if that is smaller"
)


@dataclass(frozen=True)
class Measurement:
    samples: int  # samples of a step
    rounds: list[list[float]]  # the seconds of each timed step of each round
    memory_bytes: int  # peak of the fullest process: the allocator's on a GPU; on a CPU, the growth of the process

    @property
    def seconds(self) -> float:
        """The seconds of a step: the median over rounds of the median over the steps of each round."""
        return median(map(median, self.rounds))


@dataclass(frozen=True)
class Row:
    """A schedule of another program, and ours to compare."""

    program: str
    schedule: str
    verdict: Verdict
    ours: str  # our schedule, whose speed and memory are compared
    measured: Measurement | None
    ours_measured: Measurement | None
    layer: str | None = None  # the first layer that differs, in the backward's order; otherwise the furthest away
    units: float | None = None  # its distance from ours, in units of `UNIT_NOTE`
    share: float | None = None  # its distance from ours as a fraction of our gradient's norm
    text: str = ""  # why it fails or is left out

    @property
    def ratios(self) -> list[float]:
        """Our speed as a multiple of theirs, in each round that both have finished."""
        if self.measured is None or self.ours_measured is None:
            return []
        both = zip(self.measured.rounds, self.ours_measured.rounds, strict=False)
        return [median(theirs) / median(ours) for theirs, ours in both]


@dataclass(frozen=True)
class AgainstReport:
    against: str
    version: str  # the version of torch
    rows: tuple[Row, ...]
    config: dict[str, Any]

    @property
    def agrees(self) -> bool:
        """Whether gradients could be compared with a schedule of the other program, and none differs."""
        bad = any(row.verdict in ("differs", "ours fails") for row in self.rows)
        return not bad and any(row.verdict in _AGREEING_VERDICTS and row.program != "pytorch" for row in self.rows)

    @property
    def verdict(self) -> str:
        """The conclusion, the last line of the report."""
        bad = [row for row in self.rows if row.verdict == "differs"]
        if bad:
            first = bad[0]
            assert first.units is not None
            where = f"{first.schedule} in layer {first.layer}, by {first.units:.1e} units"
            return f"differs: {len(bad)} of {plural(len(self.rows), 'row')}; first {where}"
        if not self.agrees:
            return f"fails: no gradients of {self.against} could be compared"
        same = [row for row in self.rows if row.verdict in _AGREEING_VERDICTS]
        bits = sum(row.verdict == "identical" for row in same)
        return f"agrees: {len(same)} of {plural(len(self.rows), 'row')}, {bits} of them bit by bit"


def show_against(console: Console, folder: Path, report: AgainstReport) -> None:
    """Writes check.json into ``folder``, and shows the report. Raises OSError."""
    speed = Column("samples/s", number=True), Column("MiB", number=True)
    headings = [
        Column("theirs"), Column("gradients"), *speed, Column("ours"), *speed, Column("ours / theirs", number=True)
    ]  # fmt: skip
    notes: list[tuple[str, str]] = [(row.verdict, f"{row.schedule}: {row.text}") for row in report.rows if row.text]
    if any(row.units is not None for row in report.rows):
        notes.append(("unit", UNIT_NOTE))
    notes.append(("MiB", "peak of the fullest process; ours / theirs: speed, median (lowest, highest) of the rounds"))
    results = asdict(report) | {"agrees": report.agrees, "verdict": report.verdict, "unit": UNIT_NOTE}
    results["rows"] = [asdict(row) | {"ratios": row.ratios} for row in report.rows]
    table = Table.of_rows("", headings, map(_cells, report.rows))
    write_and_show(console, folder, results, table, dict.fromkeys(notes), gap=2)


def _cells(row: Row) -> Sequence[str]:
    ratios = row.ratios
    spread = f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})" if ratios else NONE
    return row.schedule, _result(row), *_speed(row.measured), row.ours, *_speed(row.ours_measured), spread


def _speed(measured: Measurement | None) -> tuple[str, str]:
    if measured is None:
        return NONE, NONE
    return rate(measured.samples / measured.seconds), f"{measured.memory_bytes / MIB:.0f}"


def _result(row: Row) -> str:
    if row.units is None:
        return row.verdict
    if row.verdict == "differs":
        return f"differs in layer {row.layer}, {row.units:.1e} units"
    return f"{row.verdict} ({row.units:.1f} units)"
