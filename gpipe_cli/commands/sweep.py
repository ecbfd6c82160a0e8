"""A sweep, `gpipe train -m micro_batches=1,4,8`: its runs in turn, each in a fork of this process.

The grammar is Hydra's, but not the launcher: that would run all jobs in the same process, where what a failed job
leaves behind (tensors, process groups, a CUDA context) affects the next. A failed run is reported at once and the
others go on. sweep.json records the runs that have ended, so that a sweep can be resumed.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from gpipe_cli.commands import command_runner
from gpipe_cli.commands.command_line import CommandLine, parse_command_line, setting_values
from gpipe_cli.commands.compose_config import TRAINING_KEYS, ConfigComposer, combinations
from gpipe_cli.commands.folders import numbered_paths
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.run_start import start_run
from gpipe_cli.commands.sweep_folder import SWEEP_DIR_SETTING, SWEEP_FILE, Attempt, SweepFolder
from gpipe_cli.config.groups import TARGET
from gpipe_cli.config.schema import quote
from gpipe_cli.config.settings import (
    ONE_DEVICE,
    allow_target,
    format_target_setting,
    has_checkpoint,
    key_of,
    single_device_baseline,
    target_of,
)
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import (
    BAD_INPUT,
    INTERRUPTED,
    SIGPIPE_EXIT,
    STOPPED,
    InputError,
    InvalidSettingError,
    InvalidValueError,
)
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.lines import format_override, format_resume_command
from gpipe_cli.reporting.tables.sweep import NOT_RETRYABLE, Run, bench_status, show_remaining
from gpipe_cli.results.run import run_result_or_none
from gpipe_cli.system.interrupts import StopRequested

# Turns a tree and the typed settings into a request; raises InputError for a wrong setting.
MakeRequest = Callable[[DictConfig, Mapping[str, object]], RunRequest]

_FINAL_STATUSES = ("completed", "dry_run")  # statuses of a result
_UNFINISHED_CODES = (None, INTERRUPTED, STOPPED, SIGPIPE_EXIT)  # exit codes


@dataclass(frozen=True)
class Cell:
    """A combination of settings that a sweep runs; in a sweep of several rounds it runs once in each."""

    run_number: int  # within the sweep; the first is 1, the baseline of measurements 0
    name: str  # the settings that differ: `micro_batches=4`
    varied: dict[str, object]  # the same as settings and values, in the order in which they were typed
    request: RunRequest | InputError  # InputError: why it cannot run


class Sweep:
    """The sweep that `-m` asks for."""

    def __init__(
        self, line: CommandLine, folder: SweepFolder, make_request: MakeRequest, typed: Sequence[str] = ()
    ) -> None:
        """`typed`: the arguments of this start of the sweep; `line`: those of its first start."""
        self.line, self._typed = line, typed
        self._targets: tuple[str, ...] = ()  # the functions that its runs call
        self.planned = 0  # runs of all rounds together; 0 until the sweep has begun
        self.rounds = 1
        self.baseline: int | None = None  # number of the cell whose speed is 1 for the others; None: the first measured
        self.runs: list[Run] = []  # runs that have ended, in earlier starts of this sweep or in this start
        self._folder, self._make_request = folder, make_request
        self._stop_exception: type[BaseException] | None = None  # the exception that ends the sweep early

    @property
    def path(self) -> Path:
        assert self._folder.path is not None
        return self._folder.path

    def run(self, line: CommandLine, show: Callable[[], None]) -> None:
        """Perform all runs. `line`: `self.line`, perhaps with more settings; `show` is called at the end if a run has
        ended. Raises InputError."""
        try:
            self._run_all(line)
        finally:  # Ctrl-C comes here, too
            self._folder.release()
            if self.runs:
                try:
                    show()
                finally:
                    self._show_rest()

    def _show_rest(self) -> None:
        """Show the command that completes an incomplete sweep."""
        if len(self.runs) < self.planned or not all(map(self._is_final, self.runs)):
            show_remaining(self.planned, self.runs, format_resume_command(self.line.command, self.path, self._targets))

    def _run_all(self, line: CommandLine) -> None:
        check_not_torchrun("each of its processes would run the whole sweep; call gpipe without it, or it for each run")
        composer = ConfigComposer(line, TRAINING_KEYS)
        whole = composer.compose_full(line.unswept)
        jobs = combinations(line, whole.hydra.sweeper.params)
        self._folder.lock(self._folder.path or Path(whole.hydra.sweep.dir))
        begins = not self._folder.resumes
        requests = [self._request(composer, job) for job in jobs]
        if not begins:
            saved = _targets(requests)
            requests = [self._with_target(request, saved) for request in requests]
        self._targets = _targets(requests)
        refusals = [request for request in requests if isinstance(request, InputError)]
        for input_error in refusals if begins else ():
            if isinstance(input_error, InvalidValueError) or len(refusals) == len(requests):
                raise input_error
        named = zip(describe_differences(jobs, self.line.single_valued), requests, strict=True)
        cells = [Cell(number, *name, request) for number, (name, request) in enumerate(named, 1)]
        if self.line.command == "bench" and len(cells) > 1 and "recipe" not in whole:  # a recipe's table has a baseline
            self._add_baseline(cells)
        self._folder.record()
        benches = [request.bench for request in requests if isinstance(request, RunRequest)]
        self.rounds = max((bench.rounds for bench in benches if bench is not None), default=1)
        self.planned = len(cells) * self.rounds
        last: dict[int, Run] = {}
        for round_number, cell in itertools.product(range(1, self.rounds + 1), cells):
            if (
                (before := last.get(cell.run_number))
                and self._is_final(before)
                and bench_status(before) in NOT_RETRYABLE
            ):
                self.planned -= 1  # another round would give the same
                continue
            run = self._run_round(cell, round_number, cells[-1].run_number)
            if run is not None:  # None: the sweep is ending, and this run had not ended earlier
                last[cell.run_number] = run
                self.runs.append(run)
        if self._stop_exception is not None:
            raise self._stop_exception
        refused = [run for run in self.runs if run.exit_code == BAD_INPUT]
        if begins and len(refused) == len(self.runs):
            (self.path / SWEEP_FILE).unlink()
            self.runs.clear()
            raise InputError(refused[0].error)

    def _add_baseline(self, cells: list[Cell]) -> None:
        """Make a single device the baseline, with the settings of the first cell that can run: a cell of the sweep, or
        an additional cell."""
        requests = {cell.run_number: cell.request for cell in cells if isinstance(cell.request, RunRequest)}
        if not requests:
            return
        first = next(iter(requests))
        auto = tuple(key for key in requests[first].auto if key not in ONE_DEVICE)
        plain = replace(requests[first], config=single_device_baseline(requests[first].config), auto=auto)
        for number, request in requests.items():
            if request.config.recompute != "always" and replace(request.config, recompute="never") == plain.config:
                self.baseline = number
                return
        self.baseline = 0
        varied = {key: ONE_DEVICE.get(key, value) for key, value in cells[first - 1].varied.items()}
        cells.insert(0, Cell(0, "one device", varied, plain))

    def _request(self, composer: ConfigComposer, job: Sequence[str]) -> RunRequest | InputError:
        try:
            return self._make_request(composer.compose(job), setting_values(job))
        except InputError as error:
            return error

    def _with_target(self, request: RunRequest | InputError, saved: Sequence[str]) -> RunRequest | InputError:
        """The request of a sweep that is resumed, with the function that was named again; `saved`: the functions of all
        runs. Raises InvalidSettingError if it was not."""
        if isinstance(request, InputError):
            return request
        target, targets = target_of(request.config), self._folder.targets
        if target not in targets:
            target = targets[0] if len(targets) == len(saved) == 1 else None
        return replace(request, config=allow_target(request.config, target, self.path, format_target_setting(*saved)))

    def _run_round(self, cell: Cell, round_number: int, last: int) -> Run | None:
        """The run of a cell in round `round_number`; None if the sweep ended before it began."""
        position = f"run {cell.run_number} of {last}" if cell.run_number else "baseline"
        title = f"{position}{f', round {round_number} of {self.rounds}' if self.rounds > 1 else ''}: {cell.name}"
        before = self._folder.attempts.get((cell.run_number, round_number))
        before = before if before is not None and before.name == cell.name else None
        if before is not None and self._is_final(run := self._to_run(before, cell)):
            self._print(Text(f"{title}: {self._status(run)} before, skipped"))
            return run
        self._print(Text(title), rule=True)
        if self._stop_exception is not None:
            return None
        if before is not None and self.line.command == "train" and before.folder:
            folder = self.path / before.folder
            if has_checkpoint(folder) and not folder.is_symlink():  # through a link nothing is written
                run = self._run_cell(cell, before, folder, resume=True)
                if run.exit_code != BAD_INPUT or self._stop_exception is not None:
                    return run
                self._print(Text(f"{cell.name} cannot go on; it begins again"))
        if before is not None:
            self._folder.discard(before)
        return self._run_cell(
            cell, Attempt(cell.run_number, round_number, cell.name, ""), unused_folder(self.path, cell.name)
        )

    def _run_cell(self, cell: Cell, attempt: Attempt, folder: Path, *, resume: bool = False) -> Run:
        """Run a cell in a fork of this process; `resume`: from the last checkpoint in `folder`."""
        attempt = replace(attempt, folder=folder.name, exit_code=None, error="")
        self._folder.record(attempt)
        begin = time.monotonic()
        try:
            if isinstance(request := cell.request, InputError):
                ending = command_runner.CommandResult(BAD_INPUT, str(request))
            else:
                if not request.config.dry_run:
                    fork_server.start(request.config)  # all forks share it
                command_runner.import_torch()
                request_in = request.to_resume if resume else request.in_folder
                typed = (self.line.command, *self._typed)
                ending = command_runner.wait_for(
                    command_runner.fork_command(lambda: start_run(request_in(folder), *typed))
                )
        except KeyboardInterrupt as asked:
            self._stop_exception = type(asked)
            ending = command_runner.CommandResult(INTERRUPTED)
        exceptions = {STOPPED: StopRequested, SIGPIPE_EXIT: BrokenPipeError}  # what ended the fork ends the sweep
        self._stop_exception = exceptions.get(ending.exit_code, self._stop_exception)
        if ending.exit_code < 0:
            fork_server.kill()  # ends the workers of a run that was killed before it could end them
        result = run_result_or_none(folder)
        error = ((result and result.error) or ending.error) if ending.exit_code else ""
        attempt = replace(attempt, exit_code=ending.exit_code, seconds=time.monotonic() - begin, error=error)
        self._folder.record(attempt)
        run = self._to_run(attempt, cell)
        if run.exit_code:
            why = "" if self._stop_exception in (KeyboardInterrupt, StopRequested) else f": {error}"
            self._print(Text.assemble((self._status(run), "red"), f" {cell.name}{why}"), always=True)
        return run

    def _to_run(self, attempt: Attempt, cell: Cell) -> Run:
        folder = self.path / attempt.folder
        result = run_result_or_none(folder)
        code = INTERRUPTED if attempt.exit_code in _UNFINISHED_CODES else attempt.exit_code
        if result is not None and result.status in _FINAL_STATUSES:  # even if it was interrupted while it drew pictures
            code = 0
        seconds = attempt.seconds or (result and result.seconds) or 0.0
        return Run(attempt.name, folder, code, seconds, result, attempt.run, attempt.round, cell.varied, attempt.error)

    def _is_final(self, run: Run) -> bool:
        """Whether another attempt would give the same."""
        if self.line.command == "bench":
            if bench_status(run) in NOT_RETRYABLE:
                return True
            return bench_status(run) == "measured" and run.result is not None and run.result.status == "completed"
        return run.result is not None and run.result.status in _FINAL_STATUSES

    def _status(self, run: Run) -> str:
        return bench_status(run).replace("_", " ") if self.line.command == "bench" else run.status

    def _print(self, line: Text, *, rule: bool = False, always: bool = False) -> None:
        """Prints a line, unless the sweep has ended. When nobody reads it (`| head`), the sweep ends, and keeps the
        results that it has."""
        if self._stop_exception is not None and not always:
            return
        try:
            if rule:
                Console().rule(line, align="left")
            else:
                Console().print(line, soft_wrap=True)
        except SystemExit:  # rich raises it when the pipe is closed
            self._stop_exception = BrokenPipeError


def make_sweep(line: CommandLine, arguments: Sequence[str], make_request: MakeRequest) -> Sweep | None:
    """The sweep that the arguments begin or resume, None for a single run; `line` is read from them. Raises InputError
    for what the user can fix."""
    folder = _resumed_folder(line)
    if folder is None:
        _check_folders_have_effect(line)
        sweeps = line.options["multirun"] and not line.only_prints
        return Sweep(line, SweepFolder(line.command, arguments), make_request, arguments) if sweeps else None
    line = replace(
        parse_command_line(line.command, [*folder.arguments, f"{SWEEP_DIR_SETTING}{quote(folder.path)}"]),
        from_file=True,
    )
    if not line.options["multirun"] or line.only_prints:
        raise InputError(
            f"{folder.path}/{SWEEP_FILE}: cannot be read as a sweep (its arguments begin none); begin it again"
        )
    return Sweep(line, folder, make_request, arguments)


def _targets(requests: Sequence[RunRequest | InputError]) -> tuple[str, ...]:
    """The functions that the runs call, each once."""
    called = [target_of(request.config) for request in requests if isinstance(request, RunRequest)]
    return tuple(dict.fromkeys(target for target in called if target is not None))


def _check_folders_have_effect(line: CommandLine) -> None:
    """Raises InvalidSettingError for a run's folder given to a sweep, and a sweep's folder given to a run."""
    what, given_by, other = "a run", "run_folder", "hydra.sweep.dir"
    if line.options["multirun"]:
        what, given_by, other = "a sweep, in which those of its runs lie,", other, given_by
    for key in (other, "hydra.run.dir"):
        if (value := line.overrides.get(key)) is not None:
            raise InvalidSettingError(
                key, value, f"the folder of {what} is given by {format_override(given_by, str(value))}"
            )


def _resumed_folder(line: CommandLine) -> SweepFolder | None:
    """The sweep that `resume` names; None if that is a run. Raises InputError if other settings are given too, but the
    functions that its runs call, or the sweep is another command's."""
    resumed = line.overrides.get("resume")
    if not isinstance(resumed, str) or "resume" in line.swept or not (Path(resumed) / SWEEP_FILE).is_file():
        return None
    more = [setting for setting in line.typed if setting.partition("=")[0].lstrip("+") not in ("resume", TARGET)]
    named = {"config_name": "-cn", "config_dir": "-cd", "config_path": "-cp", "cfg": "--cfg", "info": "--info"}
    more += [f"{flag} {value}" for key, flag in named.items() if (value := line.options.get(key)) is not None]
    if more:
        raise InputError(f"{more[0]}: resume={resumed} is a sweep, whose runs would then differ in more; leave it out")
    folder = SweepFolder.read(Path(resumed))
    if folder.command != line.command:
        raise InputError(f"resume={resumed}: is a sweep of gpipe {folder.command}; go on with it by that command")
    folder.arguments = [argument for argument in folder.arguments if not argument.startswith(SWEEP_DIR_SETTING)]
    if TARGET in line.overrides:
        folder.targets = tuple(str(setting_values(job)[TARGET]) for job in combinations(line))
    return folder


def describe_differences(jobs: Sequence[Sequence[str]], same: Collection[str]) -> list[tuple[str, dict[str, object]]]:
    """The settings in which each job differs from the others: as a name, `partitions=2,seed=4`, and their values in the
    order in which they were typed. `same`: the settings that were typed with a single value."""

    def varies(setting: str) -> bool:
        return key_of(setting) not in same and (len(jobs) == 1 or any(setting not in job for job in jobs))

    varied = [[setting for setting in job if varies(setting)] for job in jobs]
    return [(",".join(sorted(setting.lstrip("+") for setting in job)) or "run", setting_values(job)) for job in varied]


def unused_folder(parent: Path, name: str) -> Path:
    """A folder for the run `name` that does not exist yet."""
    return next(folder for folder in numbered_paths(parent / folder_name(name)) if not os.path.lexists(folder))


def folder_name(name: str) -> str:
    """The folder name of the run `name`, of characters that every file system accepts."""
    return re.sub(r"[^\w.,=+\[\]-]", "_", name.replace("'", "").replace('"', ""))[:150].strip(".") or "run"
