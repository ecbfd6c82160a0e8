"""`gpipe compare`: a table of runs, of the settings in which they differ and of their results; their curves."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.config.settings import newest_runs
from gpipe_cli.errors import InputError

OUTPUT = Path("outputs")
HELP = """\
Compares runs: a table of the settings that differ and of the results, with curves and bars.

Usage: gpipe compare RUN [RUN ...] [--csv] [--output FOLDER]

RUN is the folder of a run of gpipe train or gpipe bench, or one with runs up to two levels below: a sweep, or outputs.
All speeds, bubbles and memory in one column were measured. Runs that failed and runs of different models are shown,
with a note that says what cannot be compared. Below a sweep its settings that were refused are named, such as more
partitions than there are layers.

Options
  --csv              print the table as CSV, all columns, and write no files
  --output FOLDER    where the files go (outputs/<time>_compare); an earlier
                     comparison there is replaced

Files
  comparison.html    table to be sorted, speed-up over K, and curves, in one file
                     that loads nothing
  comparison.csv     the table, all columns
  curves.png         train loss, test accuracy or perplexity, and speed over the steps
  bars.png           final accuracy, speed, measured bubble and peak memory

Examples
  gpipe compare outputs/2026-01-31_12-00-00_sweep
  gpipe compare outputs/first outputs/second --output /tmp/both
  gpipe compare outputs --csv | column -s, -t

Exit codes: 0 something could be shown, 2 nothing could.
"""


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage above what is wrong, and leaves; here that is one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see gpipe compare --help")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    if arguments[:1] == ["-sc"]:  # tab completion asks for settings; runs are folders, which shells know by themselves
        return 0
    parser = _Parser(prog="gpipe compare", add_help=False, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", type=_folder)
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--output", metavar="FOLDER", type=_folder)
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_intermixed_args(list(arguments))
    if given.help:
        sys.stdout.write(HELP)
        return 0
    if not given.runs:
        raise InputError(f"RUN: give the folder of a run, or of several{_newest()}")
    if given.csv and given.output is not None:
        raise InputError(f"--output {given.output}: --csv writes no files; leave one of them out")
    return _compare(given.runs, given.csv, given.output)


def _folder(given: str) -> Path:
    if not given:  # which Path makes the one in which we are
        raise argparse.ArgumentTypeError("must not be empty; give the name of a folder")
    return Path(given)


def _compare(folders: Sequence[Path], as_csv: bool, output: Path | None) -> int:
    from gpipe_cli.commands.sweep_folder import left_out
    from gpipe_cli.reporting.compare.comparison import compare
    from gpipe_cli.reporting.compare.report import csv_of, show_comparison, write_comparison
    from gpipe_cli.reporting.compare.run_record import RunRecord, find_runs, read_run

    problems: list[str] = []
    found: dict[Path, Path] = {}  # each run once, however often it is named
    for folder in folders:
        problems += left_out(folder)
        try:
            found |= {path: run for run in find_runs(folder) if (path := run.resolve()) not in found}
        except InputError as error:
            problems.append(str(error))
    runs: list[RunRecord] = []
    for folder in found.values():
        try:
            runs.append(read_run(folder))
        except InputError as error:
            problems.append(str(error))
    if not runs:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}{'' if found else _newest()}")
    for problem in problems:  # on stderr: the table of --csv may be read by a program
        sys.stderr.write(f"gpipe compare: left out: {problem}\n")
    comparison = compare(runs)
    if as_csv:
        sys.stdout.write(csv_of(comparison))
        return 0
    chosen = output or OUTPUT / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_compare"
    with locked_folder(chosen, f"--output {chosen}", new=output is None) as folder:
        console, unread = Console(), None
        try:
            show_comparison(console, comparison)
        except SystemExit as end:  # by rich, as a pipe was closed, `gpipe compare ... | head`
            unread = end
        try:
            write_comparison(console, comparison, folder)
        except OSError as error:
            raise InputError(
                f"--output {folder}: cannot be written to ({error.strerror}); give another, or --csv"
            ) from error
        if unread is not None:
            raise unread
    return 0


def _newest() -> str:
    """`; the newest runs are outputs/a, outputs/b`, if there are any."""
    newest = [str(run) for run in newest_runs(OUTPUT)]
    return f"; the newest runs are {', '.join(newest)}" if newest else f"; there is no run in {OUTPUT} either"
