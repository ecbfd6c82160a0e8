"""The parent's side of a run: messages of the workers become console lines, files and TensorBoard events."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gpipe_cli.assembly.build import open_data
from gpipe_cli.assembly.learning_rate import learning_rate, warm_up_steps
from gpipe_cli.config.dataset import ImagesConfig
from gpipe_cli.config.model import (
    AmoebaNetConfig,
    CustomConfig,
    ResNetConfig,
    TimmConfig,
    TransformerLMConfig,
    TransformerNMTConfig,
)
from gpipe_cli.config.settings import CONFIG, TrainConfig
from gpipe_cli.config.typed import one_line
from gpipe_cli.launch.job import Bench
from gpipe_cli.launch.prepare import Prepared
from gpipe_cli.pipeline.runtime.micro_batch import micro_batch_sizes
from gpipe_cli.pipeline.runtime.recording import measured_timeline
from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.planner.model_flops import step_flops
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.stage_memory import saved_bytes
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.reporting.plots.timeline_values import StepPicture, predicted_view, timeline_view
from gpipe_cli.reporting.run.description import WARM_UP_STEPS, PartitionDescription, Prediction, RunDescription
from gpipe_cli.reporting.run.lines import show_error, show_line
from gpipe_cli.reporting.run.progress_bar import LINE_SECONDS
from gpipe_cli.reporting.run.reporter import Reporter
from gpipe_cli.reporting.run.summary import show_evaluation
from gpipe_cli.reporting.run.tensorboard_hparams import settings_of
from gpipe_cli.system.files import write_whole
from gpipe_cli.system.streams import lost_output
from gpipe_cli.training.checkpoint.store import remove_drafts
from gpipe_cli.training.data_feed import mini_batches, refuse_short_last
from gpipe_cli.training.events import (
    CheckpointWritten,
    DataFacts,
    Evaluated,
    EvaluationDone,
    EvaluationReady,
    Notes,
    SentencesDecoded,
    StepDone,
    StepRecorded,
    TrainingReady,
)
from gpipe_cli.training.fine_tuning import frozen_facts

TRACE = "timeline_trace.json"  # the newest recorded step, for ui.perfetto.dev
_SHOWN_POSITION = 5  # of an epoch: the step that is drawn; in the first one it is past the warm-up
_DRAWING_APART = 50  # times as long as a drawing took: it takes a core, which the stages may want

Ending = Literal["completed", "failed", "interrupted"]


class RunReport:
    """A training: console, TensorBoard and result.json, from the moment the workers are ready."""

    def __init__(self, prepared: Prepared, text: str, folder: Path, bench: Bench | None = None) -> None:
        self._prepared, self._text, self._folder, self._bench = prepared, text, folder, bench
        self._reporter: Reporter | None = None
        self._last: StepDone | None = None  # the step whose recording comes next
        self._shown_position = 1
        self._next_drawing = 0.0  # time.monotonic(): before it no picture is drawn
        self._undrawn: tuple[StepPicture, list[dict[str, Any]]] | None = None  # the last one, drawn at the end

    @property
    def started(self) -> bool:
        return self._reporter is not None

    def on_message(self, message: object) -> None:
        """Take a worker's message. Before TrainingReady there is nothing to show, and nothing is written."""
        if isinstance(message, TrainingReady):
            self._start(message)
            return
        assert self._reporter is not None, message
        match message:
            case StepDone():
                counted = message.activation_bytes is not None
                self._reporter.step(message, self._predicted_activations(message) if counted else None)
                self._last = message
            case StepRecorded():
                assert self._last is not None
                self._recorded(self._reporter, self._last, message)
            case Evaluated():
                self._reporter.evaluated(message)
            case CheckpointWritten():
                self._reporter.checkpointed(message.step)
            case _:
                raise AssertionError(message)

    def finish(self, ending: Ending, error: str | None) -> None:
        if ending != "completed":
            remove_drafts(self._folder)  # there must be room for result.json
        if self._reporter is not None:
            # Interrupted, it ends at once: a drawing takes seconds on a busy machine, and a sweep kills it after 3.5 s.
            first = self._next_drawing == 0
            if self._undrawn is not None and (ending == "completed" or (ending == "failed" and first)):
                self._draw(self._reporter, *self._undrawn)
            try:
                self._reporter.finish(ending, error)
                lost = lost_output()
            except OSError as unwritten:
                if ending == "completed":
                    raise
                lost = unwritten
            if error is not None and lost is not None:  # the summary or result.json does not have it
                show_error(error)
        elif error is not None:
            show_error(f"failed before the first step: {error}")

    def _start(self, ready: TrainingReady) -> None:
        write_whole(self._folder / CONFIG, self._text)
        # a step past the warm-up; not the last one of an epoch, which may be short
        self._shown_position = min(_SHOWN_POSITION, max(1, ready.steps_per_epoch - 1))
        self._reporter = Reporter(
            self._folder,
            describe(
                self._prepared,
                self._text,
                ready.data,
                notes=(*ready.data.notes, *ready.notes, *self._prepared.notes),
                first_step=ready.first_step,
                steps_per_epoch=ready.steps_per_epoch,
                gpu_names=ready.gpu_names,
                bench=self._bench,
            ),
        )
        self._reporter.banner()
        if (lost := lost_output()) is not None:  # the training could not be followed
            raise lost
        self._reporter.start()

    def _predicted_activations(self, step: StepDone) -> tuple[int, ...]:
        """What the plan's rules say of the very mini-batch whose activations were counted."""
        config, profile, plan = self._prepared.config, self._prepared.profile, self._prepared.plan
        if step.lengths != profile.lengths:
            profile = profile_model(config, lengths=step.lengths)
        return saved_bytes(config, profile, plan.bounds, plan.recompute, step.samples)

    def _recorded(self, reporter: Reporter, step: StepDone, recorded: StepRecorded) -> None:
        """When the stages did what in a step, and at most once an epoch a picture of it."""
        config, plan, placement = self._prepared.config, self._prepared.plan, self._prepared.placement
        micro_batches = len(micro_batch_sizes(step.samples, config.micro_batches))
        schedule = checked_schedule(config.schedule, placement.partitions, micro_batches, placement.recompute)
        timeline = measured_timeline(schedule, recorded.seconds, recorded.began_seconds)
        shares = breakdown(timeline, micro_batches, step.seconds)
        reporter.recorded(step.step, asdict(shares))
        shown = step.position == self._shown_position
        if self._next_drawing and not shown:
            return
        if self._bench is not None and step.step < self._bench.warm_up_steps + self._bench.steps:
            return  # to draw takes a core for a second: the last step is drawn, when the measurement is over
        title = f"epoch {step.epoch}, step {step.step}"
        same = micro_batches == plan.micro_batches and plan.costs.basis != "other_device"
        picture = StepPicture(
            epoch=step.epoch,
            step=step.step,
            measured=timeline_view(title, "measured", timeline, shares, step.seconds, recorded.began_seconds),
            predicted=predicted_view(title, plan) if same else None,
        )
        traces = [timeline.chrome_trace(name="measured", pid=0)]
        traces += [plan.timeline.chrome_trace(name="predicted", pid=1)] if same else []
        trace = [event for events in traces for event in events]
        self._undrawn = picture, trace
        if (shown or self._bench is not None) and time.monotonic() >= self._next_drawing:
            self._draw(reporter, picture, trace)

    def _draw(self, reporter: Reporter, picture: StepPicture, trace: list[dict[str, Any]]) -> None:
        self._undrawn = None
        began = time.monotonic()
        reporter.timeline(picture)
        with reporter.optional():
            write_whole(self._folder / TRACE, json.dumps(trace))
        ended = time.monotonic()
        self._next_drawing = ended + _DRAWING_APART * (ended - began)


