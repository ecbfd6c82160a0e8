"""The table of `gpipe bench -m`: what the paper's tables 2 and 3 are, for any settings; bench.json, bench.csv, console.

Rows of one table differ only in what the table varies. What was resolved for each cell and differs too (threads,
executor, whether stages shared a device) is shown. All of it is measured.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.plots.timeline_values import SHARES, idle
from gpipe_cli.reporting.run.lines import show_facts, show_line
from gpipe_cli.reporting.run.result import flattened, write_result
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.sweep import INTERRUPTED, Run
from gpipe_cli.reporting.tables.table import Column, Table, show_table, to_csv
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration, operations, percent, rate, size

JSON, CSV = "bench.json", "bench.csv"
AUTO = "auto"  # the value of a setting that is to be chosen
HOPELESS = ("impossible", "out_of_memory")  # results, too: another round would end in the same way
_BAD_INPUT, _KILLED = 2, -9
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|not enough memory|MemoryError|std::bad_alloc"
    r"|killed by signal 9\b"
)
# Settings that say where or how long, and not what.
_NOT_COMPARED = ("output", "run_folder", "resume", "max_steps", "epochs", "dry_run")
_SYMBOLS = {"partitions": "K", "micro_batches": "M"}  # the paper's
_SHORT = ("devices", "executor", "threads", "kind")  # resolved, and shown as columns; all else as lines


def bench_status(run: Run) -> str:
    """measured | impossible | out_of_memory | failed | interrupted."""
    match run.exit_code:
        case 0:
            return "measured"
        case code if code == INTERRUPTED:
            return "interrupted"
        case code if code == _BAD_INPUT:
            return "impossible"
        case code if code == _KILLED or _NO_MEMORY.search(run.error):
            return "out_of_memory"
    return "failed"


def bench_table(runs: Sequence[Run], rounds: int) -> dict[str, Any]:
    """What bench.json holds, of the runs that there are; those of a cell have one number."""
    cells: dict[int, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.number, []).append(run)
    rows = [_row(cells[number]) for number in sorted(cells)]
    measured = [[run for run in cells[number] if bench_status(run) == "measured"] for number in sorted(cells)]
    first = next((cell for cell in measured if cell), [])
    varies = dict.fromkeys(key for row in rows for key in row["settings"])
    asked_auto = [key for key in varies if any(row["settings"].get(key) == AUTO for row in rows)]
    resolved = _differing(measured, [key for key in varies if key not in asked_auto], asked_auto)
    for row, cell, own in zip(rows, measured, resolved, strict=True):
        row["relative"] = _relative(cell, first)
        row["resolved"] = own
    return {"varies": list(varies), "rounds": rounds, "rows": rows}


def write_bench(folder: Path, table: Mapping[str, Any]) -> None:
    """bench.json, and bench.csv with what is one number."""
    write_result(folder, table, JSON)
    rows, varies = table["rows"], table["varies"]
    longest = max(rows, key=len)  # one of text has its tokens, too
    keys = [key for key in longest if key not in ("settings", "breakdown", "resolved", "folders")]
    resolved = [key for key in dict.fromkeys(key for row in rows for key in row["resolved"]) if key not in keys]

    def column(heading: str, values: Iterable[Any]) -> Column:
        cells = (" ".join(map(str, value)) if isinstance(value, list) else value for value in values)
        return Column(heading, values=list(cells))

    columns = [column(key, (row["settings"].get(key) for row in rows)) for key in varies]
    columns += [column(key, (row.get(key) for row in rows)) for key in keys]
    columns += [column(f"breakdown_{name}", ((row["breakdown"] or {}).get(name) for row in rows)) for name in SHARES]
    for key in resolved:
        heading = f"{key}_resolved" if key in varies else key
        columns.append(column(heading, (row["resolved"].get(key) for row in rows)))
    write_whole(folder / CSV, to_csv(Table(CSV, columns)))


def show_bench(console: Console, table: Mapping[str, Any], folder: Path) -> None:
    """Shows the rows of a table as bench.json has them."""
    rows, varies = table["rows"], table["varies"]
    console.rule(Text(f"sweep {folder}"), align="left")
    settings = list(_settings(rows, varies))
    columns = (*settings, *_speed(rows), *_memory(rows), *_resolved(rows, varies))
    show_table(console, Table("", columns), repeated=len(settings))
    console.print()
    for why, names in _reasons(rows).items():
        show_line(console, f"{'; '.join(names)}: {why}")
    show_facts(console, _notes(rows, varies))
    show_facts(console, [("written to", f"{folder / JSON}, {CSV}")])


def _row(cell: Sequence[Run]) -> dict[str, Any]:
    """A row of the runs of one cell, one for each round; numbers are medians over rounds."""
    statuses = {bench_status(run): run for run in reversed(cell)}
    order = ("failed", "out_of_memory", "impossible", "measured", "interrupted")
    status = next(status for status in order if status in statuses)
    results = [run.result for run in cell if bench_status(run) == "measured"]
    speed = [_rate(result) for result in results]
    row: dict[str, Any] = {
        "settings": dict(cell[0].settings),
        "status": status,
        "reason": (statuses[status].error or None) if status not in ("measured", "interrupted") else None,
    }
    units = ["samples_per_second", "tokens_per_second"] if _is_text(results) else ["samples_per_second"]
    for key in units:
        row[key] = _median(result.get(key) for result in results)
        row[f"{key}_quartiles"] = _each(median, [result.get(f"{key}_quartiles") for result in results])
    shares = _breakdown(results)
    without_core: list[Any] = [share for result in results if (share := result.get("without_core")) is not None]
    return row | {
        "rounds_measured": len(results),
        "range_over_rounds": [min(speed), max(speed)] if speed else None,  # samples, or of text tokens, a second
        "relative": None,
        "step_seconds": _median(result.get("step_seconds") for result in results),
        "breakdown": shares,
        "idle": None if shares is None else idle(shares),
        "bubble": None if shares is None else shares["bubble"],
        "ideal_bubble": _median(result.get("ideal_bubble") for result in results),
        "memory_bytes": _each(max, [result.get("memory_bytes") for result in results]),
        "activation_bytes": _each(max, [result.get("activation_bytes") for result in results]),
        "model_flops_per_second": _median(result.get("model_flops_per_second") for result in results),
        "mfu": _median(result.get("mfu") for result in results),
        "without_core": max(without_core, default=None),
        "kind": max((str(result.get("samples_per_second_kind")) for result in results), default=None),
        "executor": results[0].get("executor") if results else None,
        "threads": _part(results[0], "hardware", "threads_per_process") if results else None,
        "folders": [run.folder.name for run in cell if run.result],  # beside bench.json
    }


def _relative(cell: Sequence[Run], first: Sequence[Run]) -> float | None:
    """How many times as fast as the first measured row: the median over rounds, each compared within itself."""
    if _is_text([run.result for run in cell]) != _is_text([run.result for run in first]):
        return None
    base = {run.round: _rate(run.result) for run in first}
    return _median(_rate(run.result) / base[run.round] for run in cell if base.get(run.round))


def _differing(
    cells: Sequence[Sequence[Run]], varies: Sequence[str], asked_auto: Sequence[str]
) -> list[dict[str, Any]]:
    """For each row what differs between rows and is not what the table varies; and what `auto` became there."""
    flat = [_flat(cell[0].result) if cell else {} for cell in cells]
    known = [row for row in flat if row]
    keys = dict.fromkeys(key for row in known for key in row)
    asked = {*varies, *_NOT_COMPARED}

    def differs(key: str) -> bool:
        chosen = key in asked_auto and any(row.get(key) != AUTO for row in known)
        return chosen or any(row.get(key) != known[0].get(key) for row in known)

    kept = [key for key in keys if not any(key == one or key.startswith(f"{one}.") for one in asked) and differs(key)]
    return [{key: row.get(key) for key in kept} if row else {} for row in flat]


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run by their dotted keys, and what the run made of them."""
    return dict(flattened(result.get("config") or {})) | {
        "devices": len({partition.get("device") for partition in result.get("partitions") or []}),
        "executor": result.get("executor"),
        "threads": _part(result, "hardware", "threads_per_process"),
        "kind": result.get("samples_per_second_kind"),
    }


