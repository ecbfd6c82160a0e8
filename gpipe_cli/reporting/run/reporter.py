"""Reports the events of a run to the console, the loggers and result.json, in the parent process.

``step`` counts the optimizer steps done; epochs count from 1.
"""

import io
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.config.settings import CONFIG_FILE, Task, TrainConfig, target_of, to_yaml
from gpipe_cli.errors import error_text
from gpipe_cli.reporting.page.page import MAX_STEPS, PAGE, PageContext, write_page
from gpipe_cli.reporting.plots.chrome_trace import write_trace
from gpipe_cli.reporting.plots.timeline_values import StepPicture, idle_share
from gpipe_cli.reporting.run import measurement
from gpipe_cli.reporting.run.banner import show_banner
from gpipe_cli.reporting.run.console import RunConsole
from gpipe_cli.reporting.run.dashboard import LoggerGroup
from gpipe_cli.reporting.run.description import RunContext, to_evaluation
from gpipe_cli.reporting.run.drawing import StepDrawer
from gpipe_cli.reporting.run.lines import format_resume_command, log_to_folder, print_fields, show_error, show_line
from gpipe_cli.reporting.run.step_breakdown import COMPARED_STEPS, compare_with_prediction, measured_breakdown
from gpipe_cli.reporting.run.summary import describe_speed_kind, show_summary
from gpipe_cli.results.run import (
    Breakdowns,
    BubbleShares,
    Evaluation,
    IdleShares,
    Partition,
    Prediction,
    Restart,
    RunResult,
    Start,
    Status,
    format_second,
    run_result_or_none,
    write_run,
)
from gpipe_cli.system.files import write_atomic
from gpipe_cli.system.stdio import lost_output
from gpipe_cli.training.checkpoint.files import RUN_FOLDER_MISSING, Progress, clean_staging, list_checkpoints, step_of
from gpipe_cli.training.events import (
    CheckpointEnded,
    CheckpointReady,
    CheckpointStalled,
    EvalRecord,
    Evaluated,
    StepDone,
    StepRecorded,
    TrainingReady,
    TrainingStopped,
)

SPEED_WINDOW_STEPS = 20  # a displayed speed is the median over this many steps


