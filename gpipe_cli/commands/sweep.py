"""A sweep, `gpipe train -m micro_batches=1,4,8`: its runs one after the other, each in a fork of this process.

Hydra's grammar and sweepers stay as they are; its own launcher would run all jobs in one process, where what a failed
job leaves (tensors, process groups, a CUDA context) stays for the next one. A failing run is reported at once and the
others go on. What has ended is written down: a sweep can be resumed.
"""

import importlib.util
import itertools
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from gpipe_cli.commands import outcome
from gpipe_cli.commands.command_line import TRAINING_KEYS, CommandLine, JobTrees, compose, drop_others, read, translated
from gpipe_cli.commands.folders import numbered
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.sweep_folder import PLACE, SWEEP, Attempt, SweepFolder, result_or_nothing
from gpipe_cli.config.settings import has_checkpoint, key_of
from gpipe_cli.config.typed import RefusedError, SettingError, one_line, quoted, show
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.lines import override
from gpipe_cli.reporting.tables.sweep import HOPELESS, Run, bench_status
from gpipe_cli.results.files import value_of
from gpipe_cli.system.interrupts import Stopped

# What a tree and the settings that were typed ask for; raises InputError for a wrong setting.
Requested = Callable[[DictConfig, Mapping[str, object]], RunRequest]

SWEEPER = "hydra/sweeper"
SEARCH = ("optuna", "hydra_plugins.hydra_optuna_sweeper")  # modules, and loggers
FOUND = "optimization_results.yaml"  # Optuna's sweeper writes it into the folder of the sweep
_UNFINISHED = (None, outcome.INTERRUPTED, outcome.STOPPED, outcome.UNREAD)  # exit codes


@dataclass(frozen=True)
class Cell:
    """One of the combinations of settings that a sweep runs; in a sweep of several rounds it runs once in each."""

    number: int  # within the sweep; the first is 1
    name: str  # what differs: `micro_batches=4`
    varied: dict[str, object]  # the same as settings and values, in the order in which they were typed
    request: RunRequest | InputError  # why it cannot run


