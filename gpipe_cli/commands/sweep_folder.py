"""The folder of a sweep and its sweep.json: what was asked for, and what became of it so far.

Tables of the paper take hours. A sweep that was interrupted goes on with what its folder says, in the same folder:
what is finished stays as it is, and the command line need not be remembered.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpipe_cli.commands import CommandLine, arranged, read
from gpipe_cli.reporting.facts import override
from gpipe_cli.reporting.result import read_result, write_result
from gpipe_cli.reporting.run_record import CONFIG
from gpipe_cli.typed import quoted

SWEEP = "sweep.json"
HYDRAS = "multirun.yaml"  # Hydra writes it before it has looked at the settings
_PLACE = "hydra.sweep.dir="


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


class SweepFolder:
    """What belongs to one sweep, from its command line to its end; of a single run the command line alone."""

    def __init__(self, command: str, arguments: Sequence[str], path: Path | None = None) -> None:
        """`path` is that of a sweep that goes on."""
        self.command, self.arguments = command, tuple(arguments)
        self.path = path
        self.resumes = path is not None
        self.planned = 0  # runs in all, of all rounds; known once the sweep has begun
        self.rounds = 1  # likewise
        self._options: list[str] = []
        self._attempts: dict[tuple[int, int], Attempt] = {}

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
            ValueError: a sweep lies where this one was told to, or no folder can be made there.
        """
        count, free = 1, path
        while not self.resumes and (free / SWEEP).exists():
            if any(argument.startswith(_PLACE) for argument in self.arguments):
                raise ValueError(
                    f"{_PLACE}{path}: a sweep lies there already; go on with it by resume={path}, or choose another"
                )
            count += 1
            free = path.with_name(f"{path.name}-{count}")
        try:
            free.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{free}: no folder can be made there ({error.strerror}); choose another") from error
        self.path = free
        return free

    def begin(self, options: Sequence[str]) -> None:
        """The settings are known to be readable: the sweep exists from now on."""
        self._options = list(options)
        self._write()

    def discard(self) -> None:
        """Removes what Hydra has left of a sweep that never began."""
        if self.path is None or self._options or self.resumes:
            return
        if {file.name for file in self.path.glob("*")} <= {HYDRAS}:
            (self.path / HYDRAS).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is the current one, or gone
                self.path.rmdir()

    def last(self, run: int, turn: int, name: str) -> Attempt | None:
        """What became of a run in the round `turn`, as far as it was begun."""
        attempt = self._attempts.get((run, turn))
        return attempt if attempt is not None and attempt.name == name else None

    def record(self, attempt: Attempt) -> None:
        self._attempts[attempt.run, attempt.round] = attempt
        self._write()

    def _write(self) -> None:
        assert self.path is not None
        runs = [asdict(attempt) for _, attempt in sorted(self._attempts.items())]
        values = {"command": self.command, "arguments": self.arguments, "options": self._options, "runs": runs}
        write_result(self.path, values, SWEEP)

    def read(self) -> None:
        """Takes over what sweep.json says.

        Raises:
            ValueError: it cannot be read, or is of another command.
        """
        assert self.path is not None
        command, given, attempts = _read(self.path)
        if command != self.command:
            raise ValueError(
                f"resume={self.path}: is a sweep of gpipe {command}; go on with it by "
                f"gpipe {command} {override('resume', str(self.path))}"
            )
        self.arguments = tuple(argument for argument in given if not argument.startswith(_PLACE))
        self._attempts = {(attempt.run, attempt.round): attempt for attempt in attempts}


def runs_without_result(folder: Path) -> list[str]:
    """What a comparison cannot find in `folder`, a sweep or one with sweeps: runs that ended before they were one.

    A setting that is impossible (more partitions than layers) is refused before there is anything to write down; only
    the sweep knows that it was asked for. One line for each.
    """
    lines: dict[tuple[Path, str], str] = {}
    for path in (folder, *sorted(file.parent for file in folder.glob(f"*/{SWEEP}"))):
        if not (path / SWEEP).is_file():
            continue
        try:
            _, _, attempts = _read(path)
        except (OSError, ValueError) as error:
            lines[path, ""] = str(error)
            continue
        for attempt in attempts:
            if attempt.exit_code and not (path / attempt.folder / CONFIG).is_file():
                why = attempt.error or f"exit code {attempt.exit_code}"
                lines[path, attempt.name] = f"{path}: {attempt.name} ended before its first step: {why}"
    return list(lines.values())


def sweep_of(command: str, arguments: Sequence[str]) -> tuple[SweepFolder, list[str], CommandLine]:
    """The sweep that the arguments begin or go on with, and its arguments: arranged for Hydra, and read.

    Raises:
        ValueError: the user can mend it; one line.
    """
    given = arranged(arguments)
    line = read(command, given)
    folder = _resumed_sweep(command, line)
    if folder is None:
        return SweepFolder(command, arguments), given, line
    given = arranged([*folder.arguments, *folder.place])
    return folder, given, read(command, given)


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


def _read(path: Path) -> tuple[str, list[str], list[Attempt]]:
    """Command, arguments and runs of the sweep in `path`.

    Raises:
        ValueError: it cannot be read.
    """
    saved = read_result(path, SWEEP)
    try:
        given = [str(argument) for argument in saved["arguments"]]
        return saved["command"], given, [Attempt(**values) for values in saved["runs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path / SWEEP}: cannot be read as a sweep ({type(error).__name__}: {error}); begin it again"
        ) from error
