"""The folder of a sweep and its sweep.json: what was asked for, and what became of each run.

Tables of the paper take hours. A sweep that was interrupted goes on from sweep.json, in the same folder:
what has ended stays as it is, and the command line need not be remembered. Of a run that was refused only sweep.json
has a record: comparisons read it, too.
"""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpipe_cli.commands import folders
from gpipe_cli.config.settings import CONFIG
from gpipe_cli.config.typed import with_type
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import override
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.run import run_result_or_none

SWEEP = "sweep.json"
PLACE = "hydra.sweep.dir="


@dataclass(frozen=True)
class Attempt:
    """A run of the sweep that was begun; of those with the same number and round the last one counts."""

    run: int  # the first is 1
    round: int  # likewise
    name: str  # the settings that differ
    folder: str  # within that of the sweep
    exit_code: int | None = None  # None: it has not ended, or the sweep was killed before it did
    seconds: float = 0.0
    error: str = ""


class SweepFolder:
    """The folder of one sweep, and what its sweep.json holds."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path | None = None) -> None:
        """`path` is that of a sweep that goes on."""
        self.command, self.arguments, self.path = command, list(arguments), path
        self.resumes = path is not None
        self.attempts: dict[tuple[int, int], Attempt] = {}  # the last one of each run and round
        self._lock = contextlib.ExitStack()
        self.release = self._lock.close  # others may come in again; of a sweep that never began nothing is left

    @classmethod
    def read(cls, path: Path) -> "SweepFolder":
        """The sweep that lies in `path`. Raises InputError if it cannot be read."""
        saved = read_result(path, SWEEP)
        try:
            sweep = cls(saved["command"], [str(argument) for argument in saved["arguments"]], path)
            attempts = [Attempt(**values) for values in saved["runs"]]
            sweep.attempts = {(attempt.run, attempt.round): attempt for attempt in attempts}
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{path / SWEEP}: cannot be read as a sweep ({with_type(error)}); begin it again"
            ) from error
        return sweep

    def choose(self, path: Path) -> Path:
        """Where the sweep will lie, locked: at `path`, or beside it if that is taken and was not typed.

        Two that go on with one sweep would run everything twice, and remove what the other is about to do. A run whose
        sweep was killed may still be ending: a sweep that goes on waits for it. Forks of this process hold the lock.
        Raises InputError if a sweep lies where this one was told to, or is at work there, or it cannot be made.
        """
        typed = any(argument.startswith(PLACE) for argument in self.arguments)
        setting = override("resume", str(path)) if self.resumes else f"{PLACE}{path}"
        patience = folders.ENDING_SECONDS if self.resumes else 0.0
        lock = folders.locked_folder(path, setting, new=not typed and not self.resumes, patience_seconds=patience)
        folder = self._lock.enter_context(lock)
        if typed and (folder / SWEEP).exists():
            self.release()
            raise InputError(f"{setting}: a sweep lies there already; go on with it by resume={path} or choose another")
        self.path = folder
        return folder

    def record(self, *attempts: Attempt) -> None:
        """Writes sweep.json."""
        assert self.path is not None
        self.attempts |= {(attempt.run, attempt.round): attempt for attempt in attempts}
        runs = [asdict(attempt) for _, attempt in sorted(self.attempts.items())]
        write_result(self.path, {"command": self.command, "arguments": self.arguments, "runs": runs}, SWEEP)

    def give_up(self, attempt: Attempt) -> None:
        """The run will begin again in a new folder; the old one goes, where it holds nothing to go on from.

        Comparisons and TensorBoard would show a run that was stopped half-way beside the one that took its place. A
        failed run may hold the reason, and a checkpoint may be of use: these stay, and are compared too.
        """
        assert self.path is not None
        folder = self.path / attempt.folder
        if not attempt.folder or folder.parent != self.path or folder.name == "..":  # sweep.json was edited
            return
        if not (folder / CONFIG).is_file():  # it never became a run, and the files there are not ours
            with contextlib.suppress(OSError):  # something does, or not even a folder
                folder.rmdir()
        elif not (folder / "checkpoints").exists():
            result = run_result_or_none(folder)
            if result is None or result.status in ("running", "interrupted"):
                shutil.rmtree(folder, ignore_errors=True)


def left_out(folder: Path) -> list[str]:
    """What a comparison does not find in `folder`, a sweep or one with sweeps: a line for each run that was refused
    (more partitions than layers: only sweep.json has a record of it), and for each sweep.json that cannot be read."""
    lines: list[str] = []
    for path in (folder, *sorted(file.parent for file in folder.glob(f"*/{SWEEP}"))):
        if not (path / SWEEP).is_file():
            continue
        try:
            sweep = SweepFolder.read(path)
        except (OSError, ValueError) as error:
            lines.append(str(error))
            continue
        for attempt in sweep.attempts.values():
            if attempt.exit_code and not (path / attempt.folder / CONFIG).is_file():
                why = attempt.error or f"exit code {attempt.exit_code}"
                lines.append(f"{path}: {attempt.name} ended before its first step: {why}")
    return list(dict.fromkeys(lines))  # once for all rounds
