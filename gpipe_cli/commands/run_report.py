"""The parent's side of a run: messages of the workers become console lines, files and TensorBoard events."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from gpipe_cli.assembly.build import find_data
from gpipe_cli.commands.next_commands import next_commands
from gpipe_cli.commands.prepare_run import PreparedRun
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import BenchSettings, TrainConfig
from gpipe_cli.errors import InputError, error_text
from gpipe_cli.planner.mfu import peak_flops
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.run.console import LINE_SECONDS
from gpipe_cli.reporting.run.description import WARM_UP_STEPS, RunContext
from gpipe_cli.reporting.run.lines import show_error, show_line
from gpipe_cli.reporting.run.reporter import Reporter, starts_so_far
from gpipe_cli.reporting.run.summary import show_evaluation
from gpipe_cli.results.run import Restart, Start
from gpipe_cli.training import events
from gpipe_cli.training.data_feed import check_last_mini_batch, mini_batches
from gpipe_cli.training.fine_tuning import frozen_layers_note

Ending = Literal["completed", "failed", "interrupted"]


def run_report(
    prepared: PreparedRun,
    folder: Path,
    start: Start | None,
    bench: BenchSettings | None = None,
    restarts: tuple[Restart, ...] = (),
    *,
    show_next_commands: bool = False,
) -> Reporter:
    """The report of a training on the console, in TensorBoard and in result.json, from when the workers are ready."""
    config, plan, spec = prepared.config, prepared.plan, prepared.spec

    def describe(ready: events.TrainingReady) -> RunContext:
        commands = None
        if show_next_commands and start is not None:
            starts = starts_so_far(folder, config.resume, start, restarts)
            typed = [shlex.split(begun.command)[2:] for begun in starts]
            commands = next_commands(typed, config, len(plan.profile.costs), ready.data.train_samples or 0)
        peak, peak_source = peak_flops(config, spec)
        return RunContext(
            ready=replace(ready, notes=(*ready.data.notes, *ready.notes, *prepared.notes)),
            config=config,
            plan=plan,
            spec=spec,
            peak_flops_per_second=peak,
            peak_source=peak_source,
            bench=bench is not None,
            start=start,
            restarts=restarts,
            warm_up_steps=WARM_UP_STEPS if bench is None else bench.warm_up_steps,
            simulation={} if config.dry_run else simulation_data(plan),
            next_commands=commands,
        )

    return Reporter(folder, describe)


class NoReport:
    """The report of every process under torchrun but process 0: only why it failed."""

    started = True

    def on_message(self, message: object) -> None:
        pass

    def break_off(self) -> None:
        pass

    def finish(self, ending: Ending, error: str | None) -> None:
        if error is not None:
            show_error(error)


class EvaluationReport(NoReport):
    """Reports an evaluation: progress while sentences are translated, and the scores."""

    def __init__(self, config: TrainConfig, checkpoint: Path, folder: Path) -> None:
        self._config, self._checkpoint, self._folder = config, checkpoint, folder
        self._last_line = time.monotonic()
        self.started = False

    def on_message(self, message: object) -> None:
        self.started = True
        match message:
            case events.EvaluationReady():
                pass
            case events.SentencesDecoded():
                if time.monotonic() - self._last_line >= LINE_SECONDS:  # it may take minutes
                    show_line(Console(), f"translated   {message.done:,} of {message.of:,} sentences")
                    self._last_line = time.monotonic()
            case events.EvaluationDone():
                show_evaluation(Console(), self._folder, str(self._checkpoint), self._config.task, message)
            case _:
                raise AssertionError(message)

    def finish(self, ending: Ending, error: str | None) -> None:
        super().finish(ending, error)
        if ending == "interrupted" and error is None:
            show_line(Console(), "interrupted: nothing was written", "bold yellow")


Report = Reporter | NoReport


def show_dry_run(prepared: PreparedRun, folder: Path, start: Start | None) -> None:
    """Show the banner and write result.json of a run that is not started; images are counted if they are here. Raises
    InputError for what the training would refuse."""
    config = prepared.config
    data, steps_per_epoch = events.DataFacts(), None
    if isinstance(config.dataset, ImagesConfig):  # text is not read: its vocabulary may take minutes to learn
        try:
            split_indexes = find_data(replace(config, dataset=replace(config.dataset, download=False)))
        except InputError as error:
            data = events.DataFacts(notes=(("not read", error_text(error)),))
        else:
            batches = mini_batches(config, split_indexes.training, training=True)
            check_last_mini_batch(config, batches)
            samples = split_indexes.map(lambda split_index: split_index.samples)
            data, steps_per_epoch = events.DataFacts(*samples), batches.steps_per_epoch
    reporter = run_report(prepared, folder, start)
    reporter.on_message(events.TrainingReady(data, frozen_layers_note(prepared.spec), 0, steps_per_epoch))
    reporter.finish("dry_run")
