"""Throughput over K and M, relative to a table's first cell.

Two kinds of our numbers are next to the paper's, in separate columns: simulated at the paper's size from the figures
of its hardware, and measured by `gpipe bench` as far as there are devices. One rule of the recipe chooses N for all
cells of a table. Every cell is simulated twice: cut as Lingvo cuts, and by our own partitioner.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from gpipe_cli.errors import InputError, NothingFitsError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.comparison import Difference, Shown, describe_speed_kinds, make_table
from gpipe_cli.reproduction.runner import (
    DISABLE_P2P,
    ROWS_DIFFER,
    Findings,
    Note,
    Runner,
    keep_last,
)
from gpipe_cli.units import plural

IMPOSSIBLE = "impossible"  # the status of a row whose settings do not go together
Result = dict[str, Any]
Cell = dict[str, Any]  # a row of a table, with the results of its runs
LINGVO = Shown("Lingvo's cut", "lingvo_speed", ",.2f", "simulated", quantity="speed")
HERE = Shown("here", "measured_speed", ",.2f", "measured", quantity="speed")
COLUMNS = (
    Shown("K", "partitions"),
    Shown("M", "micro_batches"),
    Shown("paper", "paper", ",.2f", "paper", quantity="speed"),
    Shown("N", "lingvo_samples", ",.0f", "simulated"),
    LINGVO,
    Difference("Lingvo's cut - paper", LINGVO, "paper"),
    Shown("N, exact cut", "exact_samples", ",.0f", "simulated"),
    Shown("exact / Lingvo's", "gain", ",.2f", "simulated"),
)


def reproduce(runner: Runner, figures: str, tables: Sequence[Mapping[str, Any]], slow_links: bool = False) -> Findings:
    """``figures``: the setting of the paper's hardware; ``tables``: the name of each, its settings, and cells with the
    paper's speeds, ``relative_to`` the first; ``slow_links``: GPUs exchange tensors through the host's memory, and
    without GPUs nothing is measured."""
    runner.check_not_given(dict.fromkeys(("partitions", "micro_batches", "recompute"), ROWS_DIFFER))
    devices = 0 if slow_links and (runner.is_small or len(runner.gpus) < 2) else runner.devices
    comparable = not runner.incomparable_settings()
    groups = [(table["name"], [*map(dict, table["cells"])]) for table in tables]
    if runner.scale == "smoke":
        groups = [(name, [*cells[:1], *cells[1:][-1:]]) for name, cells in groups]
    every = [cell for _, cells in groups for cell in cells]
    for number, (table, (_, cells)) in enumerate(zip(tables, groups, strict=True), start=1):
        settings = table.get("settings", ())
        tried = [cell for cell in cells if cell["partitions"] <= devices]
        folder = f"{number}_measured" if len(tables) > 1 else "measured"
        with _exchange_through_host() if slow_links and tried else contextlib.nullcontext():
            _measure(tried, folder, settings, runner, every)
        for cut, cell in product(("lingvo", "exact"), cells):
            given = *_cell_settings(cell), *settings, f"partition.method={cut}", figures
            cell[cut] = _simulate(given, runner, every)
        for cell in cells:
            _add_speeds(cell, cells[0])
    measured = [cell for cell in every if "measured" in cell]
    smaller = runner.is_small and devices > 0 and comparable
    notes = [
        *_describe_measured(slow_links, devices, measured),
        ("simulated", f"at the paper's size, from the figures of the hardware and not from a run ({figures})"),
        ("simulated", "cut by Lingvo's rule (partition.method=lingvo) and exactly, each with its own plan's N"),
        ("simulated", "exact / Lingvo's: samples/s; below 1 where the exact cut sends more (M = 1, or slow links)"),
        *([("difference", "none where measured: the models differ in size")] if smaller else ()),
        *(note for name, cells in groups for note in _describe_error(name, cells, comparable)),
        *(note for name, cells in groups for note in _describe_refused(name, cells)),
        *(note for name, cells in groups for note in _describe_impossible(name, cells)),
    ]
    for name, cells in groups:
        kinds = describe_speed_kinds([cell["measured"] for cell in cells if "measured" in cell])
        notes += [("measured", f"{name}: {kind}; not the speed of a pipeline") for kind in kinds]
    shown = [
        _make_table(table, cells, runner.scale == "paper", comparable)
        for table, (_, cells) in zip(tables, groups, strict=True)
    ]
    return Findings(shown, notes, comparable=comparable, simulates_paper_size=True)


def _make_table(table: Mapping[str, Any], cells: Sequence[Cell], is_paper_size: bool, comparable: bool) -> Table:
    names = [Shown("", "row")] if "row" in cells[0] else []
    measured = [HERE] if any(cell["measured_speed"] is not None for cell in cells) else []
    off = [Difference("here - paper", HERE, "paper")] if measured and is_paper_size else []  # small models differ
    title = f"{table['name']}: throughput relative to {table['relative_to']} of each column"
    return make_table(title, [*names, *COLUMNS, *measured, *off], cells, comparable)


def _measure(
    cells: Sequence[Cell], folder: str, settings: Sequence[str], runner: Runner, every: Sequence[Cell]
) -> None:
    """Measure cells that recompute alike alternately."""
    for mode in dict.fromkeys(cell.get("recompute") for cell in cells):
        alike = [cell for cell in cells if cell.get("recompute") == mode]
        fixed = [] if mode is None else [f"recompute={mode}"]
        name = folder if mode is None else f"{folder}_{mode}"
        try:
            results = runner.bench_rows(name, alike, ("partitions", "micro_batches"), *fixed, *settings)
        except InputError as error:
            results = [_impossible(error, every)] * len(alike)
        for cell, result in zip(alike, results, strict=True):
            cell["measured"] = result


def _simulate(settings: Sequence[str], runner: Runner, every: Sequence[Cell]) -> Result:
    """The speed at the paper's size. The user's costs and executor are for measurements."""
    try:
        plan = runner.with_settings().without("cost", "executor").simulate_plan(*keep_last(settings))
    except NothingFitsError:
        return {"status": "no fit"}
    except InputError as error:
        return _impossible(error, every)
    return {"samples": plan.samples, "samples_per_second": plan.samples_per_second}


def _impossible(error: InputError, every: Sequence[Cell]) -> Result:
    """What a cell has instead of a speed. Raises ``error`` if no cell has any result, as it is then an error of all."""
    if not any(run in cell for cell in every for run in ("measured", "lingvo", "exact")):
        raise error
    return {"status": IMPOSSIBLE, "reason": str(error), "kind": None}


def _cell_settings(cell: Cell) -> list[str]:
    """The settings in which cells differ."""
    return [f"{key}={cell[key]}" for key in ("partitions", "micro_batches", "recompute") if key in cell]


def _add_speeds(cell: Cell, first: Cell) -> None:
    """Add the speeds relative to the first cell's, and what the exact cut gains."""
    for run in ("measured", "lingvo", "exact"):
        cell[f"{run}_speed"] = _relative_speed(run, cell, first)
        cell[f"{run}_samples"] = cell.get(run, {}).get("samples")
    ours, theirs = (cell[cut].get("samples_per_second") for cut in ("exact", "lingvo"))
    cell["gain"] = ours / theirs if ours and theirs else None


