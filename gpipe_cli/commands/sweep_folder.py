"""The folder of a sweep and its sweep.json: what was asked for, and what became of each run.

Tables of the paper take hours. A sweep that was interrupted goes on from sweep.json, in the same folder:
what has ended stays as it is, and the command line need not be remembered. Of a run that was refused, and of one that
began twice, only sweep.json has a record: comparisons read it, too.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.config.settings import CONFIG
from gpipe_cli.reporting.run.lines import override
from gpipe_cli.reporting.run.result import read_result, write_result

SWEEP = "sweep.json"
HYDRAS = "multirun.yaml"  # Hydra writes it before it has read the settings
PLACE = "hydra.sweep.dir="
_ENDING_SECONDS = 6.0  # a run whose sweep was killed ends within these


@dataclass(frozen=True)
class Attempt:
    """A run of the sweep that was begun; of those with the same number and round the last one counts."""

    run: int  # the first is 1
    round: int  # likewise
    name: str  # what differs
    folder: str  # within that of the sweep
    exit_code: int | None = None  # None: it has not ended, or the sweep was killed before it did
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class SavedSweep:
    """What sweep.json holds."""

    command: str
    arguments: list[str]
    attempts: list[Attempt]
    abandoned: list[str]  # folders of runs that began again in another one


class SweepFolder:
    """The folder of one sweep, and what its sweep.json holds."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path | None = None) -> None:
        """`path` is that of a sweep that goes on."""
        self.command, self.arguments = command, tuple(arguments)
        self.path = path
        self.resumes = path is not None
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._abandoned: list[str] = []  # folders of runs that began again in another one
        self._lock = contextlib.ExitStack()

    def choose(self, path: Path) -> Path:
        """Where the sweep will lie, locked: at `path`, or beside it if that is taken and was not typed.

        Two that go on with one sweep would run everything twice, and remove what the other is about to do. A run whose
        sweep was killed may still be ending: a sweep that goes on waits for it. Forks of this process hold the lock.

        Raises:
            ValueError: a sweep lies where this one was told to, or is at work there, or no folder can be made there.
        """
        typed = any(argument.startswith(PLACE) for argument in self.arguments)
        setting = override("resume", str(path)) if self.resumes else f"{PLACE}{path}"
        patience = _ENDING_SECONDS if self.resumes else 0.0
        lock = locked_folder(path, setting, new=not typed and not self.resumes, patience_seconds=patience)
        folder = self._lock.enter_context(lock)
        if typed and (folder / SWEEP).exists():
            self._lock.close()
            raise ValueError(f"{setting}: a sweep lies there already; go on with it by resume={path} or choose another")
        self.path = folder
        return folder

    def withdraw(self) -> None:
        """Every run was refused: there was no sweep."""
        assert self.path is not None
        (self.path / SWEEP).unlink(missing_ok=True)

    def discard(self) -> None:
        """Allow others in again, and remove what Hydra has left of a sweep that never began."""
        if self.path is not None and not (self.path / SWEEP).exists():
            (self.path / HYDRAS).unlink(missing_ok=True)
        self._lock.close()

    def last(self, run: int, turn: int, name: str) -> Attempt | None:
        """What became of a run in the round `turn`, as far as it was begun."""
        attempt = self._attempts.get((run, turn))
        return attempt if attempt is not None and attempt.name == name else None

    def record(self, attempt: Attempt) -> None:
        self._attempts[attempt.run, attempt.round] = attempt
        self.write()

    def give_up(self, attempt: Attempt) -> None:
        """The run will begin again in a new folder. Where the old one holds nothing to go on from, it goes.

        TensorBoard would show a run that was stopped half-way beside the one that took its place. A failed run may hold
        the reason, and a checkpoint may be of use: these stay.
        """
        assert self.path is not None
        folder = self.path / attempt.folder
        if not attempt.folder or folder.parent != self.path or folder.name == "..":  # sweep.json was edited
            return
        try:
            status = read_result(folder).get("status")
        except (OSError, ValueError):
            status = None
        if not (folder / CONFIG).is_file():  # it never became a run, and the files there are not ours
            with contextlib.suppress(OSError):  # something does, or not even a folder
                folder.rmdir()
        elif status in (None, "running", "interrupted") and not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self._abandoned.append(attempt.folder)

    def write(self) -> None:
        assert self.path is not None
        runs = [asdict(attempt) for _, attempt in sorted(self._attempts.items())]
        values = {"command": self.command, "arguments": self.arguments, "runs": runs, "abandoned": self._abandoned}
        write_result(self.path, values, SWEEP)

    def read(self) -> None:
        """Takes over what sweep.json holds.

        Raises:
            ValueError: it cannot be read, or is of another command.
        """
        assert self.path is not None
        saved = read_sweep(self.path)
        if saved.command != self.command:
            raise ValueError(
                f"resume={self.path}: is a sweep of gpipe {saved.command}; go on with it by "
                f"gpipe {saved.command} {override('resume', str(self.path))}"
            )
        self.arguments = tuple(argument for argument in saved.arguments if not argument.startswith(PLACE))
        self._attempts = {(attempt.run, attempt.round): attempt for attempt in saved.attempts}
        self._abandoned = saved.abandoned


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
    sweep.json has a record of it. One line for each.
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
        with contextlib.suppress(OSError, ValueError):  # `runs_without_result` reports it
            saved = read_sweep(path)
            kept = {attempt.folder for attempt in saved.attempts}
            found |= {(path / name).resolve() for name in saved.abandoned if name not in kept}
    return found


def _sweeps(folder: Path) -> Iterator[Path]:
    for path in (folder, *sorted(file.parent for file in folder.glob(f"*/{SWEEP}"))):
        if (path / SWEEP).is_file():
            yield path
