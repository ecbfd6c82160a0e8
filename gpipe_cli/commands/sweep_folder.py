"""The folder of a sweep and its sweep.json: the sweep's arguments, and how each run ended.

Tables of the paper take hours, so an interrupted sweep resumes from sweep.json in the same folder: runs that have ended
stay, and the command line need not be repeated. Refused runs are recorded there only, so comparisons read it too.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpipe_cli.commands import folders
from gpipe_cli.config.old_words import update_argument
from gpipe_cli.config.settings import CONFIG_FILE
from gpipe_cli.errors import InputError, describe_error
from gpipe_cli.reporting.run.lines import format_override
from gpipe_cli.reporting.tables.sweep import NOT_RETRYABLE, Run, bench_status
from gpipe_cli.results.bench import BENCH_CSV_FILE, BENCH_FILE
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.run import run_result_or_none

SWEEP_FILE = "sweep.json"
SWEEP_DIR_SETTING = "hydra.sweep.dir="
_RECORDED = ("run", "round", "name", "folder", "exit_code", "seconds", "error")  # what sweep.json has of a `Run`


class SweepFolder:
    """The folder of a sweep, and what its sweep.json holds."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path) -> None:
        self.command, self.arguments, self.path = command, list(arguments), path
        self.targets: tuple[str, ...] = ()  # the functions of its runs that who resumes it has named
        self.runs: dict[tuple[int, int], Run] = {}  # the last attempt at each cell and round
        self.ended: dict[tuple[int, int], Run] = {}  # those that have ended in this start, or need no other attempt

    @classmethod
    def read(cls, path: Path) -> "SweepFolder":
        """The sweep in `path`. Raises InputError if it cannot be read."""
        saved = read_result(path, SWEEP_FILE)
        try:
            command = saved["command"]
            sweep = cls(command, [update_argument(str(argument), command) for argument in saved["arguments"]], path)
            for values in saved["runs"]:
                run = Run(**{key: value for key, value in values.items() if key in _RECORDED})
                name = ",".join(update_argument(setting, command) for setting in run.name.split(","))
                sweep.runs[run.key] = replace(run, name=name)
                if run.folder and (run.folder == ".." or run.folder != Path(run.folder).name):
                    raise TypeError(f"{run.folder} is not a folder in it")
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path / SWEEP_FILE}: cannot be read as a sweep ({describe_error(error)}); begin it again"
            ) from error
        return sweep

    @contextlib.contextmanager
    def lock(self, *, resumes: bool) -> Iterator[None]:
        """Lock the folder; a new sweep has a numbered one next to it instead, if it exists and was not typed.

        Two processes resuming the same sweep would run everything twice, and remove each other's folders. A run whose
        sweep was killed may still be ending, so a resumed sweep waits for it. Forks of this process hold the lock.
        Raises InputError if a sweep, or a file that it would replace, is at the typed path, if a process is at work
        there, or if the folder cannot be created.
        """
        typed = any(argument.startswith(SWEEP_DIR_SETTING) for argument in self.arguments)
        setting = format_override("resume", str(self.path)) if resumes else f"{SWEEP_DIR_SETTING}{self.path}"
        patience = folders.RUN_EXIT_TIMEOUT_SECONDS if resumes else 0.0
        lock = folders.lock_folder(self.path, setting, new=not typed and not resumes, timeout_seconds=patience)
        with lock as self.path:
            for name in (SWEEP_FILE, *((BENCH_FILE, BENCH_CSV_FILE) if self.command == "bench" else ())):
                if typed and os.path.lexists(self.path / name):
                    use = f"resume it with resume={self.path} or choose another"
                    what, remedy = ("a sweep", use) if name == SWEEP_FILE else (name, "choose another")
                    raise InputError(f"{setting}: {what} is there already; {remedy}")
            yield

    def record(self, *runs: Run) -> None:
        """Write sweep.json, with these runs added."""
        self.runs |= {run.key: run for run in runs}
        recorded = [{key: getattr(run, key) for key in _RECORDED} for _, run in sorted(self.runs.items())]
        write_result(self.path, {"command": self.command, "arguments": self.arguments, "runs": recorded}, SWEEP_FILE)

    def is_final(self, run: Run) -> bool:
        """Whether another attempt would give the same."""
        return run.is_complete or (self.command == "bench" and bench_status(run) in NOT_RETRYABLE)

    def status(self, run: Run) -> str:
        return bench_status(run).replace("_", " ") if self.command == "bench" else run.status

    def unused_folder(self, name: str) -> Path:
        """A folder for the run `name` that does not exist yet, of characters that every file system accepts."""
        safe = re.sub(r"[^\w.,=+\[\]-]", "_", name.replace("'", "").replace('"', ""))[:150].strip(".") or "run"
        return next(folder for folder in folders.numbered_paths(self.path / safe) if not os.path.lexists(folder))

    def discard(self, run: Run) -> None:
        """Remove the folder of a run that begins again in a new folder, unless there is a reason to keep it, such
        as a file that no run has written.

        Comparisons and TensorBoard would show an interrupted run next to its replacement. A failed run's folder
        may hold the reason, and a checkpoint may be of use: these folders stay, and are compared too.
        """
        folder = self.path / run.folder
        # without a configuration it never became a run
        if not run.folder or not (folder / CONFIG_FILE).is_file() or (folder / "checkpoints").exists():
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
        for run in sweep.runs.values():
            if run.exit_code and not (path / run.folder / CONFIG_FILE).is_file():
                why = run.error or f"exit code {run.exit_code}"
                lines.append(f"{path}: {run.name} ended before its first step: {why}")
    return list(dict.fromkeys(lines))  # once for all rounds
