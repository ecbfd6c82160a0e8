"""The folder of a sweep and its sweep.json: what was asked for, and what became of it so far.

Tables of the paper take hours. A sweep that was interrupted goes on with what its folder says, in the same folder:
what is finished stays as it is, and the command line need not be remembered.
"""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpipe_cli.commands import CommandLine, arranged, read
from gpipe_cli.commands.folders import absent_above, remove_empty
from gpipe_cli.commands.sweep_record import SWEEP, Attempt, read_sweep
from gpipe_cli.config.typed import quoted, show
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.reporting.compare.run_record import CONFIG
from gpipe_cli.reporting.run.lines import override
from gpipe_cli.reporting.run.result import read_result, write_result
from gpipe_cli.system.files import FolderInUseError, FolderLock

HYDRAS = "multirun.yaml"  # Hydra writes it before it has looked at the settings
_PLACE = "hydra.sweep.dir="
_ENDING_SECONDS = 6.0  # a run whose sweep was killed ends within these
# Settings of a place that would have no effect in a sweep, and in a single run; and those that have.
_SWEEPS, _RUNS = "the folder of a sweep, in which those of its runs lie, is given by", "the folder of a run is given by"
_NO_PLACE = {
    True: {"run_folder": (_SWEEPS, "hydra.sweep.dir"), "hydra.run.dir": (_SWEEPS, "hydra.sweep.dir")},
    False: {"hydra.sweep.dir": (_RUNS, "run_folder"), "hydra.run.dir": (_RUNS, "run_folder")},
}