class Sweep(Launcher):
    """What `-m` asks for: how Hydra's sweepers run their jobs. For a single run it has nothing to do."""

    current: "Sweep"  # that of this process

    def __init__(self, line: CommandLine, folder: SweepFolder, requested: Requested, typed: Sequence[str] = ()) -> None:
        """`typed` are the arguments of this start of the sweep, those of `line` of its first one."""
        self.line, self._typed = line, typed
        self.planned = 0  # runs in all, of all rounds; known once the sweep has begun
        self.rounds = 1
        self.runs: list[Run] = []  # that have ended, also before the sweep went on
        self._folder, self._requested = folder, requested
        self._ended: type[BaseException] | None = None  # why it ends before all was run

    @property
    def path(self) -> Path:
        assert self._folder.path is not None
        return self._folder.path

    @property
    def go_on_with(self) -> str:
        """The command that does what is left."""
        return f"gpipe {self.line.command} {override('resume', str(self.path))}"

    @property
    def best(self) -> str:
        """What a search has found: the settings of its best run, and their objective; "" where none was searched."""
        if self._folder.path is None or not (file := self.path / FOUND).is_file():
            return ""
        found = OmegaConf.load(file)
        assert isinstance(found, DictConfig)
        if "best_params" not in found:  # a search for several objectives at once
            return str(file)
        settings = " ".join(f"{key}={show(value)}" for key, value in found.best_params.items())
        return f"{settings}: {found.best_value:.6g} ({file})"

    def compose(self, line: CommandLine) -> DictConfig | None:
        """As `compose` in command_line. What a search fails with is its settings' fault, or that of runs which have all
        failed: the sweep's table has them. Raises RefusedError for the former."""
        try:
            return compose(line, TRAINING_KEYS)
        except Exception as error:
            # Optuna has no type of error for what is wrong with a search: where it was raised tells whose it is
            frames = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
            if [name for name in frames if name.startswith(("gpipe_cli.", *SEARCH))][-1].startswith("gpipe_cli."):
                raise
            if self.runs and all(run.failed for run in self.runs):
                return None
            why = f"{one_line(error)}; change what is searched, or hydra.sweeper.n_trials and the like"
            raise RefusedError(SWEEPER, "optuna", why) from error

    def end(self) -> None:
        """Allow others into the folder again; nothing is left of a sweep that never began."""
        self._folder.release()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set `hydra.sweep.dir` in `config`, which the sweeper has too, to the folder that the sweep gets."""
        if torchrun() is not None:
            raise InputError(
                f"torchrun: each of its processes would run the whole sweep; call gpipe {self.line.command} -m on one "
                "machine without it, or torchrun once for each configuration"
            )
        for name in SEARCH:  # that a run failed stands in our table
            logging.getLogger(name).setLevel(logging.CRITICAL)
        loader = hydra_context.config_loader
        self._trees = JobTrees(lambda job: loader.load_sweep_config(config, list(job)))
        folder = self._folder.choose(Path(config.hydra.sweep.dir))
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of a sweeper's jobs, of which the first one has this number, counted from 0.

        Returns:
            for a sweeper that searches: the `objective` of each.
        """
        begins = initial_job_idx == 0 and not self._folder.resumes
        requests = [self._request(job) for job in job_overrides]
        refusals = [request for request in requests if isinstance(request, InputError)]
        for refusal in refusals if begins else ():
            if isinstance(refusal, SettingError) or len(refusals) == len(requests):
                raise refusal
        jobs = [[o for o in job if not o.lstrip("+~").startswith("hydra")] for job in job_overrides]
        named = zip(differences(jobs, self.line.typed), requests, strict=True)
        cells = [Cell(number, *of, request) for number, (of, request) in enumerate(named, initial_job_idx + 1)]
        self._folder.record()
        self.rounds = max((one.rounds for one in requests if isinstance(one, RunRequest)), default=1)
        self.planned += len(cells) * self.rounds
        last: dict[int, Run] = {}
        for turn, cell in itertools.product(range(1, self.rounds + 1), cells):
            if (before := last.get(cell.number)) and self._is_final(before) and bench_status(before) in HOPELESS:
                self.planned -= 1  # another round would give the same
                continue
            run = self._turn(cell, turn, initial_job_idx + len(cells))
            if run is not None:  # once the sweep has ended, those that ended before it went on
                last[cell.number] = run
                self.runs.append(run)
        if self._ended is not None:
            raise self._ended
        refused = [run for run in self.runs if run.exit_code == outcome.BAD_INPUT]
        if begins and len(refused) == len(self.runs):
            (self.path / SWEEP).unlink()
            self.runs.clear()
            raise InputError(refused[0].error)
        # that a run failed is not Hydra's to report
        returns = [JobReturn(overrides=job, status=JobStatus.COMPLETED) for job in job_overrides]
        for cell, returned in zip(cells, returns, strict=True):
            returned.return_value = objective(self.line.command, last[cell.number].result)
        return returns

    def _request(self, job: Sequence[str]) -> RunRequest | InputError:
        try:
            tree = self._trees.tree(job)
            with read_write(tree), open_dict(tree):
                del tree["hydra"]
            drop_others(self.line.command, tree)
            return self._requested(tree, values_of(job))
        except InputError as error:
            return error
        except (HydraException, OmegaConfBaseException) as error:
            return translated(error, TRAINING_KEYS)

    def _turn(self, cell: Cell, turn: int, of: int) -> Run | None:
        """One run of a cell; None if the sweep ended before it began."""
        title = f"run {cell.number} of {of}{f', round {turn} of {self.rounds}' if self.rounds > 1 else ''}: {cell.name}"
        before = self._folder.attempts.get((cell.number, turn))
        if before is not None and before.name != cell.name:
            before = None
        if before is not None and self._is_final(run := self._run(before, cell)):
            self._say(Text(f"{title}: {self._status(run)} before, skipped"))
            return run
        self._say(Text(title), rule=True)
        if self._ended is not None:
            return None
        if before is not None and self.line.command == "train" and before.folder:
            folder = self.path / before.folder
            if has_checkpoint(folder):
                run = self._perform(cell, before, folder, goes_on=True)
                if run.exit_code != outcome.BAD_INPUT or self._ended is not None:
                    return run
                self._say(Text(f"{cell.name} cannot go on; it begins again"))
        if before is not None:
            self._folder.give_up(before)
        return self._perform(cell, Attempt(cell.number, turn, cell.name, ""), free_folder(self.path, cell.name))

    def _perform(self, cell: Cell, attempt: Attempt, folder: Path, *, goes_on: bool = False) -> Run:
        """Run a cell in a fork of this process; `goes_on`: from the last checkpoint that its folder has."""
        attempt = replace(attempt, folder=folder.name, exit_code=None, error="")
        self._folder.record(attempt)
        begin = time.monotonic()
        try:
            if isinstance(request := cell.request, InputError):
                now = outcome.Outcome(outcome.BAD_INPUT, str(request))
            else:
                if not request.config.dry_run:
                    fork_server.start(request.config)  # all forks share it
                outcome.import_torch()
                begun, typed = request.resuming if goes_on else request.into, (self.line.command, *self._typed)
                now = outcome.ended(outcome.fork_command(lambda: begun(folder).perform(*typed)))
        except KeyboardInterrupt as asked:
            self._ended, now = type(asked), outcome.Outcome(outcome.INTERRUPTED)
        if now.exit_code == outcome.STOPPED:  # the signal was sent to the fork
            self._ended = Stopped
        if now.exit_code == outcome.UNREAD:
            self._ended = BrokenPipeError
        if now.exit_code < 0 or now.exit_code in _UNFINISHED:
            fork_server.kill()  # with the workers of a run that was killed before it could end them
        error = str(result_or_nothing(folder).get("error") or now.error) if now.exit_code else ""
        attempt = replace(attempt, exit_code=now.exit_code, seconds=time.monotonic() - begin, error=error)
        self._folder.record(attempt)
        run = self._run(attempt, cell)
        if run.failed:
            why = "" if self._ended in (KeyboardInterrupt, Stopped) else f": {error}"
            self._say(Text.assemble((self._status(run), "red"), f" {cell.name}{why}"), always=True)
        return run

    def _run(self, attempt: Attempt, cell: Cell) -> Run:
        folder = self.path / attempt.folder
        result = result_or_nothing(folder)
        done = result.get("status") in ("completed", "dry_run")  # even if it was interrupted while it drew pictures
        return Run(
            attempt.name,
            folder,
            0 if done else outcome.INTERRUPTED if attempt.exit_code in _UNFINISHED else attempt.exit_code,
            attempt.seconds or result.get("seconds") or 0.0,
            result,
            number=attempt.run,
            round=attempt.round,
            settings=cell.varied,
            error=attempt.error,
        )

    def _is_final(self, run: Run) -> bool:
        """Whether another attempt would give the same."""
        if self.line.command == "bench":
            measured = bench_status(run) == "measured" and run.result.get("status") == "completed"
            return measured or bench_status(run) in HOPELESS
        return run.result.get("status") in ("completed", "dry_run")

    def _status(self, run: Run) -> str:
        return bench_status(run).replace("_", " ") if self.line.command == "bench" else run.status

    def _say(self, line: Text, *, rule: bool = False, always: bool = False) -> None:
        """Prints a line, unless the sweep has ended. When nobody reads it (`| head`), the sweep ends, and keeps the
        results that it has."""
        if self._ended is not None and not always:
            return
        try:
            if rule:
                Console().rule(line, align="left")
            else:
                Console().print(line, soft_wrap=True)
        except SystemExit:  # which rich raises then
            self._ended = BrokenPipeError


