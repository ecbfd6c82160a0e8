"""`gpipe compare`: a table of runs with the settings that differ and the results, and a page with their curves."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.words import words_and_settings
from gpipe_cli.config.settings import newest_runs
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.tables.table import TABLE, formatted

OUTPUT = Path("outputs")
HELP = """\
Compares runs: a table of the settings that differ and of the results, and their curves.

Usage: gpipe compare RUN [RUN ...] [format=FORMAT] [output=FOLDER]

RUN is the folder of a run of gpipe train or gpipe bench, or one with runs up to two levels below: a sweep, or outputs.
All speeds, bubbles and memory in one column were measured. Runs that failed and runs of different models are shown,
with a note that says what cannot be compared. Below a sweep its settings that were refused are named, such as more
partitions than there are layers.

Settings
  format             table: columns that the terminal has room for, and the files below |
                     json, csv: all columns, numbers with all their digits; no files
  output             where the files go (outputs/<time>_compare); an earlier
                     comparison there is replaced

Files
  comparison.html    table to be sorted, speed-up over K, and curves, in one file
                     that loads nothing
  comparison.csv     the table, all columns

Examples
  gpipe compare outputs/2026-01-31_12-00-00_sweep
  gpipe compare outputs/first outputs/second output=/tmp/both
  gpipe compare outputs format=csv | column -s, -t
  gpipe compare outputs format=json | jq -r '.[] | [.run, .samples_per_second] | @tsv'

Exit codes: 0 something could be shown, 2 nothing could.
"""


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["-sc"]:  # tab completion: arguments are folders, which shells complete by themselves
        return 0
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    runs, settings = words_and_settings(arguments, "format", "output")
    form, output = settings["format"], settings.get("output")
    for dashed in (run for run in runs if run.startswith("-")):
        raise InputError(f"{dashed}: there is no such option; write format=csv or output=FOLDER")
    if not runs:
        raise InputError(f"RUN: give the folder of a run, or of several{_newest()}")
    if form != TABLE and output is not None:
        raise RefusedError("output", output, f"format={form} writes no files; leave one of them out")
    return _compare(list(map(Path, runs)), form, None if output is None else Path(output))


def _compare(folders: Sequence[Path], form: str, output: Path | None) -> int:
    from gpipe_cli.commands.sweep_folder import left_out
    from gpipe_cli.reporting.compare.comparison import compare
    from gpipe_cli.reporting.compare.report import all_columns, show_comparison, write_comparison
    from gpipe_cli.reporting.compare.run_record import RunRecord, find_runs, read_run

    problems: list[str] = []
    found: dict[Path, RunRecord | None] = {}  # by absolute path, as a run may be named twice; None: unreadable
    for folder in folders:
        problems += left_out(folder)
        try:
            below = [run for run in find_runs(folder) if run.resolve() not in found]
        except InputError as error:
            problems.append(str(error))
            continue
        for run in below:
            try:
                found[run.resolve()] = read_run(run)
            except InputError as error:
                found[run.resolve()] = None
                problems.append(str(error))
    runs = [run for run in found.values() if run is not None]
    if not runs:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}{'' if found else _newest()}")
    for problem in problems:  # on stderr: a program may read the table
        sys.stderr.write(f"gpipe compare: left out: {problem}\n")
    comparison = compare(runs)
    if form != TABLE:
        sys.stdout.write(formatted(all_columns(comparison), form))
        return 0
    chosen = output or OUTPUT / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_compare"
    with locked_folder(chosen, f"output={chosen}", new=output is None) as folder:
        console, unread = Console(), None
        try:
            show_comparison(console, comparison)
        except SystemExit as end:  # rich raises it when a pipe is closed, `gpipe compare ... | head`
            unread = end
        try:
            write_comparison(console, comparison, folder)
        except OSError as error:
            raise InputError(
                f"output={folder}: cannot be written to ({error.strerror}); give another, or format=csv"
            ) from error
        if unread is not None:
            raise unread
    return 0


def _newest() -> str:
    """`; the newest runs are outputs/a, outputs/b`, or that there is none."""
    newest = [str(run) for run in newest_runs(OUTPUT)]
    return f"; the newest runs are {', '.join(newest)}" if newest else f"; there is no run in {OUTPUT} either"
