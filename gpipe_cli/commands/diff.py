"""`gpipe diff`: two runs side by side: what was set, what ran it, and what became of it."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from gpipe_cli.config.settings import find_run
from gpipe_cli.config.typed import show
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.run_record import RunRecord, read_run, same_curves
from gpipe_cli.reporting.run.lines import show_facts
from gpipe_cli.reporting.run.result import flattened
from gpipe_cli.reporting.run.tensorboard import TRAIN_LOSS
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.units import duration, loss, percent, perplexity, rate, size

HELP = """\
Sets two runs side by side: the settings that differ, versions, code and hardware that differ, and the results.

Usage: gpipe diff RUN RUN

RUN is the folder of a run of gpipe train or gpipe bench. The difference is the second less the first, in points where
results are shares. gpipe compare puts any number of runs into one table, with curves.

Examples
  gpipe diff outputs/first outputs/second
"""
NONE = "-"
_OF_THE_FOLDER = ("output", "run_folder", "resume")  # settings that say where a run lies
# Of result.json: a name, where it stands, and how it is written.
_RESULTS: tuple[tuple[str, tuple[str, ...], Callable[[Any], str]], ...] = (
    ("status", ("status",), show),
    ("steps", ("steps",), lambda number: f"{number:,}"),
    ("test loss", ("test", "loss"), loss),
    ("test top-1", ("test", "top1"), percent),
    ("test top-5", ("test", "top5"), percent),
    ("test perplexity", ("test", "perplexity"), perplexity),
    ("test token accuracy", ("test", "token_accuracy"), percent),
    ("best loss", ("best", "loss"), loss),
    ("best top-1", ("best", "top1"), percent),
    ("samples/s", ("samples_per_second",), rate),
    ("tokens/s", ("tokens_per_second",), rate),
    ("seconds per step", ("step_seconds",), duration),
    ("bubble, measured", ("bubble", "measured"), percent),
    ("MFU", ("mfu",), percent),
    ("peak memory", ("memory_bytes",), size),
    ("in all", ("seconds",), duration),
)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    if len(arguments) != 2:
        given = " ".join(arguments) or "no run"
        raise InputError(f"{given}: give the folders of two runs, gpipe diff RUN RUN")
    first, second = (read_run(find_run("RUN", run, "outputs")) for run in arguments)
    console = Console()
    show_facts(console, [("first", str(first.folder)), ("second", str(second.folder))])
    same = []
    settings = [{key: v for key, v in run.settings.items() if key not in _OF_THE_FOLDER} for run in (first, second)]
    for name, pair in (("setting", settings), ("ran on", [_ran_on(first), _ran_on(second)])):
        rows = [(key, *both) for key, *both in _differing(*pair)]
        if rows:
            _show(console, [Column(name), Column("first"), Column("second")], rows)
        else:
            same.append({"setting": "settings", "ran on": "versions, code and hardware"}[name])
    columns = [Column("result"), *(Column(name, number=True) for name in ("first", "second", "difference"))]
    _show(console, columns, _results(first, second))
    console.print()
    show_facts(console, [("the same", ", ".join(same))] if same else [])
    show_facts(console, [("train loss", _losses(first, second))])
    return 0


def _show(console: Console, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    console.print()
    show_table(console, Table.of_rows("", columns, rows))


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for key in dict.fromkeys((*first, *second)):
        if first.get(key, NONE) != second.get(key, NONE):
            yield key, show(first.get(key, NONE)), show(second.get(key, NONE))


def _ran_on(run: RunRecord) -> dict[str, Any]:
    """Versions, hardware and, of the last start, commits; `a1b2c3d4e5f6, changed` of code that was not committed."""
    found = {**run.result["versions"], **dict(flattened(run.result["hardware"]))}
    starts = run.result.get("starts") or [{}]
    for whose, commit in (starts[-1].get("code") or {}).items():
        changed = {None: ", perhaps changed", True: ", changed", False: ""}
        known = commit is not None
        found[f"commit of {whose}"] = commit["commit"][:12] + changed[commit["changed"]] if known else "not known"
    return found


def _results(first: RunRecord, second: RunRecord) -> Iterable[tuple[str, str, str, str]]:
    for name, keys, shown in _RESULTS:
        values = [run.value(*keys) for run in (first, second)]
        if keys == ("memory_bytes",):  # of the fullest stage
            values = [max(value or (), default=None) for value in values]
        if values != [None, None]:
            one, other = (NONE if value is None else shown(value) for value in values)
            yield name, one, other, _difference(*values, points=shown is percent)


def _difference(first: Any, second: Any, *, points: bool) -> str:
    if first == second:
        return "none"
    if not all(isinstance(value, int | float) for value in (first, second)):
        return NONE
    if points:
        return f"{100 * (second - first):+.2f} points"
    return NONE if first == 0 else f"{100 * (second / first - 1):+.1f} %"


def _losses(first: RunRecord, second: RunRecord) -> str:
    """Whether both took the same steps, as the curves have them."""
    curves = [run.curves.get(TRAIN_LOSS) for run in (first, second)]
    one, other = curves
    if one is None or other is None:
        return "not known, as a run has no curves"
    if same_curves(curves):
        return f"the same bits in all {len(one.steps):,} steps"
    pairs = zip(one.steps, one.values, other.steps, other.values, strict=False)
    apart = next((step for step, value, *theirs in pairs if [step, value] != theirs), None)
    return f"differs from step {apart:,} on" if apart is not None else "the same bits in the steps that both have"
