"""The parent's side of a run: messages of the workers become console lines, files and TensorBoard events."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gpipe_cli.assembly.build import open_data
from gpipe_cli.commands.median_step import MedianStep
from gpipe_cli.commands.next_commands import next_commands
from gpipe_cli.commands.prepare import Prepared
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import CONFIG, BenchSettings, TrainConfig, to_yaml
from gpipe_cli.config.typed import one_line
from gpipe_cli.data.micro_batches import share_of
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.recording import measured_timeline
from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.planner.mfu import step_flops
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.planner.stage_memory import saved_bytes
from gpipe_cli.reporting.plots.chrome_trace import TracedStep, write_trace
from gpipe_cli.reporting.plots.timeline_values import StepPicture, predicted_view, timeline_view
from gpipe_cli.reporting.run.console import LINE_SECONDS
from gpipe_cli.reporting.run.description import RunDescription
from gpipe_cli.reporting.run.lines import show_error, show_line
from gpipe_cli.reporting.run.reporter import Reporter
from gpipe_cli.reporting.run.summary import show_evaluation
from gpipe_cli.results.run import Restart, Start
from gpipe_cli.system.files import write_whole
from gpipe_cli.system.streams import lost_output
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint.files import remove_drafts
from gpipe_cli.training.data_feed import mini_batches, refuse_short_last
from gpipe_cli.training.fine_tuning import frozen_facts

_FIRST_DRAWN = 5  # counted steps after which the first picture is drawn, before the first epoch ends
_DRAWING_APART = 50  # pause between drawings, in durations of the last one: drawing takes a core from the stages

Ending = Literal["completed", "failed", "interrupted"]


class RunReport:
    """Reports a training on the console, in TensorBoard and in result.json, from when the workers are ready."""

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        start: Start | None,
        bench: BenchSettings | None = None,
        restarts: tuple[Restart, ...] = (),
        *,
        guided: bool = False,
    ) -> None:
        self._prepared, self._folder, self._bench = prepared, folder, bench
        self._start_of_run, self._restarts, self._guided = start, restarts, guided
        self.started = False
        self._reporter: Reporter  # set once the training has started
        self._last: events.StepDone | None = None  # the step whose recording comes next
        self._steps_per_epoch = 1
        self._warmed_up = 0  # the last warm-up step; the median leaves out steps up to it
        self._median = MedianStep()  # over the current epoch; in a measurement, over all steps
        self._epoch_shown = False  # whether an epoch has ended, whose median step is the one to draw
        self._next_drawing = 0.0  # time.monotonic(): before it no picture is drawn
        self._undrawn: Callable[[], None] | None = None  # draws the last step that was chosen

    def on_message(self, message: object) -> None:
        """Handle a worker's message. Before TrainingReady nothing is shown or written."""
        match message:
            case events.TrainingReady():
                self._start(message)
            case events.StepDone():
                counted = message.activation_bytes is not None
                self._reporter.step(message, self._predicted_activations(message) if counted else None)
                self._last = message
            case events.StepRecorded():
                assert self._last is not None
                self._recorded(self._last, message)
            case events.Evaluated():
                self._reporter.evaluated(message)
            case events.CheckpointWritten():
                self._reporter.checkpointed(message.step)
            case events.CheckpointFailed():
                self._reporter.checkpoint_failed(message.why)
            case events.CheckpointAwaited():
                self._reporter.checkpoint_awaited(message)
            case events.TrainingStopped():
                pass
            case _:
                raise AssertionError(message)

    def break_off(self) -> None:
        """End this report, as the run restarts; another report follows."""
        if self.started:
            self._reporter.break_off()

    def finish(self, ending: Ending, error: str | None) -> None:
        if ending != "completed":
            remove_drafts(self._folder)  # there must be room for result.json
        if self.started:
            # An interrupted run draws nothing: that can take seconds, and a sweep kills the run 3.5 s after Ctrl-C.
            if ending == "completed" or (ending == "failed" and self._next_drawing == 0):
                if not self._epoch_shown:
                    self._choose()
                self._draw()
            try:
                self._reporter.finish(ending, error)
                lost = lost_output()
            except OSError as unwritten:
                if ending == "completed":
                    raise
                lost = unwritten
            if error is not None and lost is not None:  # the summary or result.json may lack it
                show_error(error)
        elif error is not None:
            show_error(f"failed before the first step: {error}")

    def _start(self, ready: events.TrainingReady) -> None:
        write_whole(self._folder / CONFIG, to_yaml(self._prepared.config))
        config, then = self._prepared.config, None
        if self._guided and self._start_of_run is not None:
            typed = shlex.split(self._start_of_run.command)[2:]  # without `gpipe train`
            then = next_commands(typed, config, len(self._prepared.profile.costs), ready.data.train_samples or 0)
        bench = {"bench": True, "warm_up_steps": self._bench.warm_up_steps} if self._bench is not None else {}
        run = _described(
            self._prepared, ready.data, ready.notes, ready.steps_per_epoch,
            first_step=ready.first_step, gpu_names=ready.gpu_names, compiled=ready.compiled,
            start=self._start_of_run, restarts=self._restarts, test=ready.test, best=ready.best,
            simulation=simulation_data(self._prepared.plan),
            next_commands=then, **bench,
        )  # fmt: skip
        self._steps_per_epoch, self._warmed_up = ready.steps_per_epoch, ready.first_step + run.warm_up_steps
        self._reporter, self.started = Reporter(self._folder, run), True
        self._reporter.banner(shown=not self._restarts)
        if (lost := lost_output()) is not None:  # the training could not be followed
            raise lost
        self._reporter.start()

    def _predicted_activations(self, step: events.StepDone) -> tuple[int, ...]:
        """Predicted bytes per stage for the very mini-batch whose activations were counted."""
        config, profile, plan = self._prepared.config, self._prepared.profile, self._prepared.plan
        if step.lengths != profile.lengths:  # padded to other lengths
            profile = profile_model(config, lengths=step.lengths)
        return saved_bytes(config, profile, plan.bounds, plan.order, plan.recompute, step.samples)

    def _recorded(self, step: events.StepDone, recorded: events.StepRecorded) -> None:
        """Report a step's recording; at the end of an epoch, draw its median step."""
        timeline, micro_batches = self._timeline(step, recorded)
        self._reporter.recorded(step.step, asdict(breakdown(timeline, micro_batches, step.seconds)))
        whole = step.samples == (self._prepared.config.batch_size or step.samples)  # the last of an epoch may be short
        self._median.add(step, recorded, counts=whole and step.step > self._warmed_up)
        if self._bench is not None:
            return  # drawing takes a core for a second, so it waits for the end of the measurement
        counted = self._median.counted
        ends = step.position == self._steps_per_epoch and counted > 0
        if not (ends or (counted == _FIRST_DRAWN and not self._next_drawing)):
            return
        self._choose()
        if ends:
            self._median, self._epoch_shown = MedianStep(), True
        if time.monotonic() >= self._next_drawing:
            self._draw()

    def _timeline(self, step: events.StepDone, recorded: events.StepRecorded) -> tuple[Timeline, int]:
        """The timeline of a recorded step, and its number of micro-batches M."""
        config, spec = self._prepared.config, self._prepared.spec
        micro_batches = len(share_of(step.samples, config.micro_batches, config.replicas).sizes)
        schedule, devices = spec.schedule(micro_batches), spec.layout.device_of_stage
        return measured_timeline(schedule, recorded.seconds, recorded.began_seconds, devices), micro_batches

    def _choose(self) -> None:
        """Choose the median step so far as the one to draw, beside the prediction."""
        if (chosen := self._median.nearest) is None:
            return
        (step, recorded), plan = chosen, self._prepared.plan
        timeline, micro_batches = self._timeline(step, recorded)
        shares = breakdown(timeline, micro_batches, step.seconds)
        title, steps = f"epoch {step.epoch}, step {step.step:,}", self._median.steps
        note = f"the median of {steps:,} steps" if steps > 1 else ""
        measured = timeline_view(title, "measured", timeline, shares, step.seconds, recorded.began_seconds)
        views = [replace(measured, note=note)]
        if same := micro_batches == plan.micro_batches and plan.costs.basis != "other_device":
            views.append(predicted_view(title, plan))
        traced = [TracedStep("measured", timeline, recorded.began_seconds)]
        traced += [TracedStep("predicted", plan.timeline, plan.timeline.start_seconds)] if same else []

        def draw() -> None:
            self._reporter.timeline(StepPicture(step.epoch, step.step, tuple(views), steps))
            with self._reporter.optional():
                write_trace(self._folder, traced)

        self._undrawn = draw

    def _draw(self) -> None:
        """Draw the chosen step, unless it is drawn already."""
        if self._undrawn is not None:
            began = time.monotonic()
            self._undrawn()
            self._undrawn, ended = None, time.monotonic()
            self._next_drawing = ended + _DRAWING_APART * (ended - began)


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


