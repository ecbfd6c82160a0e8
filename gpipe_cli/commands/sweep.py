"""A sweep, `gpipe train -m micro_batches=1,4,8`: one fresh process tree for each run, one after the other.

Hydra's own launcher runs all jobs in one process, where a failed job keeps its tensors, process groups and CUDA context
alive for the next one. This launcher starts the command anew for each run; Hydra's grammar and sweepers stay as they
are. A failing run is reported at once and the others go on. What is finished is written down: a sweep can be resumed.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gpipe_cli.commands import drop_others, translated
from gpipe_cli.commands.child import INTERRUPTED, run_process
from gpipe_cli.commands.sweep_folder import SweepFolder
from gpipe_cli.commands.sweep_names import differences, free_folder, values_of, varied_settings
from gpipe_cli.commands.sweep_record import Attempt
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import SettingError, quoted, settings
from gpipe_cli.reporting.run.result import RESULT, read_result
from gpipe_cli.reporting.tables.bench import HOPELESS, bench_status
from gpipe_cli.reporting.tables.sweep import Run, number_of, top1

# Of a run that goes on: what its own settings do not say (they belong to one invocation of the command).
_AGAIN = ("max_steps", "output", "dry_run")
Configured = Callable[[DictConfig, Mapping[str, object]], object]
_BAD_INPUT, _UNREAD = 2, 128 + signal.SIGPIPE  # unread: nobody reads the output any more, `| head`


class SweepLauncher(Launcher):
    """Starts a process for each job of Hydra's multirun; what became of it goes to the task function."""

    sweep: SweepFolder
    configured: Configured | None
    rounds: Callable[[DictConfig], int]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.report = task_function
        self.loader = hydra_context.config_loader
        self.ended: type[BaseException] | None = None  # why the sweep ends before all was run
        folder = self.sweep.choose(Path(config.hydra.sweep.dir))
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)  # the sweeper has this tree, too

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = [[o for o in job if not o.lstrip("+~").startswith("hydra")] for job in job_overrides]
        if initial_job_idx == 0 and self.configured is not None and not self.sweep.resumes:
            self._refuse(job_overrides, self.configured)
        rounds, of = self.rounds(self.config), initial_job_idx + len(jobs)
        self.options, self.sweep.rounds = _options(self.config), rounds
        self.sweep.begin(self.options)
        task = list(self.config.hydra.overrides.task)
        names, varied = differences(jobs, task), varied_settings(jobs, task)
        self.sweep.planned += len(jobs) * rounds
        runs: dict[int, Run] = {}
        left = [(turn, index) for turn in range(1, rounds + 1) for index in range(len(jobs))]
        while left:
            turn, index = left.pop(0)
            number, name = initial_job_idx + index + 1, names[index]
            if number in runs and self._finished(runs[number]) and bench_status(runs[number]) in HOPELESS:
                self.sweep.planned -= 1  # it would be no other in another round
                continue
            title = f"run {number} of {of}{f', round {turn} of {rounds}' if rounds > 1 else ''}: {name}"
            run = self._finished_before(title, number, turn, name)
            if run is None and self.ended is None:
                run = self._perform(title, jobs[index], Attempt(number, turn, name, ""))
            if run is not None:  # once the sweep has ended, those that were finished before it went on
                runs[number] = run = replace(run, settings=varied[index])
                self.report(run)
                if run.exit_code == _BAD_INPUT and len(runs) <= 2 and not self.sweep.resumes:
                    self._refuse_all(runs[min(runs)], runs[max(runs)], of)
                    left.sort(key=lambda at: at != (1, len(jobs) - 1))  # the last one next
        if self.ended is not None:
            raise self.ended
        # A sweeper that searches gets the accuracy or the speed; that a run failed is not Hydra's to report.
        returns = [JobReturn(overrides=job, status=JobStatus.COMPLETED) for job in jobs]
        for number, returned in enumerate(returns, start=initial_job_idx + 1):
            result = runs[number].result
            speed = number_of(result.get("samples_per_second"))
            returned.return_value = top1(result) if self.sweep.command == "train" else speed
        return returns

    def _refuse(self, jobs: Sequence[Sequence[str]], configured: Configured) -> None:
        """Raises ValueError, before anything runs, if all runs would be refused, or one for a value that is wrong
        whatever the others are."""
        refusals: list[ValueError] = []
        for job in jobs:
            try:
                tree = self.loader.load_sweep_config(self.config, list(job))
                with read_write(tree), open_dict(tree):
                    del tree["hydra"]
                drop_others(self.sweep.command, tree)
                configured(tree, values_of(job))
            except SettingError:
                raise
            except ValueError as error:
                refusals.append(error)
            except (HydraException, OmegaConfBaseException) as error:
                refusals.append(translated(error, settings(TrainConfig)))
        if len(refusals) == len(jobs):
            raise refusals[0]

    def _refuse_all(self, first: Run, last: Run, of: int) -> None:
        """Raises ValueError if the first run and the last, which differ in every setting that is swept, were refused in
        the same words: then it is one of the others."""
        if (first.number, last.number) == (1, of) and last.exit_code == _BAD_INPUT and first.error == last.error:
            self.sweep.withdraw()
            raise ValueError(first.error)

    def _finished(self, run: Run) -> bool:
        """Whether it would be no other if it were run again."""
        if self.sweep.command == "bench":
            measured = bench_status(run) == "measured" and run.result.get("status") == "completed"
            return measured or bench_status(run) in HOPELESS
        return run.result.get("status") in ("completed", "dry_run")

    def _finished_before(self, title: str, number: int, turn: int, name: str) -> Run | None:
        """The run, if the sweep goes on and has it already."""
        attempt = self.sweep.last(number, turn, name)
        if attempt is None:
            return None
        run = self._run(attempt)
        if not self._finished(run):
            return None
        status = bench_status(run).replace("_", " ") if self.sweep.command == "bench" else run.status
        if self.ended is None:
            with self._speaking() as console:
                console.print(Text(f"{title}: {status} before, skipped"), soft_wrap=True)
        return run

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[Console]:
        """A console. If nobody reads it any more (`| head`), the sweep ends, with all that it has."""
        try:
            yield Console()
        except SystemExit:  # rich ends the process then
            self.ended = BrokenPipeError

    def _perform(self, title: str, job: Sequence[str], attempt: Attempt) -> Run | None:
        """Performs one run in a process of its own; None if the sweep ended before it began.

        Of a sweep that goes on, a training goes on where its last checkpoint is.
        """
        assert self.sweep.path is not None
        with self._speaking() as console:
            console.rule(Text(title), align="left")
        if self.ended is not None:
            return None
        before = self.sweep.last(attempt.run, attempt.round, attempt.name)
        if before is not None and self.sweep.command == "train":
            folder = self.sweep.path / before.folder
            if before.folder and any((folder / "checkpoints").glob("step_*/index.json")):
                kept = [one for one in job if one.lstrip("+").partition("=")[0] in _AGAIN]
                run = self._process([*kept, f"resume={quoted(folder)}"], folder, before)
                if run.exit_code != _BAD_INPUT or self.ended is not None:
                    return run
                with self._speaking() as console:
                    again = f"{escape(attempt.name)} cannot go on; it begins again"
                    console.print(again, soft_wrap=True, highlight=False)
        if self.sweep.command == "bench":
            job = [*(one for one in job if one.lstrip("+").partition("=")[0] != "rounds"), "++rounds=1"]
        if before is not None:
            self.sweep.give_up(before)
        return self._process(job, free_folder(self.sweep.path, attempt.name), attempt)

    def _process(self, arguments: Sequence[str], folder: Path, attempt: Attempt) -> Run:
        attempt = replace(attempt, folder=folder.name, exit_code=None, error="")
        self.sweep.record(attempt)
        own = [self.sweep.command, *self.options, *arguments, f"run_folder={quoted(folder)}"]
        begin = time.monotonic()
        command = [sys.executable, "-m", "gpipe_cli", *own]
        exit_code, error, interrupted = run_process(command, held=self.sweep.held, without_refusal=True)
        if interrupted or exit_code == _UNREAD:
            self.ended = KeyboardInterrupt if interrupted else BrokenPipeError
        error = str(_result(folder).get("error") or error) if exit_code else ""
        attempt = replace(attempt, exit_code=exit_code, seconds=time.monotonic() - begin, error=error)
        self.sweep.record(attempt)
        run = self._run(attempt)
        if run.failed:
            # One that failed while it trained says so in its summary; stderr is for what went wrong before.
            status = bench_status(run).replace("_", " ") if self.sweep.command == "bench" else run.status
            why = "" if interrupted else f": {escape(error)}"
            with self._speaking() as console:
                console.print(f"[red]{status}[/red] {escape(run.differs)}{why}", soft_wrap=True, highlight=False)
        return run

    def _run(self, attempt: Attempt) -> Run:
        assert self.sweep.path is not None
        folder = self.sweep.path / attempt.folder
        result = _result(folder)
        done = result.get("status") in ("completed", "dry_run")  # even if it was interrupted while it drew pictures
        exit_code = 0 if done else INTERRUPTED if attempt.exit_code in (None, _UNREAD) else attempt.exit_code
        seconds = attempt.seconds or number_of(result.get("seconds")) or 0.0
        return Run(
            attempt.name,
            folder,
            exit_code,
            seconds,
            result,
            number=attempt.run,
            round=attempt.round,
            error=attempt.error,
        )


