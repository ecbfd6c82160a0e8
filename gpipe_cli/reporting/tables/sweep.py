"""The tables of sweeps: of trainings; and of measurements, as the paper's tables 2 and 3, in bench.json and bench.csv.

Rows of a table of `gpipe bench -m` differ only in what it varies. What was resolved for each cell and differs too
(threads, executor, whether stages shared a device) is shown. All of it is measured.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.plots.timeline_values import SHARES, idle
from gpipe_cli.reporting.run.lines import show_facts, show_text
from gpipe_cli.reporting.run.measurement import StepMedians
from gpipe_cli.reporting.run.step_breakdown import measured_breakdown
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import SYMBOLS, Column, Table, show_table, to_csv
from gpipe_cli.results.files import flattened, value_of, write_result
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration, operations, percent, perplexity, rate, size

INTERRUPTED = 130  # an exit code
JSON, CSV = "bench.json", "bench.csv"
AUTO = "auto"  # the value of a setting that is to be chosen
HOPELESS = ("impossible", "out_of_memory")  # results, too: another round would end in the same way
_ENDS = {0: "measured", 2: "impossible", -9: "out_of_memory", INTERRUPTED: "interrupted"}  # by exit code
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|not enough memory|MemoryError|std::bad_alloc"
    r"|killed by signal 9\b"
)
# Settings that say where or how long, and not what.
_NOT_COMPARED = ("output", "run_folder", "resume", "max_restarts", "max_steps", "epochs", "dry_run")
_SHORT = ("devices", "executor", "threads", "kind")  # resolved, and shown as columns; all else as lines

Row = Mapping[str, Any]  # of bench.json


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    differs: str  # `micro_batches=4`
    folder: Path
    exit_code: int
    seconds: float
    result: dict[str, Any]  # the run's result.json, empty if it wrote none
    number: int = 1  # within the sweep; the first is 1
    round: int = 1  # likewise
    settings: dict[str, Any] = field(default_factory=dict)  # those that differ
    error: str = ""  # one line, if it failed

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def status(self) -> str:
        if self.exit_code == INTERRUPTED:
            return "interrupted"
        return f"failed ({self.exit_code})" if self.failed else str(self.result.get("status", "completed"))


def show_sweep(runs: Sequence[Run]) -> None:
    """Prints a row for each run, and the errors of those that failed."""
    runs = sorted(runs, key=lambda run: run.number)

    # A sweep over images and text has the columns of both.
    kinds = {_is_text(run.result) for run in runs if run.result}
    images, text = kinds != {True}, True in kinds
    numbers: tuple[tuple[bool, str, Callable[[dict[str, Any]], str]], ...] = (
        (images, "top-1", lambda result: percent(value_of(result, "test", "top1"))),
        (text, "perplexity", lambda result: perplexity(value_of(result, "test", "perplexity"))),
        (images, "samples/s", lambda result: rate(result.get("samples_per_second"))),
        (text, "tokens/s", lambda result: rate(result.get("tokens_per_second"))),
        (True, "step", lambda result: duration(result["step_seconds"]) if result.get("step_seconds") else "-"),
    )
    # a run that was refused wrote nothing: the microseconds until then say nothing
    times = ["-" if run.failed and not run.result else duration(run.seconds) for run in runs]
    cuts = {key: [_cut(run, key) for run in runs] for key in SYMBOLS}
    # K and M have columns, which tell all if nothing else differs
    other = [
        run
        for at, run in enumerate(runs)
        if not run.settings or any(key not in cuts or cuts[key][at] != value for key, value in run.settings.items())
    ]
    columns = (
        Column("run", cells=[str(run.number) for run in runs], number=True),
        *(
            Column(SYMBOLS[key], cells=[_shown(value) for value in values], number=True)
            for key, values in cuts.items()
            if any(value is not None for value in values)
        ),
        *([] if not other else [Column("what differs", cells=[run.differs for run in runs])]),
        Column("status", cells=[run.status for run in runs]),
        *(
            Column(heading, cells=[cell(run.result) for run in runs], number=True)
            for shown, heading, cell in numbers
            if shown
        ),
        Column("time", cells=times, number=True),
    )
    console = Console()
    folder = runs[0].folder.parent
    console.rule(Text(f"sweep {folder}"), align="left")
    names = 1 + next(at for at, column in enumerate(columns) if column.heading == "status")
    show_table(console, Table("", columns, names), elsewhere=f"gpipe compare {shlex.quote(str(folder))} format=csv")
    for run in runs:
        if run.failed and run.error:
            show_text(console, f"run {run.number}: {run.error}")


def _cut(run: Run, key: str) -> Any:
    """K or M of a run: as it was resolved, or of one that left no result, as it was asked for; None if it was not."""
    known = value_of(run.result, "config", key)
    return run.settings.get(key) if known is None else known


def _shown(value: Any) -> str:
    return "-" if value is None else show(value)


def show_rest(planned: int, runs: Sequence[Run], go_on_with: str) -> None:
    """What a sweep has left to do, and by which command; nothing if there is none."""
    left = planned - len(runs)
    if left > 0 or any(run.failed for run in runs):
        rest = f"{left} of {planned} not run; " if left > 0 else ""
        Console().print(Text(f"{rest}go on with  {go_on_with}"), soft_wrap=True)


def bench_status(run: Run) -> str:
    """measured | impossible | out_of_memory | failed | interrupted."""
    return _ENDS.get(run.exit_code) or ("out_of_memory" if _NO_MEMORY.search(run.error) else "failed")


def bench_table(runs: Sequence[Run], rounds: int) -> dict[str, Any]:
    """What bench.json holds, of the runs that there are; those of a cell have one number."""
    cells = [list(cell) for _, cell in groupby(sorted(runs, key=attrgetter("number")), attrgetter("number"))]
    measured = [[run for run in cell if bench_status(run) == "measured"] for cell in cells]
    first = next(filter(None, measured), [])
    varies = list(dict.fromkeys(key for cell in cells for key in cell[0].settings))
    auto = [key for key in varies if any(cell[0].settings.get(key) == AUTO for cell in cells)]
    resolved = _differing(measured, {*varies} - {*auto}, auto)
    rows = [
        _row(cell, known, first) | {"resolved": own} for cell, known, own in zip(cells, measured, resolved, strict=True)
    ]
    return {"varies": varies, "rounds": rounds, "rows": rows}


def write_bench(folder: Path, table: Mapping[str, Any]) -> None:
    """bench.json, and bench.csv with what is one number."""
    write_result(folder, table, JSON)
    lines = [_line(row, table["varies"]) for row in table["rows"]]
    keys = dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line)  # of text most
    columns = [Column(key, values=[line.get(key) for line in lines]) for key in keys]
    write_whole(folder / CSV, to_csv(Table(CSV, columns)))


def show_bench(console: Console, table: Mapping[str, Any], folder: Path) -> None:
    """Shows the rows of a table as bench.json has them."""
    rows, varies = table["rows"], table["varies"]
    console.rule(Text(f"sweep {folder}"), align="left")
    columns = [
        Column(heading, cells=cells, number=all(cell == "-" or cell[:1].isdigit() for cell in cells))
        for heading, cells in _columns(rows, varies)
    ]
    show_table(console, Table("", columns, len(_naming(varies)) + 1), elsewhere=CSV)
    console.print()
    reasons: dict[str, list[str]] = {}  # what became of cells that were not measured -> which ones
    for number, row in enumerate(rows, start=1):
        if row["reason"]:
            name = ", ".join(f"{SYMBOLS.get(key, key)} = {show(value)}" for key, value in row["settings"].items())
            name = name or f"run {number}"  # of a sweep over one value nothing differs
            reasons.setdefault(f"{row['status'].replace('_', ' ')}: {row['reason']}", []).append(name)
    for why, names in reasons.items():
        show_text(console, f"{'; '.join(names)}: {why}")
    show_facts(console, _notes(rows, varies))
    show_facts(console, [("written to", f"{folder / JSON}, {CSV}")])


def _row(cell: Sequence[Run], measured: Sequence[Run], first: Sequence[Run]) -> dict[str, Any]:
    """A row of the runs of one cell, one for each round; numbers are medians over those that were measured, and
    compared with the first cell of which some were."""
    statuses = {bench_status(run): run for run in reversed(cell)}
    order = ("failed", "out_of_memory", "impossible", "measured", "interrupted")
    status = next(status for status in order if status in statuses)
    results = [run.result for run in measured]
    speed = [_rate(result) for result in results]
    medians = StepMedians(warm_up_steps=0)
    for result in results:
        if (breakdown := value_of(result, "breakdown", "measured")) is not None:
            medians.add(breakdown)
    shares = measured_breakdown(medians)

    def middle(key: str) -> float | None:
        return _median(result.get(key) for result in results)

    def each(key: str, combine: Callable[[Iterable[Any]], Any]) -> list[Any] | None:
        """Entry by entry; of those with another number of stages than the first (partitions=auto) nothing."""
        known = [values for result in results if (values := result.get(key))]
        alike = [values for values in known if len(values) == len(known[0])]
        return [combine(entries) for entries in zip(*alike, strict=True)] if known else None

    units = ["samples_per_second", "tokens_per_second"] if any(map(_is_text, results)) else ["samples_per_second"]
    speeds: dict[str, Any] = {}
    for key in units:
        speeds |= {key: middle(key), f"{key}_quartiles": each(f"{key}_quartiles", median)}
    return {
        "settings": dict(cell[0].settings),
        **{key: _cut((*measured, cell[0])[0], key) for key in SYMBOLS},
        "status": status,
        "reason": (statuses[status].error or None) if status not in ("measured", "interrupted") else None,
        **speeds,
        "rounds_measured": len(results),
        "range_over_rounds": [min(speed), max(speed)] if speed else None,  # samples, or of text tokens, a second
        "relative": _relative(measured, first),
        "step_seconds": middle("step_seconds"),
        "breakdown": shares,
        "idle": None if shares is None else idle(shares),
        "bubble": None if shares is None else shares["bubble"],
        "ideal_bubble": middle("ideal_bubble"),
        "memory_bytes": each("memory_bytes", max),
        "activation_bytes": each("activation_bytes", max),
        "model_flops_per_second": middle("model_flops_per_second"),
        "mfu": middle("mfu"),
        "without_core": max((share for one in results if (share := one.get("without_core")) is not None), default=None),
        "kind": max((str(result.get("samples_per_second_kind")) for result in results), default=None),
        "executor": results[0].get("executor") if results else None,
        "threads": value_of(results[0], "hardware", "threads_per_process") if results else None,
        "folders": [run.folder.name for run in cell if run.result],  # beside bench.json
    }


def _line(row: Row, varies: Sequence[str]) -> dict[str, Any]:
    """A row as bench.csv has it; what was resolved after what was measured."""
    apart = ("settings", "breakdown", "resolved", "folders", *(key for key in SYMBOLS if key in varies))
    values = {key: value for key, value in row.items() if key not in apart}
    values |= {f"breakdown_{name}": (row["breakdown"] or {}).get(name) for name in SHARES}
    values |= {key: value for key, value in row["resolved"].items() if key not in values}
    line = {key: row["settings"].get(key) for key in varies}
    for key, value in values.items():
        name = f"{key}_resolved" if key in varies else key
        line[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return line


def _relative(cell: Sequence[Run], first: Sequence[Run]) -> float | None:
    """How many times as fast as the first measured row: the median over rounds, each compared within itself."""
    if any(_is_text(run.result) for run in cell) != any(_is_text(run.result) for run in first):
        return None
    base = {run.round: _rate(run.result) for run in first}
    return _median(_rate(run.result) / base[run.round] for run in cell if base.get(run.round))


def _differing(cells: Sequence[Sequence[Run]], asked: set[str], auto: Sequence[str]) -> list[dict[str, Any]]:
    """For each row what differs between rows and was not asked for; and what the settings in `auto` became there."""
    flat = [_flat(cell[0].result) if cell else {} for cell in cells]
    known = [row for row in flat if row]
    asked = {*asked, *_NOT_COMPARED}

    def kept(key: str) -> bool:
        if any(key == one or key.startswith(f"{one}.") for one in asked):
            return False
        chosen = key in auto and any(row.get(key) != AUTO for row in known)
        return chosen or any(row.get(key) != known[0].get(key) for row in known)

    keys = [key for key in dict.fromkeys(key for row in known for key in row) if kept(key)]
    return [{key: row.get(key) for key in keys} if row else {} for row in flat]


def _flat(result: Row) -> dict[str, Any]:
    """The settings of a run by their dotted keys, and what the run made of them."""
    return dict(flattened(result.get("config") or {})) | {
        "devices": len({partition.get("device") for partition in result.get("partitions") or []}),
        "executor": result.get("executor"),
        "threads": value_of(result, "hardware", "threads_per_process"),
        "kind": result.get("samples_per_second_kind"),
    }


def _is_text(result: Row) -> bool:
    return bool(result.get("task", "classification") != "classification")


def _rate(result: Row) -> float:
    """Samples, or of text tokens, a second: every measured run has one."""
    rate = result.get("tokens_per_second" if _is_text(result) else "samples_per_second")
    assert isinstance(rate, float), result.get("status")
    return rate


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _columns(rows: Sequence[Row], varies: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Headings and cells: what is varied and the status name a row; then what was measured."""

    def asked(row: Row, key: str) -> str:
        """`4`; of what was to be chosen also what was: `auto: 4`."""
        value, chosen = row["settings"].get(key), row["resolved"].get(key, AUTO)
        return f"{value}: {show(chosen)}" if value == AUTO != chosen else show(value)

    def spread(ends: Sequence[float] | None) -> str:
        """`221.0 to 233.4`: over the steps of one round, or over rounds."""
        return "-" if ends is None else f"{rate(ends[0])} to {rate(ends[1])}"

    def numbers(key: str, form: Callable[[Any], str]) -> list[str]:
        return ["-" if row[key] is None else form(row[key]) for row in rows]

    for key in _naming(varies):
        cells = [asked(row, key) for row in rows] if key in varies else [_shown(row[key]) for row in rows]
        yield SYMBOLS.get(key, key), cells
    yield "status", [row["status"].replace("_", " ") for row in rows]
    # Rows of text are compared by their tokens: samples are sentences there, which differ in length.
    tokens = [row.get("tokens_per_second") for row in rows]
    samples = [None if "tokens_per_second" in row else row["samples_per_second"] for row in rows]
    if any(tokens):
        yield "tokens/s", [*map(rate, tokens)]
    if any(samples) or not any(tokens):
        yield "samples/s", [*map(rate, samples)]
    if any(row["rounds_measured"] > 1 for row in rows):
        yield "range", numbers("range_over_rounds", spread)
    else:
        both = ("tokens_per_second_quartiles", "samples_per_second_quartiles")
        yield "quartiles", [spread(next(row[key] for key in both if key in row)) for row in rows]
    yield "relative", numbers("relative", "{:.2f}".format)
    yield "step", numbers("step_seconds", duration)
    yield "bubble", numbers("bubble", percent)
    yield "memory", numbers("memory_bytes", lambda held: size(max(held)))
    yield "activations", numbers("activation_bytes", lambda held: size(max(held)))
    yield "FLOP/s", numbers("model_flops_per_second", operations)
    if any(row["mfu"] is not None for row in rows):
        yield "MFU", numbers("mfu", percent)
    for key in _SHORT:  # differs though the table does not vary it
        if key not in varies and any(key in row["resolved"] for row in rows):
            yield key, [show(row["resolved"].get(key, "-")) for row in rows]


def _naming(varies: Sequence[str]) -> list[str]:
    """The settings that have columns: K and M whether they are varied or not, for tables to be read alone."""
    return [*SYMBOLS, *(key for key in varies if key not in SYMBOLS)]


def _notes(rows: Sequence[Row], varies: Sequence[str]) -> Iterator[tuple[str, str]]:
    measured = [row for row in rows if row["status"] == "measured"]
    kinds = {row["kind"] for row in measured}
    if len(kinds) == 1:
        shares = (share for row in measured if (share := row["without_core"]) is not None)
        yield "speed", speed_kind(kinds.pop(), max(shares, default=None))
    if measured:
        yield "memory", "peak of the fullest stage: its process's, on a GPU the allocator's"
        yield "activations", "of the fullest stage, counted; bubble measured"
    for key in dict.fromkeys(key for row in rows for key in row["resolved"] if key not in (*_SHORT, *_naming(varies))):
        values = [show(row["resolved"].get(key, "-")) for row in rows]
        yield "differs too", f"{key}: {', '.join(values)}"
    if not measured and any(row["status"] in HOPELESS for row in rows):
        yield "", "nothing was measured"