def sweep_of(command: str, arguments: Sequence[str], requested: Requested) -> Sweep:
    """The sweep that the arguments begin or go on with. Raises InputError for what the user can mend."""
    line = read(command, arguments)
    folder = _resumed_folder(line)
    if folder is None:
        refuse_place(line)
        folder = SweepFolder(command, arguments)
    else:
        line = read(command, [*folder.arguments, f"{PLACE}{quoted(folder.path)}"])
    line = searching(line)
    Sweep.current = Sweep(line, folder, requested, arguments)
    # `hydra.launcher._target_` names it; Hydra calls it by its name
    launchers: dict[str, Any] = Plugins.instance().class_name_to_class
    launchers["hydra_plugins.gpipe_cli.SweepLauncher"] = current_sweep
    return Sweep.current


def searching(line: CommandLine) -> CommandLine:
    """With what a search by Optuna needs and was not typed: more is better; and a seed, so that the same results lead
    to the same runs and an interrupted search can go on. Raises RefusedError if its sweeper is not installed, and for
    what no sweeper is told."""
    if isinstance(chosen := line.overrides.get(SWEEPER, ""), list):  # Hydra takes it for its only member
        raise RefusedError(SWEEPER, chosen, f"must be the name of a choice; write {SWEEPER}=optuna")
    if chosen != "optuna":
        if SWEEPER not in line.overrides:
            line.refuse_search(f"bounds are for a search; add {SWEEPER}=optuna, or give the values one by one")
        return line
    try:
        installed = importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is not None
    except ModuleNotFoundError:  # there are no plugins at all
        installed = False
    if line.overrides.get("dry_run") is True:
        raise RefusedError("dry_run", True, "a search needs the results of its runs; leave it out")
    if not installed:
        why = "needs hydra-optuna-sweeper, which is not installed; pip install hydra-optuna-sweeper"
        raise RefusedError(SWEEPER, "optuna", why)
    defaults = {"hydra.sweeper.direction": "maximize"}
    if line.overrides.get(f"{SWEEPER}/sampler") != "grid":
        defaults["hydra.sweeper.sampler.seed"] = "0"
    more = [f"{key}={value}" for key, value in defaults.items() if key not in line.overrides]
    return replace(line, arguments=(*line.arguments, *more))