Report = RunReport | NoReport


def show_dry_run(prepared: Prepared, folder: Path, start: Start | None) -> None:
    """Show the banner and write result.json of a run that is not started; images are counted if they are here. Raises
    InputError for what the training would refuse."""
    config, data, steps_per_epoch = prepared.config, events.DataFacts(), None
    if isinstance(config.dataset, ImagesConfig):  # text is not read: its vocabulary may take minutes to learn
        try:
            train, test = open_data(replace(config, dataset=replace(config.dataset, download=False)))
        except InputError as error:
            data = events.DataFacts(notes=(("not read", one_line(error)),))
        else:
            batches = mini_batches(config, train.catalogue, training=True)
            refuse_short_last(config, batches)
            data, steps_per_epoch = (
                events.DataFacts(batches.catalogue.samples, test.catalogue.samples),
                batches.steps_per_epoch,
            )
    write_whole(folder / CONFIG, to_yaml(config))
    run = _described(prepared, data, frozen_facts(prepared.spec), steps_per_epoch, start=start)
    reporter = Reporter(folder, run)
    reporter.banner()
    reporter.finish("dry_run")


def _described(
    prepared: Prepared, data: events.DataFacts, notes: events.Notes, steps_per_epoch: int | None, **more: Any
) -> RunDescription:
    config, spec = prepared.config, prepared.spec
    return RunDescription(
        config=config,
        plan=prepared.plan,
        spec=spec,
        flops=step_flops(config, prepared.profile, spec),
        data=data,
        notes=(*data.notes, *notes, *prepared.notes),
        steps_per_epoch=steps_per_epoch,
        **more,
    )
