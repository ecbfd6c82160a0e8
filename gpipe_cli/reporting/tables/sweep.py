"""Tables of sweeps: of trainings, and of measurements (`gpipe bench -m`), which are kept in bench.json and bench.csv.

Tables of measurements, like the paper's tables 2 and 3, vary some settings and fix all others. Values that differ
without being varied (threads, executor, whether stages shared a device) are shown. All numbers are measured.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import flatten, settings_not_affecting
from gpipe_cli.errors import BAD_INPUT, INTERRUPTED, SIGPIPE_EXIT, STOPPED, format_value
from gpipe_cli.reporting.plots.timeline_values import SHARES, idle_share
from gpipe_cli.reporting.run.lines import print_fields, show_text
from gpipe_cli.reporting.run.measurement import StepMedians
from gpipe_cli.reporting.run.step_breakdown import measured_breakdown
from gpipe_cli.reporting.run.summary import describe_speed_kind, results_depend_on_threads
from gpipe_cli.reporting.tables.table import NONE, SYMBOLS, Column, Table, show_table, to_csv
from gpipe_cli.results.bench import BENCH_CSV_FILE, BENCH_FILE, BenchRow, BenchTable
from gpipe_cli.results.dict_conversion import to_dict
from gpipe_cli.results.files import write_result
from gpipe_cli.results.metrics import METRICS, Metric, select_metrics
from gpipe_cli.results.run import RunResult
from gpipe_cli.system.files import write_atomic

SAMPLES, TOKENS = select_metrics("samples_per_second", "tokens_per_second")
_MEASURED = (
    "relative", "step_seconds", "bubble_measured", "memory_bytes_fullest", "activation_bytes_fullest",
    "model_flops_per_second",
)  # fmt: skip
AUTO = "auto"  # the value of a setting that gpipe chooses
NOT_RETRYABLE = ("impossible", "out_of_memory")  # another round would end in the same way
_ENDS = {0: "measured", BAD_INPUT: "impossible", -9: "out_of_memory", INTERRUPTED: "interrupted"}  # exit code -> status
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|not enough memory|MemoryError|std::bad_alloc"
    r"|killed by signal 9\b"
)
_SHORT = ("devices", "executor", "threads", "kind")  # resolved values shown as columns; all others are lines below


@dataclass(frozen=True)
class Run:
    """A run of a sweep, as sweep.json records it; of several with the same `run` and `round`, the last counts."""

    run: int  # number of its cell within the sweep; the first is 1, the baseline of measurements 0
    round: int  # the first is 1
    name: str  # the settings that differ: `micro_batches=4`
    folder: str  # its name within the sweep's folder
    exit_code: int | None = None  # None: it has not ended, or the sweep was killed before it did
    seconds: float = 0.0
    error: str = ""  # one line, if it failed
    settings: dict[str, Any] = field(default_factory=dict)  # as in `name`; neither is in sweep.json
    result: RunResult | None = None  # None: the run wrote none

    @property
    def key(self) -> tuple[int, int]:
        return self.run, self.round

    @property
    def is_complete(self) -> bool:
        return self.result is not None and self.result.status in ("completed", "dry_run")

    @property
    def effective_code(self) -> int:
        """Its exit code; 0 even if it was interrupted while it drew pictures, INTERRUPTED for all that ends early."""
        if self.is_complete:
            return 0
        if self.exit_code is None or self.exit_code in (STOPPED, SIGPIPE_EXIT):
            return INTERRUPTED
        return self.exit_code

    @property
    def refused(self) -> bool:
        """Whether its settings are impossible together; the run did not begin."""
        return self.effective_code == BAD_INPUT and self.result is None

    @property
    def failed(self) -> bool:
        return self.effective_code != 0 and not self.refused

    @property
    def status(self) -> str:
        if self.effective_code == INTERRUPTED:
            return "interrupted"
        if self.refused:
            return "impossible"
        return f"failed ({self.effective_code})" if self.failed else self.result.status if self.result else "completed"


def show_sweep(folder: Path, runs: Sequence[Run]) -> None:
    """Prints a row for each run, the errors of those that failed, and the command that compares those with a result."""
    runs = sorted(runs, key=lambda run: run.run)
    # A sweep over images and text has the columns of both. Text has tokens/s, as its samples differ in length.
    texts = {run.result.text for run in runs if run.result} or {False}
    measures = select_metrics("validation_top1", "test_top1", "samples_per_second") if False in texts else []
    measures += select_metrics("validation_perplexity", "test_perplexity", "tokens_per_second") if True in texts else []
    chosen_by = any(run.result.validation for run in runs if run.result)
    measures = [metric for metric in measures if chosen_by or not metric.key.startswith("validation")]
    cuts = {key: [_cut_value(run, key) for run in runs] for key in SYMBOLS}
    columns = [Column("run", cells=[str(run.run) for run in runs], number=True)]
    columns += [
        Column(SYMBOLS[key], cells=[_format_cell(value) for value in values], number=True)
        for key, values in cuts.items()
        if any(value is not None for value in values)
    ]
    # K and M have columns, which suffice if nothing else differs
    if any(
        not run.settings or any(key not in cuts or cuts[key][at] != value for key, value in run.settings.items())
        for at, run in enumerate(runs)
    ):
        columns.append(Column("what differs", cells=[run.name for run in runs]))
    columns.append(Column("status", cells=[run.status for run in runs]))
    names = len(columns)
    columns += [
        Column.of_measure(metric, [metric.value(run.result) for run in runs])
        for metric in (*measures, METRICS["step_seconds"])
    ]
    kinds = [run.result.samples_per_second_kind if run.result else None for run in runs]
    if any(kind not in (None, "measured") for kind in kinds):
        columns.append(Column("speed", cells=[NONE if kind is None else kind for kind in kinds]))
    results = [run.result for run in runs if run.result]
    if by_threads := results_depend_on_threads(results):
        threads = [run.result and run.result.threads for run in runs]
        columns.append(Column("threads", cells=list(map(_format_cell, threads)), number=True))
    # a refused run wrote no result, and the microseconds until then mean nothing
    seconds = METRICS["seconds"]
    columns.append(Column.of_measure(seconds, [seconds.value(run.result) for run in runs]))
    console = Console()
    console.rule(Text(f"sweep {folder}"), align="left")
    show_table(console, Table("", columns, names), elsewhere=f"gpipe compare {shlex.quote(str(folder))} format=csv")
    for run in runs:
        if run.error:
            show_text(console, f"run {run.run}: {run.error}")
    if by_threads:
        print_fields(console, [("threads", f"different numbers per process: {by_threads}")])
    if len(results) > 1:
        print_fields(console, [("compare", f"gpipe compare {shlex.quote(str(folder))}")])


def _cut_value(run: Run, key: str) -> Any:
    """K or M of a run: the resolved value, or without a result the requested value; None if none was requested."""
    resolved = run.result.config.get(key) if run.result else None
    return run.settings.get(key) if resolved is None else resolved


def _format_cell(value: Any) -> str:
    return "-" if value is None else format_value(value)


def bench_status(run: Run) -> str:
    """The status of a row: measured | impossible | out_of_memory | failed | interrupted."""
    return _ENDS.get(run.effective_code) or ("out_of_memory" if _NO_MEMORY.search(run.error) else "failed")


def bench_table(runs: Sequence[Run], rounds: int, baseline: int | None = None) -> BenchTable:
    """The content of bench.json for the runs so far; runs with the same number are the rounds of one cell. `baseline`:
    the number of the cell whose speed is 1 for the others; None: the first that was measured."""
    cells = [list(cell) for _, cell in groupby(sorted(runs, key=attrgetter("run")), attrgetter("run"))]
    measured = [[run for run in cell if run.result and bench_status(run) == "measured"] for cell in cells]
    numbers = [cell[0].run for cell in cells]
    first = next((runs for n, runs in zip(numbers, measured, strict=True) if runs and baseline in (None, n)), [])
    varies = list(dict.fromkeys(key for cell in cells for key in cell[0].settings))
    auto = [key for key in varies if any(cell[0].settings.get(key) == AUTO for cell in cells)]
    resolved = _differing_values(measured, {*varies} - {*auto}, auto)
    rows = (
        replace(_row(cell, medians, first, differing), baseline=baseline == cell[0].run)
        for cell, medians, differing in zip(cells, measured, resolved, strict=True)
    )
    return BenchTable(tuple(varies), rounds, tuple(rows))


def write_bench(folder: Path, table: BenchTable) -> None:
    """Writes bench.json, and bench.csv with a flat row per cell. Raises OSError."""
    tree = table._asdict() | {"rows": [to_dict(row, row.text) for row in table.rows]}
    write_result(folder, tree, BENCH_FILE)
    lines = [_line(row, table.varies) for row in table.rows]
    keys = dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line)  # the longest row first
    columns = [Column(key, values=[line.get(key) for line in lines]) for key in keys]
    write_atomic(folder / BENCH_CSV_FILE, to_csv(Table(BENCH_CSV_FILE, columns)))


def show_bench(console: Console, table: BenchTable, folder: Path) -> None:
    """Shows the rows, why cells were not measured, notes, and where the files are."""
    rows, varies = table.rows, table.varies
    console.rule(Text(f"sweep {folder}"), align="left")
    show_table(
        console, Table("", list(_columns(rows, varies)), len(_naming_settings(varies)) + 1), elsewhere=BENCH_CSV_FILE
    )
    console.print()
    reasons: dict[str, list[str]] = {}  # why cells were not measured -> their names
    for number, row in enumerate(rows, start=1):
        if row.reason:
            name = ", ".join(f"{SYMBOLS.get(key, key)} = {format_value(value)}" for key, value in row.settings.items())
            name = name or f"run {number}"  # in a sweep over a single value nothing differs
            reasons.setdefault(f"{row.status.replace('_', ' ')}: {row.reason}", []).append(name)
    for why, names in reasons.items():
        show_text(console, f"{'; '.join(names)}: {why}")
    print_fields(console, _notes(rows, varies))
    print_fields(console, [("written to", f"{folder / BENCH_FILE}, {BENCH_CSV_FILE}")])


def _row(cell: Sequence[Run], measured: Sequence[Run], first: Sequence[Run], resolved: dict[str, Any]) -> BenchRow:
    """The row of a cell, from one run per round: medians over the `measured` runs; `first`: the baseline's runs."""
    statuses = {bench_status(run): run for run in reversed(cell)}
    order = ("failed", "out_of_memory", "impossible", "measured", "interrupted")
    status = next(status for status in order if status in statuses)
    results = [run.result for run in measured if run.result]
    speeds = [result.speed for result in results if result.speed is not None]
    medians = StepMedians(warm_up_steps=0)
    for result in results:
        medians.add(result.breakdown.measured or {})
    shares = measured_breakdown(medians)

    def median_of(key: str) -> float | None:
        return _median(getattr(result, key) for result in results)

    def combine_rounds(key: str, combine: Callable[[Iterable[Any]], Any]) -> tuple[Any, ...] | None:
        """Combines tuples of all rounds by entry, except those with another K than the first (partitions=auto)."""
        counted = [values for result in results if (values := getattr(result, key))]
        alike = [values for values in counted if len(values) == len(counted[0])]
        return tuple(combine(entries) for entries in zip(*alike, strict=True)) if counted else None

    return BenchRow(
        settings=dict(cell[0].settings),
        **{key: _cut_value((*measured, cell[0])[0], key) for key in SYMBOLS},
        status=status,
        reason=(statuses[status].error or None) if status not in ("measured", "interrupted") else None,
        samples_per_second=median_of("samples_per_second"),
        samples_per_second_quartiles=combine_rounds("samples_per_second_quartiles", median),
        rounds_measured=len(results),
        range_over_rounds=(min(speeds), max(speeds)) if speeds else None,
        relative=_relative_speed(measured, first),
        step_seconds=median_of("step_seconds"),
        breakdown=shares,
        idle=None if shares is None else idle_share(shares),
        bubble=None if shares is None else shares["bubble"],
        ideal_bubble=median_of("ideal_bubble"),
        memory_bytes=combine_rounds("memory_bytes", max),
        activation_bytes=combine_rounds("activation_bytes", max),
        model_flops_per_second=median_of("model_flops_per_second"),
        mfu=median_of("mfu"),
        cpu_starved_share=max((s for result in results if (s := result.cpu_starved_share) is not None), default=None),
        kind=max((str(result.samples_per_second_kind) for result in results), default=None),
        executor=results[0].executor if results else None,
        threads=results[0].threads if results else None,
        folders=tuple(run.folder for run in cell if run.result),
        resolved=resolved,
        tokens_per_second=median_of("tokens_per_second"),
        tokens_per_second_quartiles=combine_rounds("tokens_per_second_quartiles", median),
    )


