"""The folder of a sweep and its sweep.json: the sweep's arguments, and how each run ended.

Tables of the paper take hours, so an interrupted sweep resumes from sweep.json in the same folder: runs that have ended
stay, and the command line need not be repeated. Refused runs are recorded there only, so comparisons read it too.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpipe_cli.commands import folders
from gpipe_cli.config.old_words import update_argument
from gpipe_cli.config.settings import CONFIG_FILE
from gpipe_cli.errors import InputError, describe_error
from gpipe_cli.reporting.run.lines import format_override
from gpipe_cli.results.bench import BENCH_CSV_FILE, BENCH_FILE
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.run import run_result_or_none

SWEEP_FILE = "sweep.json"
SWEEP_DIR_SETTING = "hydra.sweep.dir="


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run of the sweep; of several with the same run and round, the last counts."""

    run: int  # the first is 1
    round: int  # likewise
    name: str  # the settings that differ
    folder: str  # its name within the sweep's folder
    exit_code: int | None = None  # None: it has not ended, or the sweep was killed before it did
    seconds: float = 0.0
    error: str = ""


class SweepFolder:
    """The folder of a sweep, and what its sweep.json holds."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path | None = None) -> None:
        """`path`: the folder of a sweep to resume; None for a new sweep."""
        self.command, self.arguments, self.path = command, list(arguments), path
        self.resumes = path is not None
        self.targets: tuple[str, ...] = ()  # the functions of its runs that who resumes it has named
        self.attempts: dict[tuple[int, int], Attempt] = {}  # the last attempt of each run and round
        self._lock = contextlib.ExitStack()
        self.release = self._lock.close  # unlocks the folder, and removes it if it is empty

    @classmethod
    def read(cls, path: Path) -> "SweepFolder":
        """The sweep in `path`. Raises InputError if it cannot be read."""
        saved = read_result(path, SWEEP_FILE)
        try:
            sweep = cls(saved["command"], [update_argument(str(argument)) for argument in saved["arguments"]], path)
            names = [",".join(map(update_argument, values["name"].split(","))) for values in saved["runs"]]
            attempts = [Attempt(**values | {"name": name}) for values, name in zip(saved["runs"], names, strict=True)]
            sweep.attempts = {(attempt.run, attempt.round): attempt for attempt in attempts}
            for folder in {Path(attempt.folder) for attempt in attempts if attempt.folder}:
                if folder.name in ("", "..") or folder != Path(folder.name):
                    raise TypeError(f"{folder} is not a folder in it")
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path / SWEEP_FILE}: cannot be read as a sweep ({describe_error(error)}); begin it again"
            ) from error
        return sweep

    def lock(self, path: Path) -> Path:
        """Lock and return the sweep's folder: `path`, or a numbered folder next to it if that exists and was not typed.

        Two processes resuming the same sweep would run everything twice, and remove each other's folders. A run whose
        sweep was killed may still be ending, so a resumed sweep waits for it. Forks of this process hold the lock.
        Raises InputError if a sweep, or a file that it would replace, is at the typed path, if a process is at work
        there, or if the folder cannot be created.
        """
        typed = any(argument.startswith(SWEEP_DIR_SETTING) for argument in self.arguments)
        setting = format_override("resume", str(path)) if self.resumes else f"{SWEEP_DIR_SETTING}{path}"
        patience = folders.RUN_EXIT_TIMEOUT_SECONDS if self.resumes else 0.0
        lock = folders.lock_folder(path, setting, new=not typed and not self.resumes, timeout_seconds=patience)
        folder = self._lock.enter_context(lock)
        for name in (SWEEP_FILE, *((BENCH_FILE, BENCH_CSV_FILE) if self.command == "bench" else ())):
            if typed and os.path.lexists(folder / name):
                self.release()
                what, remedy = ("a sweep", f"resume it with resume={path} or ") if name == SWEEP_FILE else (name, "")
                raise InputError(f"{setting}: {what} is there already; {remedy}choose another")
        self.path = folder
        return folder

    def record(self, *attempts: Attempt) -> None:
        """Write sweep.json, with these attempts added."""
        assert self.path is not None
        self.attempts |= {(attempt.run, attempt.round): attempt for attempt in attempts}
        runs = [asdict(attempt) for _, attempt in sorted(self.attempts.items())]
        write_result(self.path, {"command": self.command, "arguments": self.arguments, "runs": runs}, SWEEP_FILE)

    def discard(self, attempt: Attempt) -> None:
        """Remove the folder of an attempt that begins again in a new folder, unless there is a reason to keep it, such
        as a file that no run has written.

        Comparisons and TensorBoard would show an interrupted run next to its replacement. A failed run's folder
        may hold the reason, and a checkpoint may be of use: these folders stay, and are compared too.
        """
        assert self.path is not None
        folder = self.path / attempt.folder
        # without a configuration it never became a run
        if not attempt.folder or not (folder / CONFIG_FILE).is_file() or (folder / "checkpoints").exists():
            return
        result = run_result_or_none(folder)
        if (result is None or result.status in ("running", "interrupted")) and folders.contains_only_run_files(folder):
            shutil.rmtree(folder, ignore_errors=True)


def excluded_runs(folder: Path) -> list[str]:
    """What a comparison leaves out of `folder`, a sweep or a folder of sweeps: a line for each run that failed before
    its first step and is only in sweep.json (more partitions than layers), and for each unreadable sweep.json."""
    lines: list[str] = []
    for path in (folder, *sorted(file.parent for file in folder.glob(f"*/{SWEEP_FILE}"))):
        if not (path / SWEEP_FILE).is_file():
            continue
        try:
            sweep = SweepFolder.read(path)
        except (OSError, ValueError) as error:
            lines.append(str(error))
            continue
        for attempt in sweep.attempts.values():
            if attempt.exit_code and not (path / attempt.folder / CONFIG_FILE).is_file():
                why = attempt.error or f"exit code {attempt.exit_code}"
                lines.append(f"{path}: {attempt.name} ended before its first step: {why}")
    return list(dict.fromkeys(lines))  # once for all rounds
