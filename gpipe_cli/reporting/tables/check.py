"""The report of `gpipe check`: whether partitioning changes no result, as the paper promises (sections 1 and 2.2).

Every variant, a way to run the mini-batch, is a row. The console merges rows with equal results; check.json has all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.reporting.run.lines import show_facts, show_text
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.results.files import write_result
from gpipe_cli.units import loss, plural, spans
from gpipe_cli.verify.variants import MODES, TOLERANCE, Row

CHECK = "check.json"
_KINDS = tuple(map(attrgetter, ("schedule", "partitions", "recompute", "executor")))


@dataclass(frozen=True)
class CheckReport:
    rows: tuple[Row, ...]
    loss: float | None  # mean loss per element of the mini-batch; None if the reference failed
    config: dict[str, Any]

    @property
    def identical(self) -> bool:
        """Whether no variant differs or fails."""
        return not any(row.bad for row in self.rows)

    @property
    def verdict(self) -> str:
        """The conclusion, which is the last line of the report."""
        word = "differs" if any(row.verdict == "differs" for row in self.rows) else "fails"
        compared = [row for row in self.rows if row.verdict not in ("reference", "left out")]
        bad = [row for row in compared if row.bad]
        if self.identical:
            assert self.loss is not None
            return (
                "identical: partitions, recomputation and executors change nothing "
                f"({plural(len(compared), 'variant')}, loss {loss(self.loss)})"
            )
        layers = list(dict.fromkeys(row.layer for row in bad if row.layer is not None))
        where = f"; first in layer {', '.join(layers[:3])}" if layers else ""
        return f"{word}: {len(bad)} of {len(compared)} variants{where}"


def write_check(folder: Path, report: CheckReport) -> Path:
    """Writes check.json into ``folder`` and returns its path. Raises OSError."""
    write_result(folder, asdict(report) | {"identical": report.identical, "verdict": report.verdict}, CHECK)
    return folder / CHECK


def show_check(console: Console, folder: Path, report: CheckReport) -> None:
    headings = ("partitions", "schedule", "recompute", "executor", "result")
    usual = report.rows[0].micro_batches
    folded = _folded([row for row in report.rows if row.micro_batches == usual])
    console.print()
    show_table(console, Table.of_rows("", map(Column, headings), map(_cells, folded)), gap=3)
    console.print()
    notes = []
    for row in report.rows:
        if row.micro_batches != usual:
            why = f": {row.text}" if row.text and not row.bad else ""
            notes.append((f"M = {row.micro_batches}", f"{_result(row)}, against M = {usual}{why}"))
    if any(row.verdict == "within tolerance" for row in report.rows):
        tolerance = f"{TOLERANCE[report.config['precision']]:.0e} of the gradients' norm"
        notes.append(("tolerance", f"{tolerance}, where they are summed in another order"))
    unusual = {row.text: row.verdict for row in report.rows if row.bad or row.verdict == "left out"}
    for text, verdict in unusual.items():
        if text and not any(text in other and text != other for other in unusual):
            notes.append((verdict, text))
    show_facts(console, [*notes, ("details", str(folder / CHECK))])
    show_text(console, report.verdict, "bold")


def _folded(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Merges rows with equal results where they form a whole group, else by number of partitions, else not at all."""
    for group in _grouped(rows, lambda row: (row.schedule, row.executor == "pytorch", *_outcome(row))):
        if _is_whole(group, rows):
            yield group
            continue
        for part in _grouped(group, lambda row: (row.partitions,)):
            yield from [part] if _is_whole(part, rows) else [[row] for row in part]


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[object, ...]]) -> Iterable[list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.values()


def _is_whole(group: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether a group has all rows of its schedules, partitions, recompute modes and executors: one line suffices."""
    kinds = [{of(row) for row in group} for of in _KINDS]
    there = [row for row in rows if all(of(row) in kind for of, kind in zip(_KINDS, kinds, strict=True))]
    other = {"reference", "within tolerance"} - {group[0].verdict}
    return len(group) == sum(row.verdict not in other for row in there)


def _outcome(row: Row) -> tuple[object, ...]:
    if row.verdict == "within tolerance":
        return row.verdict, f"{row.difference:.1e}"
    return row.verdict, row.layer, row.text


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    modes = [mode for mode in reversed(MODES) if any(row.recompute == mode for row in rows)]
    executors = list(dict.fromkeys(row.executor for row in rows))
    result = _result(rows[0]) if len(rows) == 1 else f"{_result(rows[0])} ({len(rows)} of {len(rows)})"
    return (
        ", ".join(spans(sorted({row.partitions for row in rows}), "..")),
        rows[0].schedule,
        "all three" if len(modes) == len(MODES) else ", ".join(modes),
        "both" if len(executors) > 1 else executors[0],
        result,
    )


def _result(row: Row) -> str:
    value = "" if row.difference is None or (row.layer and row.text) else f" ({row.difference:.1e})"
    where = "" if row.layer is None else f" in layer {row.layer}"
    return f"{row.verdict}{where}{value}"