class EvaluationReport:
    """An evaluation: one answer."""

    def __init__(self, config: TrainConfig, checkpoint: Path, folder: Path) -> None:
        self._config, self._checkpoint, self._folder = config, checkpoint, folder
        self._last_line = time.monotonic()
        self.started = False

    def on_message(self, message: object) -> None:
        self.started = True
        match message:
            case EvaluationReady():
                pass
            case SentencesDecoded():
                if time.monotonic() - self._last_line >= LINE_SECONDS:  # it may take minutes
                    show_line(Console(), f"translated   {message.done:,} of {message.of:,} sentences")
                    self._last_line = time.monotonic()
            case EvaluationDone():
                show_evaluation(Console(), self._folder, str(self._checkpoint), self._config.task, message)
            case _:
                raise AssertionError(message)

    def finish(self, ending: Ending, error: str | None) -> None:
        if error is not None:
            show_error(error)
        elif ending == "interrupted":
            show_line(Console(), "interrupted: nothing was written", "bold yellow")


class NoReport:
    """Under torchrun process 0 reports; the parents of the others only say why they failed."""

    started = True

    def on_message(self, message: object) -> None:
        pass

    def finish(self, ending: Ending, error: str | None) -> None:
        if error is not None:
            show_error(error)


def show_dry_run(prepared: Prepared, text: str, folder: Path) -> None:
    """The banner and result.json of a run that is not started: shapes, and of images that are here how many.

    Raises ValueError for what the training would refuse.
    """
    data, steps_per_epoch = _data_of_dry_run(prepared.config)
    write_whole(folder / CONFIG, text)
    notes = (*data.notes, *frozen_facts(prepared.placement), *prepared.notes)
    reporter = Reporter(folder, describe(prepared, text, data, notes=notes, steps_per_epoch=steps_per_epoch))
    reporter.banner()
    reporter.finish("dry_run")


