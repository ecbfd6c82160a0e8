"""Reports what happens in a run to the console, the sinks and result.json, in the parent process.

``step`` counts the optimizer steps done; epochs count from 1.
"""

import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.config.settings import Task, to_yaml
from gpipe_cli.config.typed import one_line
from gpipe_cli.reporting.page.page import MOST_STEPS, PAGE, write_page
from gpipe_cli.reporting.plots.timeline_values import StepPicture, idle
from gpipe_cli.reporting.run import measurement
from gpipe_cli.reporting.run.banner import show_banner
from gpipe_cli.reporting.run.console import RunConsole
from gpipe_cli.reporting.run.dashboard import Dashboard
from gpipe_cli.reporting.run.description import RunDescription, evaluation_of
from gpipe_cli.reporting.run.lines import logging_to, show_error, show_facts, show_line
from gpipe_cli.reporting.run.step_breakdown import COMPARED_STEPS, comparison, measured_breakdown
from gpipe_cli.reporting.run.summary import show_summary, speed_kind
from gpipe_cli.results.run import (
    Breakdowns,
    BubbleShares,
    Evaluation,
    IdleShares,
    Partition,
    Prediction,
    RunResult,
    StageMemory,
    Start,
    Status,
    run_result_or_none,
    to_the_second,
    write_run,
)
from gpipe_cli.training.checkpoint.files import GONE, Progress, checkpoints_in, step_of
from gpipe_cli.training.events import CheckpointAwaited, Evaluated, StepDone, Tested

RECENT_STEPS = 20  # a displayed speed is the median over this many steps