def register_launcher(
    sweep: SweepFolder, configured: Configured | None, rounds: Callable[[DictConfig], int] = lambda config: 1
) -> None:
    """Lets `hydra.launcher._target_` in conf/train.yaml name the launcher; Hydra wants names in `hydra_plugins`.

    Hydra makes the launcher by the name of its class and from the configuration, so the class is told what to launch.
    `configured` raises ValueError for a run that would be refused; None: only the run itself can tell.
    """
    SweepLauncher.sweep, SweepLauncher.rounds = sweep, staticmethod(rounds)
    SweepLauncher.configured = None if configured is None else staticmethod(configured)
    Plugins.instance().class_name_to_class["hydra_plugins.gpipe_cli.SweepLauncher"] = SweepLauncher


def _options(config: DictConfig) -> list[str]:
    """The options of Hydra that say which configuration a run begins with."""
    options = ["-cn", str(config.hydra.job.config_name)]
    for source in config.hydra.runtime.config_sources:
        if source.provider == "command-line":
            options += ["-cd", str(source.path)]
        elif source.provider == "main" and source.schema == "file":
            options += ["-cp", str(source.path)]
    return options


def _result(folder: Path) -> dict[str, object]:
    try:
        return read_result(folder, RESULT)
    except (OSError, ValueError):
        return {}
