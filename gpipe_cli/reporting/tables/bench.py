"""The table of `gpipe bench -m`: what the paper's tables 2 and 3 are, for any settings.

Rows of one table differ only in what the table varies. What was resolved for each cell and differs without being asked
for (threads, executor, whether stages shared a device) is shown too, so that nothing is hidden. All of it is measured.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.tables.sweep import INTERRUPTED, Run
from gpipe_cli.reporting.timeline_view import SHARES, idle
from gpipe_cli.system.files import write_whole

JSON, CSV = "bench.json", "bench.csv"
AUTO = "auto"  # the value of a setting that is to be chosen
HOPELESS = ("impossible", "out_of_memory")  # results all the same: in another round they would be no other
_BAD_INPUT, _KILLED = 2, -9
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|not enough memory|MemoryError|std::bad_alloc"
    r"|killed by signal 9\b"
)
# Settings that say where or how long, and not what.
_NOT_COMPARED = ("output", "run_folder", "resume", "max_steps", "epochs", "dry_run")


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
    resolved = _resolved(measured, [key for key in varies if key not in asked_auto], asked_auto)
    for row, cell, own in zip(rows, measured, resolved, strict=True):
        row["relative"] = _relative(cell, first)
        row["resolved"] = own
    return {"varies": list(varies), "rounds": rounds, "rows": rows}


def write_bench(folder: Path, table: Mapping[str, Any]) -> None:
    """bench.json, and bench.csv with what is one number."""
    write_result(folder, table, JSON)
    longest = max(table["rows"], key=len)  # one of text has its tokens, too
    keys = [key for key in longest if key not in ("settings", "breakdown", "resolved", "folders")]
    other = [key for key in dict.fromkeys(key for row in table["rows"] for key in row["resolved"]) if key not in keys]

    def heading(key: str) -> str:
        return f"{key}_resolved" if key in table["varies"] else key

    file = io.StringIO()
    writer = csv.writer(file)
    shares = (f"breakdown_{name}" for name in SHARES)
    writer.writerow([*table["varies"], *map(heading, keys), *shares, *map(heading, other)])
    for row in table["rows"]:
        breakdown = row["breakdown"] or {}
        values = [row["settings"].get(key) for key in table["varies"]]
        values += [*(row.get(key) for key in keys), *(breakdown.get(name) for name in SHARES)]
        values += [row["resolved"].get(key) for key in other]
        writer.writerow(["" if value is None else _cell(value) for value in values])
    write_whole(folder / CSV, file.getvalue())


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


def _resolved(cells: Sequence[Sequence[Run]], varies: Sequence[str], asked_auto: Sequence[str]) -> list[dict[str, Any]]:
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
    flat: dict[str, Any] = {}

    def visit(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                visit(f"{prefix}{key}.", value)
            else:
                flat[f"{prefix}{key}"] = value

    visit("", result.get("config") or {})
    partitions = result.get("partitions") or []
    flat["devices"] = len({partition.get("device") for partition in partitions})
    flat["executor"] = result.get("executor")
    flat["threads"] = _part(result, "hardware", "threads_per_process")
    flat["kind"] = result.get("samples_per_second_kind")
    return flat


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


def _cell(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
