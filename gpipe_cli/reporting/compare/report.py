"""What `gpipe compare` prints: a table, and notes about it.

Each run is a row, as in the paper's tables 2 and 5. Notes say which numbers cannot be compared: the paper states the
hardware of its tables 2 and 3 and the data sets of table 4, but the runs compared here may differ in these.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from rich.console import Console

from gpipe_cli.errors import format_value
from gpipe_cli.reporting.compare.comparison import Comparison, join_words
from gpipe_cli.reporting.compare.run_record import RunRecord, first_difference, same_curves
from gpipe_cli.reporting.run.lines import print_fields, show_line
from gpipe_cli.reporting.run.summary import results_depend_on_threads
from gpipe_cli.reporting.tables.table import SYMBOLS, Column, Table, show_table
from gpipe_cli.results.metrics import METRICS, SHARE, TRAIN_LOSS, Metric
from gpipe_cli.units import plural

COMPLETED = "completed"


def show_comparison(console: Console, comparison: Comparison) -> None:
    count = len(comparison.runs)
    completed = all(run.result.status == COMPLETED for run in comparison.runs)
    show_line(console, f"{plural(count, 'run')}{f', {COMPLETED}' if completed else ''}", "bold")
    if count == 2:
        _show_two(console, comparison)
    else:
        _show_rows(console, comparison, completed)
    console.print()
    if over_seeds := deviations(comparison):
        spread = (f"{METRICS[key].name} {both} {unit}".removesuffix(" /s") for key, (both, unit) in over_seeds.items())
        print_fields(console, [("over seeds", f"mean +- deviation: {', '.join(spread)}".replace("±", "+-"))])
    print_fields(console, [("note", note) for note in (*notes(comparison), *same_curve_notes(comparison))])
    if with_curves := [run.folder.resolve() for run in comparison.runs if run.curves]:
        print_fields(console, [("curves", f"tensorboard --logdir {shlex.quote(os.path.commonpath(with_curves))}")])


def _show_rows(console: Console, comparison: Comparison, completed: bool) -> None:
    """A row for each run; `completed`: all are completed, which needs no column."""
    count = len(comparison.runs)
    number = Column("run", cells=[str(number + 1) for number in range(count)], number=True)
    results = [column for column in comparison.results if column.key != "status" or not completed]
    # if there are too many settings to name a run, its name is followed by only K and M
    naming = len(comparison.settings) if comparison.by_settings else len(SYMBOLS)
    named = [] if comparison.by_settings else [Column("name", cells=comparison.names)]
    leading = [number, *named, *comparison.settings[:naming]]
    columns = [*leading, *results, *comparison.settings[naming:]]
    show_table(console, Table("", columns, len(leading)), gap=1, elsewhere="format=csv", piped=120)


def _show_two(console: Console, comparison: Comparison) -> None:
    """A row for each setting, result and fact in which two runs differ; the measures that are the same in a line."""
    rows: list[tuple[str, ...]] = []
    same: list[str] = []
    for column in comparison.columns:
        if column.key in ("dataset", "folder"):  # as dataset.name, and as the headings
            continue
        first, second = column.plain_values
        metric = METRICS.get(column.key)
        cells = list(map(metric.format, (first, second))) if metric else column.cells
        name = metric.name if metric else column.key or column.heading
        if (first, *cells[:1]) != (second, *cells[1:]):
            rows.append((name, *cells, _difference(metric, first, second)))
        elif metric and first is not None:
            same.append(f"{name} {cells[0]}")
    numbers = [Column(heading, number=True) for heading in (*comparison.names, "difference")]
    show_table(console, Table.of_rows("", [Column("differs"), *numbers], rows))
    console.print()
    print_fields(console, [("the same", ", ".join(same))] if same else [])


def _difference(metric: Metric | None, first: Any, second: Any) -> str:
    """The second value of a measure minus the first: in points for shares, otherwise relative to the first."""
    if metric is None or None in (first, second):
        return ""
    if metric.unit is SHARE:
        return f"{100 * (second - first):+.2f} points"
    return f"{100 * (second / first - 1):+.1f} %" if first else ""


def deviations(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """For runs that differ only in their seeds: measure -> `97.5 ± 0.3`, mean and standard deviation, and the unit."""
    if [column.key for column in comparison.settings if len(set(map(str, column.plain_values))) > 1] != ["seed"]:
        return {}
    spread = {}
    for column in comparison.results:
        numbers = column.plain_values
        if column.key in METRICS and column.printed and None not in numbers and len(set(numbers)) > 1:
            unit, bare = METRICS[column.key].unit.scale(numbers)
            spread[column.key] = f"{bare(mean(numbers))} ± {bare(stdev(numbers))}", unit
    return spread


def all_columns(comparison: Comparison, *, with_deviations: bool = False) -> Table:
    """The comparison for programs, in the units of result.json; or for people, with a last row of `deviations`."""
    columns = [Column("run", cells=comparison.names), *comparison.columns]
    if with_deviations and (over_seeds := deviations(comparison)):
        last = ["mean ± deviation", *(over_seeds.get(column.key, [""])[0] for column in comparison.columns)]
        columns = [replace(c, cells=[*c.cells, cell], values=None) for c, cell in zip(columns, last, strict=True)]
    return Table("", columns)


def notes(comparison: Comparison) -> Iterator[str]:
    """Sentences about runs that were not completed, and about numbers that cannot be compared."""
    results = [run.result for run in comparison.runs]
    for position, run in enumerate(comparison.runs):
        if run.result.status == "failed":
            yield f"{comparison.refer_to([position])} failed: {run.error}"
    for status, meaning in (
        ("interrupted", "interrupted, so not trained to the end"),
        ("running", "running: still in progress, or killed; its numbers are from its last evaluation"),
        ("dry_run", "a dry run: nothing was trained"),
    ):
        yield from _note_with_runs(comparison, meaning, [result.status == status for result in results])
    score, unit = ("perplexity", "tokens/s") if results[0].text else ("top-1", "samples/s")
    same_task = len({result.task for result in results}) == 1
    for what, consequence, values in (
        ("tasks", "top-1 and perplexity cannot be compared, nor samples/s with tokens/s",
         [result.task for result in results]),
        ("data sets", f"{score} comes from different test sets and cannot be compared",
         [_data(run) for run in comparison.runs if same_task]),
        ("models", f"{unit}, step, memory and FLOP/s compare the models, not the pipelines",
         [result.model for result in results]),
        ("machines", "speed, step, bubble and memory cannot be compared across them",
         [run.machine for run in comparison.runs]),
        ("numbers of threads per process", results_depend_on_threads(results) or "speeds depend on it",
         [result.threads for result in results]),
        ("versions of torch", "speeds depend on it", [result.versions.get("torch") for result in results]),
    ):  # fmt: skip
        if which := _different(comparison, values):
            yield f"different {what} ({which}): {consequence}"
    if len({result.command for result in results}) > 1:
        yield "runs of gpipe bench are not evaluated: they have a speed and no accuracy"
    for kind, meaning in (
        ("measured_one_device", "one device: stages shared a device or cores"),
        ("measured_contended", "contended: times are inflated by other programs"),
    ):
        of_kind = [result.samples_per_second_kind == kind for result in results]
        yield from _note_with_runs(comparison, f"{meaning} ({kind}); not the speed of a pipeline", of_kind)
    warm_up = "too short to measure a speed; the speed of its warm-up steps is shown"
    yield from _note_with_runs(comparison, warm_up, [result.speed_includes_warm_up for result in results])


def same_curve_notes(comparison: Comparison) -> list[str]:
    """`train/loss is identical to the last bit: A, B, C`, for each group of runs; for two, also where they differ."""
    curves = [run.curves.get(TRAIN_LOSS) for run in comparison.runs]
    same = same_curves(curves)
    apart = first_difference(*curves) if len(curves) == 2 and not same else None
    differs = [] if apart is None else [f"{TRAIN_LOSS} differs from step {apart:,} on"]
    return differs + [f"{TRAIN_LOSS} is identical to the last bit: {comparison.refer_to(group)}" for group in same]


def _note_with_runs(comparison: Comparison, sentence: str, truths: Sequence[bool]) -> Iterator[str]:
    """The sentence, followed by the runs for which it is true; nothing if there are none."""
    if any(truths):
        yield f"{sentence}: {comparison.refer_to([position for position, holds in enumerate(truths) if holds])}"


def _different(comparison: Comparison, values: Sequence[object]) -> str:
    """`digits: runs 1 to 3; cifar10: run 4`; without the runs for more than three values; "" if all have the same."""
    positions: dict[str, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(str(value), []).append(position)
    if len(positions) < 2:
        return ""
    if len(positions) > 3:
        return join_words(list(positions))
    return "; ".join(f"{value}: {comparison.refer_to(group)}" for value, group in positions.items())


def _data(run: RunRecord) -> str:
    classes = run.settings.get("dataset.classes")
    return f"{run.result.dataset}{'' if classes is None else f' {format_value(classes)}'}"
