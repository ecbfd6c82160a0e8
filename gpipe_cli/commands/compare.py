"""`gpipe compare`: a table of runs with the settings that differ and the results."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.split_arguments import split_arguments
from gpipe_cli.config.settings import newest_runs
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.tables.table import TABLE, to_text

OUTPUT = Path("outputs")
HELP = """\
Compares runs: a table of the settings that differ and of the results. TensorBoard draws their curves; the last line is
the command that shows them.

Usage: gpipe compare RUN [RUN ...] [format=FORMAT]

RUN is the folder of a run of gpipe train or gpipe bench, or one with runs up to two levels below: a sweep, or outputs.
All speeds, bubbles and memory in one column were measured. Runs that failed and runs of different models are shown,
with a note on what cannot be compared. Below a sweep its settings that were refused are named, such as more
partitions than there are layers. Of two runs all that differs is shown, a row for each setting, version and result. Of
runs that differ in their seeds only, mean and standard deviation are also shown.

Settings
  format             table: columns that the terminal has room for |
                     json, csv: all columns, numbers with all digits | latex: for papers, with the package booktabs

Examples
  gpipe compare outputs/2026-01-31_12-00-00_sweep
  gpipe compare outputs/first outputs/second
  gpipe compare outputs format=csv | column -s, -t
  gpipe compare outputs format=json | jq -r '.[] | [.run, .samples_per_second] | @tsv'

Exit codes: 0 something could be shown, 2 nothing could.
"""


def main(arguments: Sequence[str]) -> int:
    runs, settings = split_arguments(arguments, "format")
    for dashed in (run for run in runs if run.startswith("-")):
        raise InputError(f"{dashed}: no such option; write format=csv")
    if not runs:
        raise InputError(f"RUN: give the folder of a run, or of several{_newest()}")
    return _compare(list(map(Path, runs)), settings["format"])


def _compare(folders: Sequence[Path], form: str) -> int:
    from gpipe_cli.commands.sweep_folder import excluded_runs
    from gpipe_cli.reporting.compare.comparison import compare
    from gpipe_cli.reporting.compare.report import all_columns, show_comparison
    from gpipe_cli.reporting.compare.run_record import RunRecord, find_runs, read_run

    problems: list[str] = []
    records: dict[Path, RunRecord | None] = {}  # by absolute path, as a run may be named twice; None: unreadable
    for folder in folders:
        problems += excluded_runs(folder)
        try:
            below = [run for run in find_runs(folder) if run.resolve() not in records]
        except InputError as error:
            problems.append(str(error))
            continue
        for run in below:
            try:
                records[run.resolve()] = read_run(run)
            except InputError as error:
                records[run.resolve()] = None
                problems.append(str(error))
    runs = [run for run in records.values() if run is not None]
    if not runs:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}{'' if records else _newest()}")
    for problem in problems:  # on stderr: a program may read the table
        sys.stderr.write(f"gpipe compare: left out: {problem}\n")
    comparison = compare(runs)
    if form == TABLE:
        show_comparison(Console(), comparison)
    else:
        sys.stdout.write(to_text(all_columns(comparison, with_deviations=form == "latex"), form))
    return 0


def _newest() -> str:
    """`; the newest runs are outputs/a, outputs/b`, or that there is none."""
    newest = [str(run) for run in newest_runs(OUTPUT)]
    return f"; the newest runs are {', '.join(newest)}" if newest else f"; {OUTPUT} holds no run either"
