"""The parent's side of `gpipe export`: writes the file, evaluates checkpoint and file, and compares their losses."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from gpipe_cli.commands.run_report import NoReport
from gpipe_cli.commands.training_run import evaluation_config, find_compatible_checkpoint, run_and_report
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import DecodeConfig, ExportSettings, PartitionConfig, TrainConfig
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.launch.job import Task
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.reporting.run.description import to_evaluation
from gpipe_cli.reporting.run.lines import print_fields, show_error, show_line
from gpipe_cli.reporting.run.summary import format_scores
from gpipe_cli.training import events
from gpipe_cli.training.data_feed import look_for_data
from gpipe_cli.training.export import evaluate_file, write_model
from gpipe_cli.training.train_loop import evaluate_checkpoint
from gpipe_cli.units import size

# Allowed differences, as shares of the greater loss: from the order of summation, and with a precision below float32.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 5e-2
_NOT_DECODED = DecodeConfig(1, 0, 0.0)


def run_export(settings: ExportSettings, training: TrainConfig, file: Path) -> int:
    """Export and evaluate the model of a run with the settings `training`; returns the exit code: 0, 1 failed or the
    file gives another loss, 3 or 130 interrupted. Raises InputError for what the user can fix before anything was
    written."""
    check_not_torchrun("gpipe export starts its own processes; call it without torchrun")
    run = Path(settings.run)
    training = evaluation_config(training)
    spec = make_pipeline_spec(training)
    checkpoint = find_compatible_checkpoint(training, run, settings.checkpoint, "run", optimizer=False)
    if settings.evaluate:
        look_for_data(training, checkpoint, required=False)  # other classes do not keep the file from being written
    threads = spec.layout.threads  # the last bits of sums depend on the number of threads
    whole = replace(
        training,
        partitions=1,
        partition=PartitionConfig(None),
        stages_per_process=None,
        placement=None,
        threads=threads,
    )
    whole_spec = make_pipeline_spec(whole)
    tasks: list[tuple[Task, PipelineSpec]] = [
        (partial(write_model, settings, whole, checkpoint, file), whole_spec),
        (partial(evaluate_checkpoint, training, _NOT_DECODED, checkpoint, spec), spec),
        (partial(evaluate_file, whole, settings.format, file, checkpoint, whole_spec), whole_spec),
    ]
    show = _ExportReport(training, checkpoint, file)
    for task, task_spec in tasks if settings.evaluate else tasks[:1]:
        if exit_code := run_and_report(task, task_spec, training.timeout_seconds, show, run):
            return exit_code
    return show.compare() if settings.evaluate else 0


class _ExportReport(NoReport):
    """Shows facts about an export as they become known, and keeps both scores."""

    def __init__(self, config: TrainConfig, checkpoint: Path, file: Path) -> None:
        self._config, self._checkpoint, self._file = config, checkpoint, file
        self._pipeline_scores: events.Scores | None = None
        self._file_scores: events.Scores | None = None
        self.started = False

    def on_message(self, message: object) -> None:
        self.started = True
        console = Console()
        match message:
            case events.ModelWritten():
                averaged = " (averaged weights)" if self._config.ema_decay else ""
                facts = [
                    ("checkpoint", f"{self._checkpoint}{averaged}"),
                    ("written to", f"{self._file} ({message.contents}, {size(message.bytes)})"),
                    ("read it by", message.call),
                ]
                if isinstance(dataset := self._config.dataset, ImagesConfig):
                    pixels, mean, deviation = dataset.image_size, list(dataset.mean), list(dataset.std)
                    scale = f"(value / 255 - mean) / deviation, mean {mean}, deviation {deviation}"
                    facts.append(("images", f"RGB, {pixels} x {pixels} pixels, {scale}"))
                print_fields(console, facts)
            case events.EvaluationReady():
                pass
            case events.EvaluationDone():
                self._pipeline_scores = message.scores
                print_fields(console, [("test", f"{self._outcome(message.scores)}, by the pipeline")])
            case events.FileEvaluated():
                self._file_scores = message.scores
                print_fields(console, [("", f"{self._outcome(message.scores)}, by {message.program} from the file")])
            case _:
                raise AssertionError(message)

    def _outcome(self, scores: events.Scores) -> str:
        task = self._config.task
        return format_scores(task, replace(to_evaluation(task, scores), averaged=False))

    def compare(self) -> int:
        """Show how far apart the two losses are; returns 1 if they differ by more than the tolerance, else 0."""
        assert self._pipeline_scores is not None
        assert self._file_scores is not None
        pipeline_loss, file_loss = self._pipeline_scores.loss, self._file_scores.loss
        difference = abs(pipeline_loss - file_loss)
        how = f"the losses differ by {difference:.1g}" if pipeline_loss != file_loss else "the same loss, bit for bit"
        print_fields(Console(), [("", how)])
        tolerance = TOLERANCE if self._config.precision == "float32" else ROUNDED_TOLERANCE
        if pipeline_loss == file_loss or difference <= tolerance * max(pipeline_loss, file_loss):
            return 0
        losses = f"its loss is {file_loss:.4g}, not {pipeline_loss:.4g}"
        show_error(f"{self._file} does not compute what the checkpoint does: {losses}")
        return 1

    def finish(self, ending: Literal["completed", "failed", "interrupted"], error: str | None) -> None:
        super().finish(ending, error)
        if ending == "interrupted" and error is None:
            what = f"{self._file} is written, and not evaluated" if self.started else "nothing was written"
            show_line(Console(), f"interrupted: {what}", "bold yellow")