def _is_text(results: Sequence[Mapping[str, Any]]) -> bool:
    return any(result.get("task", "classification") != "classification" for result in results)


def _rate(result: Mapping[str, Any]) -> float:
    """Samples, or of text tokens, a second: every measured run has one."""
    rate = result.get("tokens_per_second" if _is_text([result]) else "samples_per_second")
    assert isinstance(rate, float), result.get("status")
    return rate


def _breakdown(results: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Medians over rounds, scaled so that together they are 1 as those of every round are."""
    known = [shares for result in results if (shares := _part(result, "breakdown", "measured"))]
    if not known:
        return None
    medians = {name: median(shares[name] for shares in known) for name in SHARES}
    total = sum(medians.values())
    return {name: value / total for name, value in medians.items()} if total > 0 else medians


def _part(result: Mapping[str, Any], key: str, inner: str) -> Any:
    group = result.get(key)
    return group.get(inner) if isinstance(group, Mapping) else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _each(combine: Any, lists: Sequence[Any]) -> list[Any] | None:
    """Entry by entry over rounds; of those with another number of stages than the first (partitions=auto) nothing."""
    known = [values for values in lists if values]
    alike = [values for values in known if len(values) == len(known[0])]
    return [combine(entries) for entries in zip(*alike, strict=True)] if known else None


def _settings(rows: Sequence[Mapping[str, Any]], varies: Sequence[str]) -> Iterator[Column]:
    def asked(row: Mapping[str, Any], key: str) -> str:
        """`4`; of what was to be chosen also what was: `auto: 4`."""
        value, chosen = row["settings"].get(key), row["resolved"].get(key, AUTO)
        return f"{value}: {show(chosen)}" if value == AUTO != chosen else show(value)

    for key in varies:
        yield _column(_symbol(key), (asked(row, key) for row in rows))
    yield _column("status", (row["status"].replace("_", " ") for row in rows))


def _speed(rows: Sequence[Mapping[str, Any]]) -> Iterator[Column]:
    """Rows of text are compared by their tokens: samples are sentences there, which differ in length."""
    tokens = [row.get("tokens_per_second") for row in rows]
    samples = [None if "tokens_per_second" in row else row["samples_per_second"] for row in rows]
    if any(tokens):
        yield _column("tokens/s", map(rate, tokens))
    if any(samples) or not any(tokens):
        yield _column("samples/s", map(rate, samples))
    if any(row["rounds_measured"] > 1 for row in rows):
        yield _column("range", (_spread(row["range_over_rounds"]) for row in rows))
    else:
        both = ("tokens_per_second_quartiles", "samples_per_second_quartiles")
        yield _column("quartiles", (_spread(next(row[key] for key in both if key in row)) for row in rows))
    yield _column("relative", ("-" if row["relative"] is None else f"{row['relative']:.2f}" for row in rows))
    yield _column("step", ("-" if row["step_seconds"] is None else duration(row["step_seconds"]) for row in rows))


def _spread(ends: Sequence[float] | None) -> str:
    """`221.0 to 233.4`: over the steps of one round, or over rounds."""
    return "-" if ends is None else f"{rate(ends[0])} to {rate(ends[1])}"


def _memory(rows: Sequence[Mapping[str, Any]]) -> Iterator[Column]:
    yield _column("bubble", (percent(row["bubble"]) for row in rows))
    for heading, key in (("memory", "memory_bytes"), ("activations", "activation_bytes")):
        yield _column(heading, (size(max(row[key])) if row[key] else "-" for row in rows))
    flops = [row["model_flops_per_second"] for row in rows]
    yield _column("FLOP/s", ("-" if value is None else operations(value) for value in flops))
    if any(row["mfu"] is not None for row in rows):
        yield _column("MFU", (percent(row["mfu"]) for row in rows))


def _resolved(rows: Sequence[Mapping[str, Any]], varies: Sequence[str]) -> Iterator[Column]:
    """What differs though the table does not vary it."""
    for key in _SHORT:
        if key not in varies and any(key in row["resolved"] for row in rows):
            yield _column(key, (show(row["resolved"].get(key, "-")) for row in rows))


def _column(heading: str, cells: Iterable[str]) -> Column:
    cells = tuple(cells)
    return Column(heading, cells=cells, number=all(cell == "-" or cell[:1].isdigit() for cell in cells))


def _reasons(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What became of cells that were not measured -> which ones."""
    reasons: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        if row["reason"]:
            name = ", ".join(f"{_symbol(key)} = {show(value)}" for key, value in row["settings"].items())
            name = name or f"run {number}"  # of a sweep over one value nothing differs
            reasons.setdefault(f"{row['status'].replace('_', ' ')}: {row['reason']}", []).append(name)
    return reasons


def _notes(rows: Sequence[Mapping[str, Any]], varies: Sequence[str]) -> list[tuple[str, str]]:
    measured = [row for row in rows if row["status"] == "measured"]
    notes: list[tuple[str, str]] = []
    kinds = {row["kind"] for row in measured}
    if len(kinds) == 1:
        worst = max((row["without_core"] for row in measured if row.get("without_core") is not None), default=None)
        notes.append(("speed", speed_kind(measured[0]["kind"], worst)))
    if measured:
        notes.append(("memory", "peak of the fullest stage: its process's, on a GPU the allocator's"))
        notes.append(("activations", "of the fullest stage, counted; bubble measured"))
    for key in dict.fromkeys(key for row in rows for key in row["resolved"] if key not in (*_SHORT, *varies)):
        values = [show(row["resolved"].get(key, "-")) for row in rows]
        notes.append(("differs too", f"{key}: {', '.join(values)}"))
    hopeless = sum(row["status"] in HOPELESS for row in rows)
    if hopeless and not measured:
        notes.append(("", "nothing was measured"))
    return notes


def _symbol(key: str) -> str:
    return _SYMBOLS.get(key, key)
