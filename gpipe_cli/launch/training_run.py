"""A run or an evaluation from beginning to end, in its parent process: prepare, start, watch, report."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.settings import EvaluateConfig, TrainConfig, load, to_yaml
from gpipe_cli.config.typed import one_line
from gpipe_cli.distributed.rendezvous import Decision, agree
from gpipe_cli.distributed.torchrun import leads
from gpipe_cli.launch.job import Bench, Reason, Task
from gpipe_cli.launch.prepare import prepare
from gpipe_cli.launch.run_report import EvaluationReport, NoReport, Report, RunReport, show_dry_run
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.planner.placement import Placement, make_placement
from gpipe_cli.reporting.run.lines import show_error, show_line
from gpipe_cli.system.files import write_whole
from gpipe_cli.training.checkpoint.restore import Comparison, check_restorable, refuse_other_optimizer
from gpipe_cli.training.checkpoint.store import find_checkpoint
from gpipe_cli.training.fine_tuning import find_weights
from gpipe_cli.training.train_loop import evaluate_checkpoint, train


def launch(
    config: TrainConfig | EvaluateConfig, folder: Path, auto: Collection[str] = (), bench: Bench | None = None
) -> int:
    """Run the training or evaluation to its end; returns the exit code (0, 1 failed, 2 bad input, 130 interrupted).

    The settings in `auto` are chosen first; with `bench` the training is measured and does nothing else. Raises
    ValueError, one line, for what the user can mend before anything has run.
    """
    show: Report
    task: Task
    if isinstance(config, EvaluateConfig):
        training = for_evaluation(config.training)
        placement = make_placement(training)
        source = partial(fitting_checkpoint, training, placement, folder, config.checkpoint, "run", optimizer=False)
        decision = agree(lambda: Decision(folder, None, source()))
        assert decision.source is not None
        task = partial(evaluate_checkpoint, training, config.decode, decision.source, placement)
        show = EvaluationReport(training, decision.source, folder) if leads() else NoReport()
    else:
        prepared = prepare(config, auto, lambda line: show_line(Console(), line) if leads() else None)
        training, placement, text = prepared.config, prepared.placement, to_yaml(prepared.config)
        if training.dry_run:
            if leads():
                find_source(training, placement)
                show_dry_run(prepared, folder)
            return 0
        if training.compile and leads():
            show_line(Console(), "compiling the layers, which may take minutes the first time (compile=true) ...")
        decision = agree(lambda: Decision(folder, config.resume, find_source(training, placement)))
        training = replace(training, resume=decision.resume)
        task = partial(
            train, training, text, placement, decision.folder, source=decision.source, only_steps=bench is not None
        )
        show = RunReport(prepared, folder, bench) if leads() else NoReport()
    return run_and_report(task, placement, training.timeout_seconds, show, folder, decision.start)


def for_evaluation(config: TrainConfig) -> TrainConfig:
    """The settings of a run as its evaluation takes them: nothing is kept for a backward, so that what was planned for
    the memory of the training does not matter."""
    hardware = replace(config.hardware, memory_gib=None)
    return replace(config, recompute="never", cost="figures", compile=False, hardware=hardware)


def find_source(config: TrainConfig, placement: Placement) -> Path | None:
    """The checkpoint that a training goes on from, or takes weights of; None: it begins anew.

    Raises ValueError, one line, for one that does not fit the run.
    """
    if config.resume is not None:
        refuse_other_optimizer(config, load(Path(config.resume)))
        return fitting_checkpoint(config, placement, Path(config.resume), "last", "resume", optimizer=True)
    return None if config.init_from is None else find_weights(config, show_error)


def fitting_checkpoint(
    config: TrainConfig, placement: Placement, run: Path, which: str, setting: str, *, optimizer: bool
) -> Path:
    """The last or the best checkpoint of a run; if it is damaged the newest one that is not, with a warning on stderr.

    Raises ValueError, one line, if there is none, or they are of another model.
    """
    model = build_model(config)
    freeze(model, placement.frozen)

    def check(checkpoint: Path) -> None:
        check_restorable(Comparison.of(setting, run, checkpoint, config, model), model, optimizer=optimizer)

    return find_checkpoint(run, which, setting, check, show_error)


def run_and_report(
    task: Task, placement: Placement, timeout_seconds: float, show: Report, folder: Path, start: str = ""
) -> int:
    """Have the workers do the task, and `show` what they report and how it ended; returns the exit code. What failed is
    told in `folder`.

    Raises ValueError, one line, for what the user can mend before anything was shown.
    """
    try:
        failure = run_task(task, placement, timeout_seconds, show.on_message, start)
    except KeyboardInterrupt:
        if not show.started:
            raise
        show.finish("interrupted", None)
        return 130
    except SystemExit:  # the console's reader has ended, as in `gpipe train | head`
        show.finish("interrupted", "nobody reads the output any more")
        raise
    except OSError as error:  # of this process: what the run cannot do without cannot be written
        if not show.started:
            raise
        show.finish("failed", one_line(error))
        return 1
    if failure is None:
        show.finish("completed", None)
        return 0
    if failure.reason is Reason.USER and not show.started:
        raise failure.refused or ValueError(failure.text)
    text, details = failure.text, folder / "failure.txt"
    if failure.traceback:
        with suppress(OSError):  # no folder, no room: more important is why the run failed
            write_whole(details, failure.traceback)
            text += f" (traceback in {details})"
    show.finish("failed", text)
    return 2 if failure.reason is Reason.USER else 1