def objective(command: str, result: Mapping[str, Any]) -> float | None:
    """What a search maximizes: the measured speed, or accuracy on the test set, of text the loss with a minus; None
    where a run has none."""
    if command == "bench":
        return value_of(result, "tokens_per_second") or value_of(result, "samples_per_second")
    top1, loss = value_of(result, "test", "top1"), value_of(result, "test", "loss")
    return top1 if top1 is not None else None if loss is None else -loss


def current_sweep() -> Sweep:
    """The launcher that Hydra uses."""
    return Sweep.current


def refuse_place(line: CommandLine) -> None:
    """Raises InputError for a folder that would have no effect: a run and a sweep are told theirs by two settings."""
    if line.options["multirun"] or str(line.overrides.get("hydra.mode")) == "MULTIRUN":
        what, given_by, other = "a sweep, in which those of its runs lie,", "hydra.sweep.dir", "run_folder"
    else:
        what, given_by, other = "a run", "run_folder", "hydra.sweep.dir"
    for key in (other, "hydra.run.dir"):
        if (value := line.overrides.get(key)) is not None:
            raise RefusedError(key, value, f"the folder of {what} is given by {override(given_by, str(value))}")


def _resumed_folder(line: CommandLine) -> SweepFolder | None:
    """The sweep that `resume` names; None if it names none. Raises InputError if more is given than that, or it is the
    sweep of another command."""
    given = line.overrides.get("resume")
    if not isinstance(given, str) or "resume" in line.swept or not (Path(given) / SWEEP).is_file():
        return None
    more = [one for one in line.typed if one.partition("=")[0].lstrip("+") != "resume"]
    named = {"config_name": "-cn", "config_dir": "-cd", "config_path": "-cp", "cfg": "--cfg", "info": "--info"}
    more += [f"{flag} {value}" for key, flag in named.items() if (value := line.options.get(key)) is not None]
    if more:
        raise InputError(
            f"{more[0]}: resume={given} is a sweep, whose runs would then differ in more than it says; leave it out"
        )
    folder = SweepFolder.read(Path(given))
    if folder.command != line.command:
        go_on = f"gpipe {folder.command} {override('resume', given)}"
        raise InputError(f"resume={given}: is a sweep of gpipe {folder.command}; go on with it by {go_on}")
    folder.arguments = [argument for argument in folder.arguments if not argument.startswith(PLACE)]
    return folder


def differences(jobs: Sequence[Sequence[str]], task: Sequence[str]) -> list[tuple[str, dict[str, object]]]:
    """The settings in which each job differs from the others: as a name, `partitions=2,seed=4`, and their values in the
    order in which they were typed; `task` is what was typed."""
    typed = OverridesParser.create().parse_overrides(list(task))
    swept = {o.key_or_group for o in typed if o.is_sweep_override()}
    same = {o.key_or_group for o in typed} - swept  # by key: Hydra writes a true as True

    def varies(override: str) -> bool:
        return key_of(override) not in same and (len(jobs) == 1 or any(override not in job for job in jobs))

    varied = [[override for override in job if varies(override)] for job in jobs]
    return [(",".join(sorted(o.lstrip("+") for o in job)) or "run", values_of(job)) for job in varied]


def values_of(job: Sequence[str]) -> dict[str, object]:
    """The settings of one job and their values."""
    return {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(list(job)) if not o.is_delete()}


def free_folder(parent: Path, name: str) -> Path:
    """A folder for the run `name` that does not exist yet."""
    return next(folder for folder in numbered(parent / folder_name(name)) if not folder.exists())


def folder_name(name: str) -> str:
    """The name of a run as one that every file system takes."""
    return re.sub(r"[^\w.,=+\[\]-]", "_", name.replace("'", "").replace('"', ""))[:150].strip(".") or "run"