def _relative_speed(run: str, cell: Cell, first: Cell) -> float | str | None:
    """The speed of a cell relative to the first's, round by round if both are of one sweep; or why there is none."""
    if run not in cell or run not in first:
        return None
    result, base = cell[run], first[run]
    if result.get("samples_per_second") is None:
        return str(result["status"]).replace("_", " ")
    alike = cell.get("recompute") == first.get("recompute") and "relative" in result
    key = "relative" if alike else "samples_per_second"
    speed: float = result[key]
    return speed / base[key] if base.get(key) else None


def _describe_measured(slow_links: bool, devices: int, measured: Sequence[Cell]) -> Iterator[Note]:
    if slow_links:
        through_host = "from GPU to GPU through the host's memory (NCCL_P2P_DISABLE=1)"
        yield "measured", through_host if devices > 0 else "nothing: slow links need 2 GPUs or more"
    elif not measured:
        yield "measured", f"nothing: only {devices} of K stages would have a device here"
    else:
        most = max(cell["partitions"] for cell in measured)
        yield "measured", f"up to K = {most}, as far as each stage has its own device or core here"


def _describe_error(name: str, cells: Sequence[Cell], comparable: bool) -> Iterator[Note]:
    """How far the simulated speeds are from the paper's. The first is 1 by definition."""
    pairs = [(cell["lingvo_speed"], cell["paper"]) for cell in cells[1:]]
    off = [abs(ours - paper) for ours, paper in pairs if isinstance(ours, float)]
    if off and comparable:
        where = f"in the mean of {plural(len(off), 'cell')}"
        yield "found", f"{name}, simulated: off from the paper's by {mean(off):.2f} {where}"


def _describe_refused(name: str, cells: Sequence[Cell]) -> Iterator[Note]:
    refused = [cell for cell in cells if isinstance(cell["measured_speed"], str) and not _reason(cell, "measured")]
    if refused:
        yield "found", f"{name}: could not be measured here: {_list_cells(refused)}"


def _describe_impossible(name: str, cells: Sequence[Cell]) -> Iterator[Note]:
    """The cells that are impossible for each reason."""
    cells_of: dict[str, list[Cell]] = {}
    for run, cell in product(("measured", "lingvo"), cells):
        if (reason := _reason(cell, run)) and cell not in cells_of.setdefault(reason, []):
            cells_of[reason].append(cell)
    for reason, impossible in cells_of.items():
        yield "impossible", f"{name}, {_list_cells(impossible)}: {reason}"


def _reason(cell: Cell, run: str) -> str:
    result = cell.get(run, {})
    return str(result["reason"] or "") if result.get("status") == IMPOSSIBLE else ""


def _list_cells(cells: Sequence[Cell]) -> str:
    return "; ".join(f"K = {cell['partitions']}, M = {cell['micro_batches']}" for cell in cells)


@contextlib.contextmanager
def _exchange_through_host() -> Iterator[None]:
    """Make the GPUs of commands exchange tensors through host memory. Commands inherit the environment variable;
    workers inherit their fork server's, which is therefore restarted."""
    before = os.environ.get(DISABLE_P2P)
    fork_server.kill()
    os.environ[DISABLE_P2P] = "1"
    try:
        yield
    finally:
        fork_server.kill()
        del os.environ[DISABLE_P2P]
        if before is not None:
            os.environ[DISABLE_P2P] = before
