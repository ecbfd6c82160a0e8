"""sweep.json: what a sweep was asked for and what became of it, for the sweep itself and for comparisons of it.

A run that ends before its first step leaves nothing else; and of a run that began twice only the sweep knows which one
counts.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.reporting.compare.run_record import CONFIG
from gpipe_cli.reporting.run.result import read_result

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Attempt:
    """A run of the sweep that was begun; of those with the same number and round the last one counts."""

    run: int  # the first is 1
    round: int  # likewise
    name: str  # what differs
    folder: str  # within that of the sweep
    exit_code: int | None = None  # None: it has not ended, or nobody was left to see it
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class SavedSweep:
    """What sweep.json says."""

    command: str
    arguments: list[str]
    attempts: list[Attempt]
    abandoned: list[str]  # folders of runs that began again in another one


def read_sweep(path: Path) -> SavedSweep:
    """The sweep in `path`.

    Raises:
        ValueError: it cannot be read.
    """
    saved = read_result(path, SWEEP)
    try:
        given = [str(argument) for argument in saved["arguments"]]
        attempts = [Attempt(**values) for values in saved["runs"]]
        return SavedSweep(saved["command"], given, attempts, [str(name) for name in saved.get("abandoned", [])])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path / SWEEP}: cannot be read as a sweep ({type(error).__name__}: {error}); begin it again"
        ) from error


def runs_without_result(folder: Path) -> list[str]:
    """What a comparison cannot find in `folder`, a sweep or one with sweeps: runs that ended before they were one.

    A setting that is impossible (more partitions than layers) is refused before there is anything to write down; only
    the sweep knows that it was asked for. One line for each.
    """
    lines: dict[tuple[Path, str], str] = {}
    for path in _sweeps(folder):
        try:
            saved = read_sweep(path)
        except (OSError, ValueError) as error:
            lines[path, ""] = str(error)
            continue
        for attempt in saved.attempts:
            if attempt.exit_code and not (path / attempt.folder / CONFIG).is_file():
                why = attempt.error or f"exit code {attempt.exit_code}"
                lines[path, attempt.name] = f"{path}: {attempt.name} ended before its first step: {why}"
    return list(lines.values())


def abandoned_runs(folder: Path) -> set[Path]:
    """Folders, resolved, in `folder`, a sweep or one with sweeps, of runs that began again in another one.

    All else that lies in a sweep's folder, put there by hand, is compared with it.
    """
    found: set[Path] = set()
    for path in _sweeps(folder):
        with contextlib.suppress(OSError, ValueError):  # `runs_without_result` says so
            saved = read_sweep(path)
            kept = {attempt.folder for attempt in saved.attempts}
            found |= {(path / name).resolve() for name in saved.abandoned if name not in kept}
    return found


def _sweeps(folder: Path) -> Iterator[Path]:
    for path in (folder, *sorted(file.parent for file in folder.glob(f"*/{SWEEP}"))):
        if (path / SWEEP).is_file():
            yield path