def _data_of_dry_run(config: TrainConfig) -> tuple[DataFacts, int | None]:
    """How many samples and steps an epoch has, or a line on why that is not known. Text is not read: its vocabulary
    may take minutes to learn."""
    if not isinstance(config.dataset, ImagesConfig):
        return DataFacts(), None
    try:
        train, test = open_data(replace(config, dataset=replace(config.dataset, download=False)))
    except ValueError as error:
        return DataFacts(notes=(("not read", one_line(error)),)), None
    batches = mini_batches(config, train.catalogue, training=True)
    refuse_short_last(config, batches)
    return DataFacts(len(train), len(test)), batches.steps_per_epoch


def describe(
    prepared: Prepared,
    text: str,
    data: DataFacts,
    *,
    notes: Notes,
    steps_per_epoch: int | None,
    first_step: int = 0,
    gpu_names: tuple[str, ...] = (),
    bench: Bench | None = None,
) -> RunDescription:
    """The run as the reports describe it; facts of the data and of GPUs are missing in a dry run."""
    config, placement = prepared.config, prepared.placement
    total_steps = config.epochs * (steps_per_epoch or 1)

    def rates(step: int) -> float:
        return learning_rate(config.learning_rate, step, steps_per_epoch or 1, config.batch_size, total_steps)

    warm_up = warm_up_steps(config.learning_rate, steps_per_epoch) if steps_per_epoch is not None else 0
    every = sum(placement.cost)
    partitions = tuple(
        PartitionDescription(names, parameters, cost / every if every else None, device, layer_seconds, memory)
        for names, parameters, cost, device, layer_seconds, memory in zip(
            placement.layer_names,
            placement.parameters,
            placement.cost,
            placement.devices,
            prepared.plan.layer_seconds,
            prepared.plan.memory,
            strict=True,
        )
    )
    return RunDescription(
        model_name=model_name(config),
        dataset_name=config.dataset.name,
        train_samples=data.train_samples,
        test_samples=data.test_samples,
        partitions=partitions,
        micro_batch_sizes=micro_batch_sizes(config.batch_size, config.micro_batches) if config.batch_size else (),
        micro_batches=config.micro_batches,
        batch_tokens=config.batch_tokens,
        task=config.task,
        preset=config.preset,
        vocabulary=data.vocabulary,
        languages=data.languages,
        length=placement.lengths[0] if placement.lengths else None,
        unigram_perplexity=data.unigram_perplexity,
        notes=notes,
        schedule=config.schedule,
        recompute=config.recompute,
        executor="distributed" if placement.distributed else "in_process",
        ideal_bubble=ideal_bubble(config.partitions, config.micro_batches),
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        learning_rate=rates(first_step),
        warm_up=(warm_up, rates(warm_up - 1)) if first_step < warm_up else None,
        config=asdict(config),
        config_yaml=text,
        settings=settings_of(TrainConfig),
        speed_kind="measured_one_device" if placement.one_device else "measured",
        threads=placement.threads,
        max_steps=config.max_steps,
        resumed_from=config.resume,
        first_step=first_step,
        gpu_names=gpu_names,
        prediction=_prediction(prepared.plan) if prepared.plan.costs.basis != "other_device" else None,
        flops=step_flops(config, prepared.profile, placement),
        command="train" if bench is None else "bench",
        warm_up_steps=WARM_UP_STEPS if bench is None else bench.warm_up_steps,
    )


def _prediction(plan: Plan) -> Prediction:
    return Prediction(
        source=plan.costs.source,
        measured=plan.costs.basis == "timed_layers",
        step_seconds=plan.step_seconds,
        breakdown=asdict(plan.breakdown),
        memory_bytes=tuple(stage.total_bytes for stage in plan.memory),
        activation_bytes=plan.saved_bytes,
    )


def model_name(config: TrainConfig) -> str:
    """As the paper writes it: AmoebaNet-D (18, 256)."""
    match config.model:
        case AmoebaNetConfig() as model:
            return f"AmoebaNet-{model.variant.upper()} ({model.normal_cells}, {model.filters})"
        case ResNetConfig() as model:
            return f"ResNet-{model.depth}"
        case TransformerLMConfig() as model:
            return f"Transformer-{model.layers}" + _width(model.width, 2048)
        case TransformerNMTConfig() as model:
            return f"Transformer T({model.layers}, {model.hidden}, {model.heads})" + _width(model.width, 1024)
        case CustomConfig() as model:
            return model.target
        case TimmConfig() as model:
            return f"{model.name} (timm)"


def _width(width: int, papers: int) -> str:
    """Said where it is not the paper's, and so neither is the size."""
    return "" if width == papers else f" of width {width}"