class SweepFolder:
    """What belongs to one sweep, from its command line to its end; of a single run the command line alone."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path | None = None) -> None:
        """`path` is that of a sweep that goes on."""
        self.command, self.arguments = command, tuple(arguments)
        self.path = path
        self.resumes = path is not None
        self.planned = 0  # runs in all, of all rounds; known once the sweep has begun
        self.rounds = 1  # likewise
        self.refused = False  # as a whole
        self._options: list[str] = []
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._abandoned: list[str] = []  # folders of runs that began again in another one
        self._above: list[Path] = []  # folders that were made for this one
        self._lock: FolderLock | None = None

    @property
    def place(self) -> list[str]:
        """What tells Hydra where the sweep goes on."""
        if not self.resumes:
            return []
        return [f"{_PLACE}{quoted(self.path)}"]

    @property
    def go_on_with(self) -> str:
        """The command that does what is left."""
        return f"gpipe {self.command} {override('resume', str(self.path))}"

    def choose(self, path: Path) -> Path:
        """Where the sweep will lie: at `path`; if another sweep of this second has taken it, beside it.

        Raises:
            ValueError: torchrun has started several of us, a sweep lies where this one was told to or is still at work
                there, or no folder can be made there.
        """
        if torchrun() is not None:
            raise ValueError(
                f"torchrun: each of its processes would run the whole sweep; call gpipe {self.command} -m on one "
                "machine without it, or torchrun once for each configuration"
            )
        count, free, self._above = 1, path, absent_above(path)
        while not self._take(free):
            if any(argument.startswith(_PLACE) for argument in self.arguments):
                raise ValueError(
                    f"{_PLACE}{path}: a sweep lies there already; go on with it by resume={path}, or choose another"
                )
            count += 1
            free = path.with_name(f"{path.name}-{count}")
        self.path = free
        return free

    def _take(self, folder: Path) -> bool:
        """Makes the folder and keeps others out of it, as long as we or a run of ours live; whether that was possible.

        Two that go on with one sweep would do everything twice, and clear away what the other is about to do. A run
        whose sweep was killed may still be ending: for that we wait.

        Raises:
            ValueError: no folder can be made there, or a sweep that is to go on is at work.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder, _ENDING_SECONDS if self.resumes else 0.0)
        except OSError as error:
            raise ValueError(f"{folder}: no folder can be made there ({error.strerror}); choose another") from error
        except FolderInUseError as error:
            if self.resumes:
                raise ValueError(f"{override('resume', str(folder))}: {error}; wait for its end, or stop it") from error
            return False
        if not self.resumes and (folder / SWEEP).exists():
            self._release()
            return False
        return True

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def held(self) -> tuple[int, ...]:
        """The open files that a run inherits."""
        return () if self._lock is None else (self._lock.descriptor,)

    def begin(self, options: Sequence[str]) -> None:
        """The settings are known to be readable: the sweep exists from now on."""
        self._options = list(options)
        self._write()

    def withdraw(self) -> None:
        """Every run was refused, for the same reason: there was no sweep."""
        assert self.path is not None
        self.refused, self._options = True, []
        (self.path / SWEEP).unlink(missing_ok=True)

    def discard(self) -> None:
        """Lets others in again, and removes what Hydra has left of a sweep that never began."""
        self._release()
        if self.path is None or self._options or self.resumes:
            return
        if {file.name for file in self.path.glob("*")} <= {HYDRAS}:
            (self.path / HYDRAS).unlink(missing_ok=True)
            remove_empty(self.path, *self._above)

    def last(self, run: int, turn: int, name: str) -> Attempt | None:
        """What became of a run in the round `turn`, as far as it was begun."""
        attempt = self._attempts.get((run, turn))
        return attempt if attempt is not None and attempt.name == name else None

    def record(self, attempt: Attempt) -> None:
        self._attempts[attempt.run, attempt.round] = attempt
        self._write()

    def give_up(self, attempt: Attempt) -> None:
        """The run will begin again in a new folder. Where the old one holds nothing to go on from, it goes.

        A run that was stopped half-way would stand in TensorBoard beside the one that took its place. What failed may
        say why, and a checkpoint may be of use: these stay.
        """
        assert self.path is not None
        folder = self.path / attempt.folder
        if not attempt.folder or folder.parent != self.path or folder.name == "..":  # somebody has edited sweep.json
            return
        try:
            status = read_result(folder).get("status")
        except (OSError, ValueError):
            status = None
        if not (folder / CONFIG).is_file():  # it never became a run, and what lies there is not ours
            with contextlib.suppress(OSError):  # something does, or not even a folder
                folder.rmdir()
        elif status in (None, "running", "interrupted") and not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self._abandoned.append(attempt.folder)

    def _write(self) -> None:
        assert self.path is not None
        runs = [asdict(attempt) for _, attempt in sorted(self._attempts.items())]
        values = {"command": self.command, "arguments": self.arguments, "options": self._options, "runs": runs}
        write_result(self.path, {**values, "abandoned": self._abandoned}, SWEEP)

    def read(self) -> None:
        """Takes over what sweep.json says.

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
        self.arguments = tuple(argument for argument in saved.arguments if not argument.startswith(_PLACE))
        self._attempts = {(attempt.run, attempt.round): attempt for attempt in saved.attempts}
        self._abandoned = saved.abandoned


def sweep_of(command: str, arguments: Sequence[str]) -> tuple[SweepFolder, list[str], CommandLine]:
    """The sweep that the arguments begin or go on with, and its arguments: arranged for Hydra, and read.

    Raises:
        ValueError: the user can mend it; one line.
    """
    given = arranged(arguments)
    line = read(command, given)
    folder = _resumed_sweep(command, line)
    if folder is None:
        _refuse_place(line)
        return SweepFolder(command, arguments), given, line
    given = arranged([*folder.arguments, *folder.place])
    return folder, given, read(command, given)


def _refuse_place(line: CommandLine) -> None:
    """Raises ValueError for a folder that would have no effect: a run and a sweep are told theirs by two settings."""
    sweep = bool(line.options["multirun"]) or str(line.overrides.get("hydra.mode")) == "MULTIRUN"
    for key, (remedy, meant) in _NO_PLACE[sweep].items():
        if (value := line.overrides.get(key)) is not None:
            raise ValueError(f"{key}={show(value)}: {remedy} {override(meant, str(value))}")


def _resumed_sweep(command: str, line: CommandLine) -> SweepFolder | None:
    """The sweep that `resume` names; None if it names none.

    Raises:
        ValueError: more is given than that, or it is the sweep of another command.
    """
    given = line.overrides.get("resume")
    if not isinstance(given, str) or "resume" in line.swept or not (Path(given) / SWEEP).is_file():
        return None
    typed = [str(one) for one in line.options["overrides"]]  # type: ignore[attr-defined]  # a list, as argparse says
    more = [one for one in typed if one.partition("=")[0].lstrip("+") != "resume"]
    named = {"config_name": "-cn", "config_dir": "-cd", "config_path": "-cp", "cfg": "--cfg", "info": "--info"}
    more += [f"{flag} {value}" for key, flag in named.items() if (value := line.options.get(key)) is not None]
    if more:
        raise ValueError(
            f"{more[0]}: resume={given} is a sweep, whose runs would then differ in more than it says; leave it out"
        )
    folder = SweepFolder(command, (), Path(given))
    folder.read()
    return folder