class Reporter:
    """Reports one run into ``folder``, which is created if missing.

    ``result.json`` is written at the start (status ``running``) and after every evaluation, so that a killed run leaves
    its results so far. Call ``finish`` last, and once.
    """

    def __init__(self, folder: Path, run: RunDescription, console: Console | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._run = folder, run
        self._text = run.config.text
        self._one_device = run.spec.layout.one_device
        self._begin = time.monotonic() - measurement.process_seconds()
        self._steps = run.first_step
        self._memory_bytes: tuple[int, ...] = ()
        self._checkpoint = 0  # step of the last checkpoint written
        self._failed_checkpoints = 0
        self._medians = measurement.StepMedians(run.warm_up_steps)
        # From a step with counted activations, in bytes per stage: saved activations, and libraries.
        self._counted: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
        self._predicted_activation_bytes: tuple[int, ...] | None = None
        self._compared = False
        self._pictures: list[StepPicture] = []
        hardware = measurement.hardware(run.gpu_names, run.spec.layout.threads)
        self._machine: dict[str, Any] = {"versions": measurement.versions(self._text), "hardware": hardware}
        self._test, self._best = _tested(run.config.task, run.test), _tested(run.config.task, run.best)
        self._starts = _starts(folder, run)
        self._console = RunConsole(console or Console(), run)
        self._incomplete = False  # whether optional output could not be written
        write_run(self._folder, self._result("running"))
        self._dashboard = Dashboard(folder, run, self._unwritten)

    def banner(self, *, shown: bool = True) -> None:
        """Sends the configuration and the banner to the sinks, and shows the banner on the console if ``shown``."""
        if shown:
            show_banner(self._console.console, self._run, self._folder)
        plain = Console(file=io.StringIO(), width=100, force_terminal=False, color_system=None)
        with plain.capture() as text, logging_to(None):  # the log has it already
            show_banner(plain, self._run, self._folder)
        self._dashboard.describe(to_yaml(self._run.config), text.get())

    def start(self) -> None:
        """Training begins: in a terminal, shows a bar that waits for the first step."""
        self._console.start()

    def step(self, message: StepDone, predicted_activation_bytes: tuple[int, ...] | None = None) -> None:
        """A step was done; if its activations were counted, with the bytes per stage predicted for its mini-batch."""
        self._steps = message.step
        self._memory_bytes = message.memory_bytes
        quantities = {
            "step_seconds": message.seconds,
            "samples_per_second": message.samples / message.seconds,
            "without_core": max(message.without_core),  # the stage that was worst off
        }
        if message.tokens is not None:
            quantities["tokens_per_second"] = message.tokens / message.seconds
        self._medians.add(quantities)
        if message.activation_bytes is not None:
            self._counted = message.activation_bytes, message.library_bytes
            self._predicted_activation_bytes = predicted_activation_bytes
        self._dashboard.step(message)
        speed = "tokens_per_second" if self._text else "samples_per_second"
        self._console.step(message, self._medians.median(speed, last=RECENT_STEPS))
        if message.step - self._run.first_step >= COMPARED_STEPS:
            self._compare()

    def recorded(self, step: int, breakdown: Mapping[str, float]) -> None:
        """The breakdown of a step is known: timeline_values.SHARES -> share of stage-time, 0 to 1."""
        self._medians.add(breakdown)
        self._dashboard.recorded(step, breakdown)

    def timeline(self, picture: StepPicture) -> None:
        """Shows a step in place of an earlier one of the same epoch, and sends the parts of the memory to the sinks."""
        from gpipe_cli.reporting.plots.picture import write_picture
        from gpipe_cli.reporting.plots.timeline import draw

        others = [one for one in self._pictures if one.epoch != picture.epoch]
        self._pictures = [*others, picture][-MOST_STEPS:]
        with self.optional():
            self._write_page()
            write_picture(self._folder / "timeline.png", draw(picture.views))
            if self._run.config.logger:
                self._dashboard.memory(self._steps, self._memory())
                self._dashboard.picture("timeline", picture.step, draw(picture.views, narrow=True))

    def _write_page(self) -> None:
        title = f"{self._run.model_name} on {self._run.config.dataset.name}"
        kind, share = self._kind_of_speed
        write_page(
            self._folder / PAGE, title, self._run.simulation, self._pictures, run=str(self._folder),
            commands=[start.command for start in self._starts],
            contended=share if kind == "measured_contended" else None,
        )  # fmt: skip

    def evaluated(self, message: Evaluated) -> None:
        """The test set was evaluated."""
        self._test = _tested(self._run.config.task, message)
        if message.is_best:
            self._best = self._test
        self._console.evaluated(message)
        with self.optional():
            write_run(self._folder, self._result("running"))
        self._dashboard.evaluated(message)

    def checkpointed(self, step: int) -> None:
        """A checkpoint is complete on disk."""
        self._dashboard.flush()  # a resume from the checkpoint will not repeat these steps
        self._checkpoint = step

    def checkpoint_failed(self, why: str) -> None:
        """A checkpoint could not be written; the training goes on without it."""
        self._failed_checkpoints += 1
        show_error(f"warning: {why}; the training goes on, and tries the next one")

    def checkpoint_awaited(self, message: CheckpointAwaited) -> None:
        """The training waited for a checkpoint that took longer than the steps until the next one, or the end."""
        awaited = f"{message.seconds:.1f} s for the checkpoint of step {message.awaited_step:,} to be written"
        show_line(self._console.console, f"step {message.step:,}: waited {awaited}")

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Context for writing optional output: an OSError is shown as a warning, not raised."""
        try:
            yield
        except OSError as error:
            self._unwritten(error)

    def _unwritten(self, error: OSError) -> None:
        """Shows the first failure of optional output as a warning; the run goes on."""
        if not self._incomplete:
            show_error(f"warning: {one_line(error)}; the run goes on without what cannot be written")
        self._incomplete = True

    def break_off(self) -> None:
        """Ends this report when another one of the same run follows."""
        self._dashboard.flush()
        self._console.stop()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Ends the report, at any point of the run. Shows all; then raises OSError if result.json was not written."""
        if self._run.start is not None:
            self._starts[-1] = replace(self._starts[-1], ended=to_the_second(datetime.now().astimezone()))
        result = self._result(status, error)
        unwritten: OSError | None = None
        try:  # first, as writing to a closed console ends the process
            write_run(self._folder, result)
        except OSError as failed:
            unwritten = failed
        if self._pictures:  # again, with the final share of contended time, as in the summary
            with self.optional():
                self._write_page()
        self._dashboard.end(status, self._steps, result)
        self._console.stop()
        if self._steps - self._run.first_step > self._run.warm_up_steps:
            self._compare()
        show_summary(
            self._console.console, result, self._folder, self._run.flops.peak_source, *self._resumable(),
            self._run.next_commands,
        )  # fmt: skip
        if unwritten is not None:
            raise unwritten

    def _resumable(self) -> tuple[str, str | None]:
        """Where the checkpoint to resume from is, in words; and the run folder to resume, None if there is none."""
        if not self._folder.is_dir():
            return GONE, None
        # an interrupted run may have ended before the message of a checkpoint that is on disk
        there = [step for one in checkpoints_in(self._folder) if (step := step_of(one)) > self._run.first_step]
        if written := max([self._checkpoint, *there]):
            return f"{self._folder}, after step {written:,}", str(self._folder)
        if (source := self._run.config.resume) is not None:
            return f"no new one; that of {source} is still there", source
        return "none was written yet, there is nothing to resume", None

    def _compare(self) -> None:
        """Shows, once, the prediction against the measured step."""
        prediction, seconds = self._run.prediction, self._medians.median("step_seconds")
        if self._compared or prediction is None or seconds is None:
            return
        self._compared = True
        console, (kind, share) = self._console.console, self._kind_of_speed
        show_facts(console, comparison(prediction, seconds, self._predicted_activation_bytes, self._counted[0]))
        if kind is not None and kind != "measured":  # such a speed is not what was predicted
            show_facts(console, [("", speed_kind(kind, share))])

    @property
    def _kind_of_speed(self) -> tuple[measurement.SpeedKind | None, float | None]:
        """The kind of speed, and the median over steps of the highest `without_core` of any stage, 0 to 1."""
        share = self._medians.median("without_core")
        return measurement.kind_of_speed(self._one_device, share), share

    def _memory(self) -> tuple[StageMemory, ...]:
        run = self._run
        return measurement.stage_memory(run.spec, run.plan.memory, self._memory_bytes, *self._counted)

    def _result(self, status: Status, error: str | None = None) -> RunResult:
        run, config, spec, of = self._run, self._run.config, self._run.spec, self._medians.median
        speeds = of("samples_per_second"), of("tokens_per_second")
        flops, peak = run.flops.per_second(*speeds), run.flops.peak_per_second
        predicted = prediction = None
        if (plan := run.prediction) is not None:
            predicted, measured = asdict(plan.breakdown), plan.costs.basis == "timed_layers"
            bytes_held = tuple(stage.total_bytes for stage in plan.memory), plan.saved_bytes
            prediction = Prediction(plan.costs.source, measured, plan.step_seconds, *bytes_held)
        kinds = measured_breakdown(self._medians), predicted
        kind, without_core = self._kind_of_speed
        return RunResult(
            status=status,
            command="bench" if run.bench else "train",
            error=error,
            task=config.task,
            model=run.model_name,
            dataset=config.dataset.name,
            model_parameters=sum(spec.parameters),
            epochs=self._steps // (run.steps_per_epoch or 1),
            steps=self._steps,
            seconds=time.monotonic() - self._begin,
            test=self._test,
            best=self._best,
            samples_per_second=speeds[0],
            samples_per_second_quartiles=self._medians.quartiles("samples_per_second"),
            samples_per_second_kind=kind,
            without_core=without_core,
            step_seconds=of("step_seconds"),
            speed_includes_warm_up=0 < self._steps - run.first_step <= run.warm_up_steps,
            speed_steps=len(self._medians.counted("step_seconds")),
            warm_up_steps=run.warm_up_steps,
            model_flops=run.flops.step,
            model_flops_per_second=flops,
            peak_flops_per_second=peak,
            mfu=None if flops is None or peak is None else flops / peak,  # PaLM's definition
            memory_bytes=self._memory_bytes,
            memory=self._memory(),
            global_batch=config.batch_size,
            executor=run.executor,
            ideal_bubble=run.ideal_bubble,
            breakdown=Breakdowns(*kinds),
            idle=IdleShares(*(None if shares is None else idle(shares) for shares in kinds)),
            bubble=BubbleShares(run.ideal_bubble, *(None if shares is None else shares["bubble"] for shares in kinds)),
            prediction=prediction,
            activation_bytes=self._counted[0],
            predicted_activation_bytes=self._predicted_activation_bytes,
            partitions=tuple(map(Partition, spec.layout.process_of_stage, spec.layout.devices,
                                 spec.layer_names, spec.parameters, run.cost_shares)),
            failed_checkpoints=self._failed_checkpoints,
            compiled=None if run.compiled is None else asdict(run.compiled),
            resumed_from=config.resume,
            starts=tuple(self._starts),
            restarts=run.restarts,
            config=asdict(config),
            tokens_per_second=speeds[1],
            tokens_per_second_quartiles=self._medians.quartiles("tokens_per_second"),
            unigram_perplexity=run.data.unigram_perplexity,
            global_batch_tokens=config.batch_tokens,
            **self._machine,
        )  # fmt: skip


def _starts(folder: Path, run: RunDescription) -> list[Start]:
    """The earlier starts of the run, if it is resumed or begins again in ``folder``, followed by this one."""
    earlier = [run_result_or_none(Path(one)) for one in (folder, run.config.resume) if one is not None]
    found = next((list(result.starts) for result in earlier if result is not None), [])
    if run.start is None or (found and found[-1].started == run.start.started):  # recorded before a restart
        return found
    return [*found, replace(run.start, first_step=run.first_step, code=measurement.code(run.config.model))]


def complete_result(folder: Path, task: Task, progress: Progress) -> None:
    """Completes result.json of a run that was killed between its last checkpoint and its end: status and scores."""
    result = run_result_or_none(folder)  # None also if it cannot be read
    if result is None or result.status == "completed":
        return
    with suppress(OSError):
        write_run(folder, replace(
            result, status="completed", error=None, epochs=progress.step // progress.steps_per_epoch,
            steps=progress.step, test=_tested(task, progress.test) or result.test,
            best=_tested(task, progress.best) or result.best,
        ))  # fmt: skip


def _tested(task: Task, test: Tested | None) -> Evaluation | None:
    return None if test is None else evaluation_of(task, test.scores, test.step, test.epoch)
