"""`gpipe diff`: two runs side by side: settings, versions, code and hardware, and results."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gpipe_cli.commands.words import words_and_settings
from gpipe_cli.config.settings import find_run
from gpipe_cli.config.typed import show
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.run_record import Curve, RunRecord, read_run, same_curves
from gpipe_cli.reporting.run.lines import show_facts
from gpipe_cli.reporting.tables.table import NONE, TABLE, Column, Table, formatted, show_table, to_rows
from gpipe_cli.results.files import flattened
from gpipe_cli.results.measures import SHARE, TRAIN_LOSS, chosen

HELP = """\
Sets two runs side by side: the settings that differ, versions, code and hardware that differ, and the results.

Usage: gpipe diff RUN RUN [format=FORMAT]

RUN is the folder of a run of gpipe train or gpipe bench. The difference is the second less the first, in points where
results are shares. gpipe compare puts any number of runs into one table, with curves.

format=json or format=csv writes the same for programs: an entry for each setting that differs (kind setting), each
version and fact of the hardware that differs (ran_on), each result, and the train loss (curve): its number of steps
and, as difference, the first step that differs. All other differences are the second value less the first one.

Examples
  gpipe diff outputs/first outputs/second
  gpipe diff outputs/first outputs/second format=json | jq '.[] | select(.kind == "setting")'
"""
KEYS = ("kind", "name", "first", "second", "difference")  # keys of one difference in JSON and CSV
_OF_THE_FOLDER = ("output", "run_folder", "resume")  # settings that say where a run lies
_COMPARED = chosen(
    "steps", "test_loss", "test_top1", "test_top5", "test_perplexity", "test_token_accuracy", "best_loss", "best_top1",
    "samples_per_second", "tokens_per_second", "step_seconds", "bubble_measured", "mfu", "memory_bytes_fullest",
    "seconds",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    words, given = words_and_settings(arguments, "format")
    if len(words) != 2:
        raise InputError(f"{' '.join(words) or 'no run'}: give the folders of two runs, gpipe diff RUN RUN")
    first, second = (read_run(find_run("RUN", run, "outputs")) for run in words)
    settings = [{key: v for key, v in run.settings.items() if key not in _OF_THE_FOLDER} for run in (first, second)]
    tables = {
        "setting": _differing("setting", *settings),
        "ran_on": _differing("ran on", _ran_on(first), _ran_on(second)),
        "result": _results(first, second),
    }
    curves = [run.curves.get(TRAIN_LOSS) for run in (first, second)]
    if given["format"] != TABLE:
        entries = [{"kind": kind, **row} for kind, table in tables.items() for row in to_rows(table)]
        steps = [curve and len(curve.steps) for curve in curves]
        entries.append(dict(zip(KEYS, ("curve", TRAIN_LOSS, *steps, _apart(*curves)), strict=True)))
        everything = Table("", [Column(key, values=[entry[key] for entry in entries]) for key in KEYS])
        sys.stdout.write(formatted(everything, given["format"]))
        return 0
    console = Console()
    show_facts(console, [("first", str(first.folder)), ("second", str(second.folder))])
    for table in tables.values():
        if table.rows:
            console.print()
            show_table(console, table)
    console.print()
    names = {"setting": "settings", "ran_on": "versions, code and hardware"}
    same = [names[kind] for kind, table in tables.items() if not table.rows]
    show_facts(console, [("the same", ", ".join(same))] if same else [])
    show_facts(console, [("train loss", _losses(*curves))])
    return 0


def _differing(heading: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """A row for each key whose values differ; None is also the value of a key that one of the two lacks."""
    keys = [key for key in dict.fromkeys((*first, *second)) if first.get(key, NONE) != second.get(key, NONE)]

    def column(name: str, of: Mapping[str, Any]) -> Column:
        return Column(name, cells=[show(of.get(key, NONE)) for key in keys], values=[of.get(key) for key in keys])

    names, nothing = Column(heading, cells=keys, key="name"), [None] * len(keys)
    difference = Column("difference", cells=keys, values=nothing, printed=False)
    return Table("", [names, column("first", first), column("second", second), difference])


def _ran_on(run: RunRecord) -> dict[str, Any]:
    """Versions, hardware and the last start's commits: `a1b2c3d4e5f6, changed` if the code had uncommitted changes."""
    found = {**run.result.versions, **dict(flattened(run.result.hardware))}
    for whose, commit in (run.result.starts[-1].code if run.result.starts else {}).items():
        changed = {None: ", perhaps changed", True: ", changed", False: ""}
        known = commit and commit["commit"][:12] + changed[commit["changed"]]
        found[f"commit of {whose}"] = known or "not known"
    return found


def _results(first: RunRecord, second: RunRecord) -> Table:
    """A row for each result that at least one of the runs has."""
    statuses = (first.result.status, second.result.status)
    rows: list[tuple[str, str, Sequence[str], Sequence[Any]]] = [
        ("status", "status", (*statuses, _difference(*statuses, points=False)), (*statuses, None))
    ]
    for measure in _COMPARED:
        one, other = (measure.value(run.result) for run in (first, second))
        if not one is other is None:
            cells = (measure.shown(one), measure.shown(other), _difference(one, other, points=measure.unit is SHARE))
            rows.append((measure.name, measure.of, cells, (one, other, None if None in (one, other) else other - one)))
    names, keys, cells, values = zip(*rows, strict=True)
    columns = [
        Column(name, cells=list(texts), values=list(numbers), number=True)
        for name, texts, numbers in zip(KEYS[2:], zip(*cells, strict=True), zip(*values, strict=True), strict=True)
    ]
    return Table("", [Column("result", cells=names, key="name", values=keys), *columns])


def _difference(first: Any, second: Any, *, points: bool) -> str:
    if first == second:
        return "none"
    if not all(isinstance(value, int | float) for value in (first, second)):
        return NONE
    if points:
        return f"{100 * (second - first):+.2f} points"
    return NONE if first == 0 else f"{100 * (second / first - 1):+.1f} %"


def _apart(one: Curve | None, other: Curve | None) -> int | None:
    """The first step at which the train losses differ; None if there is none among the steps that both runs have."""
    if one is None or other is None or same_curves([one, other]):
        return None
    pairs = zip(one.steps, one.values, other.steps, other.values, strict=False)
    return next((step for step, value, *theirs in pairs if [step, value] != theirs), None)


def _losses(one: Curve | None, other: Curve | None) -> str:
    """Whether both runs have the same train loss in every step, and if not, from which step on they differ."""
    if one is None or other is None:
        return "not known, as a run has no curves"
    if same_curves([one, other]):
        return f"the same bits in all {len(one.steps):,} steps"
    apart = _apart(one, other)
    return f"differs from step {apart:,} on" if apart is not None else "the same bits in the steps that both have"
