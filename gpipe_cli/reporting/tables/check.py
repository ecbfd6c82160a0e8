"""The report of `gpipe check`: whether partitioning changes no result, as the paper promises (sections 1 and 2.2).

Every variant, a way to run the mini-batch, is a row. The console merges rows with equal results; check.json has all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.reporting.run.lines import print_fields, show_text
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.results.files import write_result
from gpipe_cli.units import join_ranges, loss, plural
from gpipe_cli.verify.self_check import MODES, TOLERANCE, Row

CHECK = "check.json"


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
        """The conclusion, the last line of the report."""
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


def show_check(console: Console, folder: Path, report: CheckReport) -> None:
    """Writes check.json into ``folder``, and shows the report. Raises OSError."""
    headings = ("partitions", "schedule", "recompute", "executor", "result")
    usual = report.rows[0].variant.micro_batches
    rows = [row for row in report.rows if row.variant.micro_batches == usual]
    table = Table.of_rows("", map(Column, headings), (_cells(group, rows) for group in _merge_rows(rows)))
    notes = []
    for row in report.rows:
        if row.variant.micro_batches != usual:
            why = f": {row.text}" if row.text and not row.bad else ""
            notes.append((f"M = {row.variant.micro_batches}", f"{_result(row)}, compared with M = {usual}{why}"))
    if any(row.verdict == "within tolerance" for row in report.rows):
        tolerance = f"{TOLERANCE[report.config['precision']]:.0e} of the gradients' norm"
        notes.append(("tolerance", f"{tolerance}, where gradients are summed in another order"))
    unusual = {row.text: row.verdict for row in report.rows if row.bad or row.verdict == "left out"}
    for text, verdict in unusual.items():
        if text and not any(text in other and text != other for other in unusual):
            notes.append((verdict, text))
    results = asdict(report)
    results["rows"] = [{**row.pop("variant")._asdict(), **row} for row in results["rows"]]
    results |= {"identical": report.identical, "verdict": report.verdict}
    write_and_show(console, folder, results, table, notes, gap=3)


def write_and_show(
    console: Console, folder: Path, results: dict[str, Any], table: Table, notes: Iterable[tuple[str, str]], gap: int
) -> None:
    """Writes `results` to check.json in ``folder``, and shows the table, the notes and the verdict in the results.
    Raises OSError if they could not be written."""
    try:
        write_result(folder, results, CHECK)
    finally:
        console.print()
        show_table(console, table, gap)
        console.print()
        print_fields(console, [*notes, ("details", str(folder / CHECK))])
        show_text(console, results["verdict"], "bold")


def _merge_rows(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Merges rows with equal results if they form a whole group, otherwise by number of partitions, if at all."""
    for group in _group_rows(
        rows, lambda row: (row.variant.schedule, row.variant.executor == "pytorch", *_outcome_key(row))
    ):
        if _is_whole(group, rows):
            yield group
            continue
        for part in _group_rows(group, lambda row: (row.variant.partitions,)):
            yield from [part] if _is_whole(part, rows) else [[row] for row in part]


def _group_rows(rows: Sequence[Row], key: Callable[[Row], tuple[object, ...]]) -> Iterable[list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.values()


def _is_whole(group: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether a group has all rows of its kinds except references, which have separate lines."""
    excluded = {"reference", "within tolerance"} - {group[0].verdict}
    return len(group) == sum(row.verdict not in excluded for row in _rows_of_same_kinds(group, rows))


def _rows_of_same_kinds(group: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows of any schedule, partitions, recompute mode and executor that are in the group."""
    kinds = [set(values) for values in zip(*(row.variant for row in group), strict=True)]
    return [row for row in rows if all(map(set.__contains__, kinds, row.variant))]


def _outcome_key(row: Row) -> tuple[object, ...]:
    if row.verdict == "within tolerance":
        return row.verdict, f"{row.difference:.1e}"
    return row.verdict, row.layer, row.text


def _cells(group: Sequence[Row], rows: Sequence[Row]) -> tuple[str, ...]:
    variants = [row.variant for row in group]
    modes = [mode for mode in reversed(MODES) if any(variant.recompute == mode for variant in variants)]
    executors = list(dict.fromkeys(variant.executor for variant in variants))
    result = _result(group[0])
    if len(group) > 1:
        words = "others" if len(_rows_of_same_kinds(group, rows)) > len(group) else f"of {len(group)}"
        result += f" ({len(group)} {words})"
    return (
        ", ".join(join_ranges(sorted({variant.partitions for variant in variants}), "..")),
        variants[0].schedule,
        "all three" if len(modes) == len(MODES) else ", ".join(modes),
        "both" if len(executors) > 1 else executors[0],
        result,
    )


def _result(row: Row) -> str:
    value = "" if row.difference is None or (row.layer and row.text) else f" ({row.difference:.1e})"
    where = "" if row.layer is None else f" in layer {row.layer}"
    return f"{row.verdict}{where}{value}"