def _line(row: BenchRow, varies: Sequence[str]) -> dict[str, Any]:
    """A row of bench.csv: varied settings, measured values, then resolved values."""
    apart = ("settings", "breakdown", "resolved", "folders", *(key for key in SYMBOLS if key in varies))
    values = {key: value for key, value in to_dict(row, row.text).items() if key not in apart}
    values |= {f"breakdown_{name}": (row.breakdown or {}).get(name) for name in SHARES}
    values |= {key: value for key, value in row.resolved.items() if key not in values}
    line = {key: row.settings.get(key) for key in varies}
    for key, value in values.items():
        name = f"{key}_resolved" if key in varies else key
        line[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return line


def _relative_speed(cell: Sequence[Run], first: Sequence[Run]) -> float | None:
    """The speed relative to the baseline's: the median of the ratios within each round."""
    if len({run.result.text for run in (*cell, *first) if run.result}) > 1:
        return None
    base = {run.round: run.result.speed for run in first if run.result}
    speeds = ((run.result.speed, base.get(run.round)) for run in cell if run.result)
    return _median(speed / other for speed, other in speeds if speed is not None and other)


def _differing_values(cells: Sequence[Sequence[Run]], asked: set[str], auto: Sequence[str]) -> list[dict[str, Any]]:
    """Per row, the values that differ between rows without being varied, and those chosen for settings in `auto`."""
    flat: list[dict[str, Any]] = []
    for cell in cells:
        result = cell[0].result if cell else None
        flat.append({} if result is None else dict(flatten(result.config)) | {
            "devices": len({partition.device for partition in result.partitions}),
            "executor": result.executor, "threads": result.threads, "kind": result.samples_per_second_kind,
        })  # fmt: skip
    rows = [row for row in flat if row]
    left_out = tuple(f"{key}." for key in (*asked, *settings_not_affecting(Affects.COMPARED | Affects.STEP)))

    def is_kept(key: str) -> bool:
        if f"{key}.".startswith(left_out):
            return False
        chosen = key in auto and any(row.get(key) != AUTO for row in rows)
        return chosen or any(row.get(key) != rows[0].get(key) for row in rows)

    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if is_kept(key)]
    return [{key: row.get(key) for key in keys} if row else {} for row in flat]


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _columns(rows: Sequence[BenchRow], varies: Sequence[str]) -> Iterator[Column]:
    """The columns that name a row, varied settings and status, then the measured values."""

    def format_setting(row: BenchRow, key: str) -> str:
        """`4`; of an automatic setting, also the value chosen: `auto: 4`."""
        value, chosen = row.settings.get(key), row.resolved.get(key, AUTO)
        return f"{value}: {format_value(chosen)}" if value == AUTO != chosen else format_value(value)

    def words(heading: str, cells: Sequence[str]) -> Column:
        return Column(heading, cells=cells, number=all(cell == "-" or cell[:1].isdigit() for cell in cells))

    def spread(heading: str, ends: Sequence[Sequence[float] | None]) -> Column:
        """`221.0 to 233.4`: over the steps of one round, or over rounds."""
        return Column.of(heading, heading, ends, lambda both: " to ".join(map(SAMPLES.format, both)))

    def number(metric: Metric) -> Column:
        # Rows of text are compared in tokens/s: their samples are sentences, which differ in length.
        return Column.of_measure(
            metric, [None if metric is SAMPLES and row.text else metric.value(row) for row in rows]
        )

    for key in _naming_settings(varies):
        cells = [format_setting(row, key) if key in varies else _format_cell(getattr(row, key)) for row in rows]
        yield words(SYMBOLS.get(key, key), cells)
    yield words("status", [row.status.replace("_", " ") for row in rows])
    tokens, samples = number(TOKENS), number(SAMPLES)
    if any(tokens.plain_values):
        yield tokens
    if any(samples.plain_values) or not any(tokens.plain_values):
        yield samples
    if any(row.rounds_measured > 1 for row in rows):
        yield spread("range", [row.range_over_rounds for row in rows])
    else:
        yield spread("quartiles", [row.quartiles for row in rows])
    yield from map(number, select_metrics(*_MEASURED))
    if any(row.mfu is not None for row in rows):
        yield number(METRICS["mfu"])
    for key in _SHORT:  # differs although the table does not vary it
        if key not in varies and any(key in row.resolved for row in rows):
            yield words(key, [format_value(row.resolved.get(key, "-")) for row in rows])