class Reporter:
    """Reports a run into ``folder``, which is created if missing. Until the workers are ready, nothing is shown or
    written; `describe` then gives the run's context.

    ``result.json`` is written at the start (status ``running``) and after every evaluation, so that a killed run leaves
    its results so far. Call ``finish`` last, and once.
    """

    def __init__(
        self, folder: Path, describe: Callable[[TrainingReady], RunContext], console: Console | None = None
    ) -> None:
        self._folder, self._describe, self._shown = folder, describe, console
        self.started = False

    def _start(self, run: RunContext) -> None:
        """Shows the banner and, in a terminal, a bar that waits for the first step."""
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / CONFIG_FILE, to_yaml(run.config))
        self._run = run
        self._begin = time.monotonic() - measurement.process_seconds()
        self._result = _initial_result(folder, run)  # lacks what is measured
        self._last: StepDone | None = None  # the step whose recording comes next
        self._checkpoint = 0  # step of the last checkpoint written
        self._medians = measurement.StepMedians(run.warm_up_steps)
        self._overhead_bytes: tuple[int, ...] | None = None  # per stage
        self._compared = False
        self._drawer = StepDrawer(run, self.timeline)
        self._pictures: list[StepPicture] = []
        self._console = RunConsole(self._shown or Console(), run)
        self._unwritten_before: set[tuple[str, int | None]] = set()  # optional outputs, and the errno of their errors
        result = self._current_result()
        write_run(folder, result)
        self._loggers = LoggerGroup(folder, run, result, self._warn_unwritten)
        self.started = True
        if not run.restarts:
            show_banner(self._console.console, run, folder)
        plain = Console(file=io.StringIO(), width=100, force_terminal=False, color_system=None)
        with plain.capture() as text, log_to_folder(None):  # the log has the banner already
            show_banner(plain, run, folder)
        self._loggers.describe(to_yaml(run.config), text.get())
        if run.config.dry_run:
            return
        if (lost := lost_output()) is not None:  # the progress of the training could not be shown
            raise lost
        self._console.start()

    def on_message(self, message: object) -> None:
        """Handles a message of a worker, or the signal that has asked the run to stop."""
        match message:
            case TrainingReady():
                self._start(self._describe(message))
            case StepDone():
                self._step(message)
            case StepRecorded():
                assert self._last is not None
                self.add_breakdown(self._last.step, self._drawer.analyze(self._last, message)[1]._asdict())
                self._drawer.add(self._last, message)
            case Evaluated():
                self._add_evaluation(message)
            case CheckpointReady():
                self._loggers.flush()
            case CheckpointEnded(failure=None):
                self._checkpoint = message.step
            case CheckpointEnded():
                self._change(failed_checkpoints=self._result.failed_checkpoints + 1)
                show_error(f"warning: {message.failure}; training continues and will write the next one")
            case CheckpointStalled():
                awaited = f"{message.seconds:.1f} s for the checkpoint of step {message.stalled_step:,} to be written"
                show_line(self._console.console, f"step {message.step:,}: waited {awaited}")
            case signal.SIGINT:
                asked = "Ctrl-C: the run ends after this step, with a checkpoint; a second Ctrl-C ends it at once"
                show_line(self._console.console, asked, "yellow")
            case TrainingStopped():
                pass
            case _:
                raise AssertionError(message)

    def _step(self, message: StepDone) -> None:
        run = self._run
        self._last = message
        self._change(steps=message.step, memory_bytes=message.memory_bytes)
        quantities = {
            "step_seconds": message.seconds,
            "samples_per_second": message.samples / message.seconds,
            "cpu_starved_share": max(message.cpu_starved_share),  # the stage that was worst off
        }
        if message.tokens is not None:
            quantities["tokens_per_second"] = message.tokens / message.seconds
        self._medians.add(quantities)
        self._overhead_bytes = message.overhead_bytes or self._overhead_bytes
        if message.activation_bytes is not None:
            predicted = run.plan.saved_bytes_of(message.samples, message.lengths)
            self._change(activation_bytes=message.activation_bytes, predicted_activation_bytes=predicted)
        self._loggers.step(message)
        speed = "tokens_per_second" if self._result.text else "samples_per_second"
        self._console.step(message, self._medians.median(speed, last=SPEED_WINDOW_STEPS))
        if message.step - run.ready.first_step >= COMPARED_STEPS:
            self._compare()

    def _change(self, **changes: Any) -> None:
        self._result = replace(self._result, **changes)

    def add_breakdown(self, step: int, breakdown: Mapping[str, float]) -> None:
        """The breakdown of a step is known: timeline_values.SHARES -> share of stage-time, 0 to 1."""
        self._medians.add(breakdown)
        self._loggers.add_breakdown(step, breakdown)

    def timeline(self, picture: StepPicture) -> None:
        """Shows a step instead of an earlier step of its epoch, and sends the parts of the memory to the loggers."""
        from gpipe_cli.reporting.plots.picture import write_picture
        from gpipe_cli.reporting.plots.timeline import draw

        others = [shown for shown in self._pictures if shown.epoch != picture.epoch]
        self._pictures = [*others, picture][-MAX_STEPS:]
        with self._optional_output("pictures"):
            self._write_page()
            write_picture(self._folder / "timeline.png", draw(picture.views))
            if self._run.config.logger:
                self._loggers.memory(self._result.steps, self._current_result().memory)
                self._loggers.picture("timeline", picture.step, draw(picture.views, narrow=True))
        with self._optional_output("pictures"):
            write_trace(self._folder, picture.views)

    def _write_page(self) -> None:
        title = f"{self._run.model_name} on {self._run.config.dataset.name}"
        kind, share = self._speed_kind
        about = PageContext(
            commands=[start.command for start in self._result.starts],
            run=str(self._folder),
            contended=share if kind == "measured_contended" else None,
            launched=self._run.ready.graphs.fallback_reasons if self._run.ready.graphs else (),
        )
        write_page(self._folder / PAGE, title, self._run.simulation, self._pictures, about)

    def _add_evaluation(self, message: Evaluated) -> None:
        test = _to_evaluation(self._result.task, message)
        if message.split == "validation":
            self._change(validation=test if message.is_best else self._result.validation)
        else:
            self._change(test=test, best=test if message.is_best else self._result.best)
        self._console.add_evaluation(message)
        with self._optional_output("result"):
            write_run(self._folder, self._current_result())
        self._loggers.add_evaluation(message)

    @contextmanager
    def _optional_output(self, output: str) -> Iterator[None]:
        """For code that writes optional output: shows an OSError as a warning."""
        try:
            yield
        except OSError as error:
            self._warn_unwritten(output, error)

    def _warn_unwritten(self, output: str, error: OSError) -> None:
        """Shows that an optional output could not be written, once for each kind of error; the run continues."""
        if (output, error.errno) not in self._unwritten_before:
            show_error(f"warning: {error_text(error)}; the run continues without this output")
        self._unwritten_before.add((output, error.errno))

    def break_off(self) -> None:
        """Ends this report, as the run restarts; another report follows."""
        if self.started:
            self._loggers.flush()
            self._console.stop()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Ends the report, at any point of the run. Raises OSError if the results of a run that has not failed cannot
        be written."""
        done = status in ("completed", "dry_run")
        if not done:
            clean_staging(self._folder)  # there must be room for result.json
        if not self.started:
            if error is not None:
                show_error(f"failed before the first step: {error}")
            return
        # An interrupted run draws nothing: that can take seconds, and a sweep kills the run 3.5 s after Ctrl-C.
        if status != "interrupted":
            self._drawer.finish(completed=done)
        try:
            self._end(status, error)
            lost = lost_output()
        except OSError as unwritten:
            if done:
                raise
            lost = unwritten
        if error is not None and lost is not None:  # the summary or result.json may lack it
            show_error(error)

    def _end(self, status: Status, error: str | None) -> None:
        """Shows all; then raises OSError if result.json was not written."""
        if self._run.start is not None:
            *earlier, last = self._result.starts
            self._change(starts=(*earlier, replace(last, ended=format_second(datetime.now().astimezone()))))
        self._change(status=status, error=error)
        result = self._current_result()
        unwritten: OSError | None = None
        try:  # result.json comes first, as writing to a closed console ends the process
            write_run(self._folder, result)
        except OSError as failed:
            unwritten = failed
        if self._pictures:  # the page is written again, with the final share of contended time, as in the summary
            with self._optional_output("pictures"):
                self._write_page()
        self._loggers.end(result)
        self._console.stop()
        if result.steps - self._run.ready.first_step > self._run.warm_up_steps:
            self._compare()
        show_summary(self._console.console, self._run, result, self._folder, *self._resume_hint())
        if unwritten is not None:
            raise unwritten

    def _resume_hint(self) -> tuple[str, str | None]:
        """Where the checkpoint to resume from is, in words; and the command that resumes it, None if there is none."""
        if not self._folder.is_dir():
            return RUN_FOLDER_MISSING, None
        # an interrupted run may have ended before the message of a checkpoint that is on disk
        steps = [step for step in map(step_of, list_checkpoints(self._folder)) if step > self._run.ready.first_step]
        if written := max([self._checkpoint, *steps]):
            done = written == self._run.total_steps
            command = None if done else format_resume_command("train", self._folder, [target_of(self._run.config)])
            return f"{self._folder}, after step {written:,}{', the last one' if done else ''}", command
        if (source := self._run.config.resume) is not None:  # it may be complete, except for the command's settings
            start = self._run.start
            kept = f"none since the run was resumed; the one in {source} remains"
            return kept, None if start is None else start.command
        return "none was written, so there is nothing to resume", None

    def _compare(self) -> None:
        """Shows, once, the prediction against the measured step."""
        if self._compared or self._result.prediction is None or self._last is None:
            return
        result = self._current_result()
        self._compared = True
        console = self._console.console
        kind = result.samples_per_second_kind
        print_fields(console, compare_with_prediction(result))
        if kind is not None and kind != "measured":  # the prediction is not of such a speed
            print_fields(console, [("", describe_speed_kind(kind, result.cpu_starved_share))])

    @property
    def _speed_kind(self) -> tuple[measurement.SpeedKind | None, float | None]:
        """The kind of speed, and the median over steps of the highest `cpu_starved_share` of any stage, 0 to 1."""
        share = self._medians.median("cpu_starved_share")
        return measurement.classify_speed(self._run.spec.layout.one_device, share), share

    def _current_result(self) -> RunResult:
        run, result = self._run, self._result
        median, quartiles = self._medians.median, self._medians.quartiles
        speeds = median("samples_per_second"), median("tokens_per_second")
        flops = run.plan.flops_per_second(*speeds)
        seconds, starts = time.monotonic() - self._begin, result.starts
        if run.start is not None:
            *earlier, last = starts
            starts = *earlier, replace(last, seconds=seconds)
        peak = result.peak_flops_per_second
        shares = measured_breakdown(self._medians)
        kind, cpu_starved_share = self._speed_kind
        return replace(
            result,
            epochs=result.steps // (run.ready.steps_per_epoch or 1),
            starts=starts,
            seconds=sum(start.seconds or 0.0 for start in starts) or seconds,
            samples_per_second=speeds[0],
            samples_per_second_quartiles=quartiles("samples_per_second"),
            samples_per_second_kind=kind,
            cpu_starved_share=cpu_starved_share,
            step_seconds=median("step_seconds"),
            speed_includes_warm_up=0 < result.steps - run.ready.first_step <= run.warm_up_steps,
            speed_steps=len(self._medians.values_counted("step_seconds")),
            model_flops_per_second=flops,
            mfu=None if flops is None or peak is None else flops / peak,  # PaLM's definition
            memory=measurement.stage_memory(
                run.spec, run.plan.memory, result.memory_bytes, result.activation_bytes, self._overhead_bytes
            ),
            breakdown=replace(result.breakdown, measured=shares),
            idle=replace(result.idle, measured=None if shares is None else idle_share(shares)),
            bubble=replace(result.bubble, measured=None if shares is None else shares["bubble"]),
            tokens_per_second=speeds[1],
            tokens_per_second_quartiles=quartiles("tokens_per_second"),
        )


def _initial_result(folder: Path, run: RunContext) -> RunResult:
    """The result of a run whose first step comes next."""
    config, spec = run.config, run.spec
    prediction = shares = None
    if (plan := run.prediction) is not None:
        measured = plan.costs.cost_source == "timed_layers"
        prediction = Prediction(
            plan.costs.source, measured, plan.step_seconds, plan.held_bytes, plan.saved_bytes, plan.step_range
        )
        shares = plan.breakdown._asdict()
    starts = starts_so_far(folder, config.resume, run.start, run.restarts)
    if run.start is not None and run.start is starts[-1]:
        code = measurement.find_commits(config.model)
        starts = (*starts[:-1], replace(run.start, first_step=run.ready.first_step, code=code))
    result = RunResult(
        status="running",
        command="bench" if run.bench else "train",
        task=config.task,
        model=run.model_name,
        dataset=config.dataset.name,
        model_parameters=sum(spec.parameters),
        steps=run.ready.first_step,
        warm_up_steps=run.warm_up_steps,
        model_flops=run.plan.step_flops,
        peak_flops_per_second=run.peak_flops_per_second,
        global_batch=config.batch_size,
        executor=run.executor,
        ideal_bubble=run.ideal_bubble,
        breakdown=Breakdowns(predicted=shares),
        idle=IdleShares(predicted=None if shares is None else idle_share(shares)),
        bubble=BubbleShares(run.ideal_bubble, predicted=None if shares is None else shares["bubble"]),
        prediction=prediction,
        partitions=tuple(map(Partition, spec.layout.rank_of_stage, spec.layout.devices, spec.layer_names,
                             spec.parameters, run.cost_shares)),
        compiled=None if run.ready.compiled is None else asdict(run.ready.compiled),
        graphs=None if run.ready.graphs is None else asdict(run.ready.graphs),
        resumed_from=config.resume,
        starts=starts,
        restarts=run.restarts,
        versions=measurement.read_versions(config.text),
        hardware=measurement.describe_hardware(run.ready.gpu_names, spec.layout.threads),
        config=asdict(config),
        unigram_perplexity=run.ready.data.unigram_perplexity,
        global_batch_tokens=config.batch_tokens,
    )  # fmt: skip
    return _with_evaluations(result, config, run.ready.test, run.ready.best)


def starts_so_far(
    folder: Path, resume: str | None, start: Start | None, restarts: Sequence[Restart]
) -> tuple[Start, ...]:
    """The starts that are recorded in ``folder`` or, of a run that is resumed, in ``resume``; then `start`, unless it
    was recorded before a restart."""
    results = [run_result_or_none(Path(path)) for path in (folder, resume) if path is not None]
    recorded = next((result.starts for result in results if result is not None), ())
    if start is None or (restarts and recorded and recorded[-1].started == start.started):
        return recorded
    return (*recorded, start)


def complete_result(folder: Path, config: TrainConfig, progress: Progress) -> str:
    """Completes result.json of a run that was killed between its last checkpoint and its end: status and scores.
    Returns the command that scores the test set, "" if it has been scored."""
    result = run_result_or_none(folder)  # None also if it cannot be read
    if result is not None and result.status != "completed":
        epochs = progress.step // progress.steps_per_epoch
        result = replace(result, status="completed", error=None, epochs=epochs, steps=progress.step)
        with suppress(OSError):
            write_run(folder, _with_evaluations(result, config, progress.test, progress.best))
    if config.dataset.validation is None or (result is not None and result.test is not None):
        return ""
    return format_resume_command("evaluate", folder, [target_of(config)], key="run")


def _with_evaluations(
    result: RunResult, config: TrainConfig, last: EvalRecord | None, best: EvalRecord | None
) -> RunResult:
    """`result` with the evaluations of a checkpoint, if any, instead of those that it has."""
    last_test, best_test = (_to_evaluation(config.task, test) for test in (last, best))
    if config.dataset.validation is not None:
        return replace(result, validation=best_test or result.validation)
    return replace(result, test=last_test or result.test, best=best_test or result.best)


def _to_evaluation(task: Task, test: EvalRecord | None) -> Evaluation | None:
    return None if test is None else to_evaluation(task, test.scores, test.step, test.epoch)