def _naming_settings(varies: Sequence[str]) -> list[str]:
    """The settings that have columns: always K and M, so that a table explains itself."""
    return [*SYMBOLS, *(key for key in varies if key not in SYMBOLS)]


def _notes(rows: Sequence[BenchRow], varies: Sequence[str]) -> Iterator[tuple[str, str]]:
    measured = [row for row in rows if row.status == "measured"]
    kinds = {row.kind for row in measured}
    if len(kinds) == 1:
        shares = (share for row in measured if (share := row.cpu_starved_share) is not None)
        yield "speed", describe_speed_kind(str(kinds.pop()), max(shares, default=None))
    for number, row in enumerate(rows, start=1):
        if row.baseline:
            which = "" if row.status == "measured" else f", which is {row.status.replace('_', ' ')}"
            yield "relative", f"to row {number}: one device, the whole mini-batch, nothing recomputed{which}"
    if measured:
        yield "memory", "peak of the fullest stage: of its process, on a GPU of PyTorch's allocator"
        yield "activations", "counted on the fullest stage; the bubble is measured"
    for key in dict.fromkeys(
        key for row in rows for key in row.resolved if key not in (*_SHORT, *_naming_settings(varies))
    ):
        values = [format_value(row.resolved.get(key, "-")) for row in rows]
        yield "also differs", f"{key}: {', '.join(values)}"
    if not measured and any(row.status in NOT_RETRYABLE for row in rows):
        yield "", "nothing was measured"
