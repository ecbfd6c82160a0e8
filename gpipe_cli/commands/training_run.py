"""The parent's side of a training or an evaluation: prepare, start the workers, watch them, report."""

import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.freezing import find_frozen
from gpipe_cli.commands.prepare_run import check_feasible, prepare
from gpipe_cli.commands.restart import prepare_restart
from gpipe_cli.commands.run_report import EvaluationReport, NoReport, Report, run_report, show_dry_run
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.config.settings import EvaluateSettings, TrainConfig
from gpipe_cli.distributed.rendezvous import Decision, broadcast_decision
from gpipe_cli.distributed.torchrun_env import is_rank_zero, limit_waits, read_torchrun_env
from gpipe_cli.errors import BAD_INPUT, FAILED, INTERRUPTED, STOPPED, InputError, InvalidSettingError, error_text
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.launch.job import Failure, Reason, Task
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.reporting.run.lines import show_error, show_text
from gpipe_cli.reporting.run.reporter import complete_result
from gpipe_cli.results.run import Restart, Start
from gpipe_cli.system.files import write_atomic
from gpipe_cli.system.interrupts import STOP_SIGNALS, StopRequested
from gpipe_cli.system.status_line import phase
from gpipe_cli.training.checkpoint.files import (
    RUN_FOLDER_MISSING,
    find_checkpoint,
    missing_best_checkpoint,
)
from gpipe_cli.training.checkpoint.restore import (
    CheckpointCompatibility,
    check_optimizer_state,
    check_restorable,
    check_same_data,
)
from gpipe_cli.training.data_feed import check_data
from gpipe_cli.training.events import TrainingStopped
from gpipe_cli.training.fine_tuning import find_weights
from gpipe_cli.training.milestones import Milestones, initial_progress, progress_if_complete
from gpipe_cli.training.train_loop import evaluate_checkpoint, train
from gpipe_cli.units import plural


def launch(request: RunRequest, folder: Path, start: Start, *, may_exist: bool, single: bool = False) -> int:
    """Run the training to its end; returns the exit code (0, 1 failed, 2 bad input, 3 stopped by one of STOPS, 130
    interrupted).

    result.json records `start`; `may_exist`: `folder` may hold an earlier start of this run, to be resumed or complete
    already; `single`: as in `run_start.start_run`. Raises InputError for what the user can fix before anything has run.
    """
    config = request.config
    if config.max_restarts and read_torchrun_env() is not None:
        why = f"torchrun itself starts processes again, by --max-restarts={config.max_restarts}; leave this out"
        raise InvalidSettingError("max_restarts", config.max_restarts, why)
    restarts = tuple[Restart, ...]()
    while True:
        may_be_complete = (may_exist or restarts) and is_rank_zero() and not config.dry_run
        if may_be_complete and (progress := progress_if_complete(request.config, folder)) is not None:
            find_source(request)  # refuses settings with which the run could not go on
            broadcast_decision(lambda: Decision(folder, config.resume, None, complete=True))
            evaluate_by = complete_result(folder, config, progress)
            rest = f"score the test set by  {evaluate_by}" if evaluate_by else "nothing is left to do"
            done = f"the run that lies there is complete, with {plural(progress.step, 'step')}; {rest}"
            show_text(Console(), f"{folder}: {done}")
            return 0
        ended = _train(request, folder, start, may_exist, single, restarts)
        if isinstance(ended, int):
            return ended
        lost, chosen = ended
        fork_server.kill()  # whatever state it is in
        request, restart, how = prepare_restart(request, lost, chosen, folder)
        restarts = (*restarts, restart)
        text = f"restart {len(restarts)} of {config.max_restarts}: {lost.text}; {how}"
        show_text(Console(), text, "yellow")


def evaluate(settings: EvaluateSettings, config: TrainConfig) -> int:
    """Evaluate a checkpoint of a run; `config`: its settings, with the given ones in their place. Returns the exit code
    and raises InputError, as `launch`."""
    folder = Path(settings.run)
    training = evaluation_config(config)
    spec = make_pipeline_spec(training, torchrun=read_torchrun_env())
    source = partial(find_compatible_checkpoint, training, folder, settings.checkpoint, "run", optimizer=False)
    with limit_waits(training.timeout_seconds):
        decision = broadcast_decision(lambda: Decision(folder, None, source()))
    assert decision.source is not None
    task = partial(evaluate_checkpoint, training, settings.decode, decision.source, spec)
    show = EvaluationReport(training, decision.source, folder) if is_rank_zero() else NoReport()
    return run_and_report(task, spec, training.timeout_seconds, show, folder, decision.start)


def evaluation_config(config: TrainConfig) -> TrainConfig:
    """The settings for an evaluation of a run: nothing is kept for a backward, so what was planned for the memory of
    the training does not matter."""
    hardware = replace(config.hardware, memory_gib=None)
    return replace(config, recompute="never", cost="datasheet", compile=False, hardware=hardware)


def _train(
    request: RunRequest, folder: Path, start: Start, may_exist: bool, single: bool, restarts: tuple[Restart, ...]
) -> int | tuple[Failure, TrainConfig]:
    """Run a single start of a training, from `prepare` to its end; returns the exit code or, if the run is to restart,
    why a process was lost and the configuration, with the values chosen for `auto`."""
    config, auto = request.config, request.auto
    is_run = request.bench is None
    source = None
    torchrun = read_torchrun_env()
    check_feasible(config, auto, torchrun)
    if is_rank_zero():
        source = find_source(request)
        if config.resume is not None:
            progress = initial_progress(config, source)
            Milestones(config, progress.steps_per_epoch).check_not_finished(progress.step)
        if not config.dry_run:
            check_data(config, auto, source)
    prepared = prepare(
        config, auto, lambda line: show_text(Console(), line) if is_rank_zero() else None, torchrun, saved=request.saved
    )
    training, spec = prepared.config, prepared.spec
    if training.dry_run:
        if is_rank_zero():
            show_dry_run(prepared, folder, start)
        return 0
    if training.compile and is_rank_zero() and not restarts:
        show_text(Console(), "compiling the layers, which may take minutes the first time (compile=true) ...")
    decision = broadcast_decision(lambda: Decision(folder, config.resume, source))
    if decision.complete:
        return 0
    if (
        may_exist
        and not is_rank_zero()
        and config.run_folder is not None
        and (config.resume, decision.resume).count(None) == 1
    ):
        why = "process 0 sees another run there than this process; give the absolute path of a folder that all share"
        raise InvalidSettingError("run_folder", config.run_folder, why)
    task = partial(train, training, spec, decision, only_steps=not is_run)
    show_next_commands = single and not torchrun
    show = (
        run_report(prepared, folder, start, request.bench, restarts, show_next_commands=show_next_commands)
        if is_rank_zero()
        else NoReport()
    )
    # a sweep ends at once by Ctrl-C, with all its runs
    stops = (signal.SIGINT, *STOP_SIGNALS) if single else STOP_SIGNALS if is_run else ()
    ended = _run(task, spec, training.timeout_seconds, show, folder, decision.start, stops)
    if isinstance(ended, int):
        return ended
    if is_run and len(restarts) < config.max_restarts and ended.reason in (Reason.LOST, Reason.ABORTED, Reason.PEER):
        show.break_off()
        return ended, training
    return _report_failure(ended, show, folder)


def find_source(request: RunRequest) -> Path | None:
    """The checkpoint that a training resumes from, or takes weights from; None if it begins anew. Raises InputError,
    in a single line, if it does not fit the run."""
    config, saved = request.config, request.saved
    if config.resume is not None:
        assert saved is not None
        check_optimizer_state(config, saved)
        checkpoint = find_compatible_checkpoint(config, Path(config.resume), "last", "resume", optimizer=True)
        check_same_data(config, saved)  # after what a model of another size is told
        if (best := missing_best_checkpoint(checkpoint)) is not None:
            show_error(f"warning: {best}: the best checkpoint no longer exists; the next evaluation is the best")
        return checkpoint
    return None if config.init_from is None else find_weights(config, show_error)


def find_compatible_checkpoint(config: TrainConfig, run: Path, which: str, setting: str, *, optimizer: bool) -> Path:
    """The checkpoint `which` ("last" or "best") of a run; if it is damaged, the newest intact checkpoint, with a
    warning on stderr. Raises InputError, in a single line, if there is none, or it is another model's."""
    model = build_model(config)
    freeze(model, find_frozen(config, model))

    def check(checkpoint: Path) -> None:
        check_restorable(CheckpointCompatibility(setting, run, checkpoint, config, model), model, optimizer=optimizer)

    return find_checkpoint(run, which, setting, check, show_error)


def run_and_report(
    task: Task, spec: PipelineSpec, timeout_seconds: float, show: Report, folder: Path, start: str = ""
) -> int:
    """Have the workers do `task`, and `show` what they report and how it ended; returns the exit code. The traceback of
    a failure goes into `folder`. Raises InputError for what the user can fix before anything was shown."""
    ended = _run(task, spec, timeout_seconds, show, folder, start)
    return ended if isinstance(ended, int) else _report_failure(ended, show, folder)


def _run(
    task: Task, spec: PipelineSpec, timeout_seconds: float, show: Report, folder: Path, start: str,
    stops: Collection[int] = (),
) -> int | Failure:  # fmt: skip
    """`run_and_report`, but a failure is returned and not reported; `stops`: as of `run_task`."""
    stopped: TrainingStopped | None = None

    def on_message(message: object) -> None:
        nonlocal stopped
        if isinstance(message, TrainingStopped):
            stopped = message
        show.on_message(message)

    why = ", so that stages can compute at once," if spec.layout.processes > 1 else ""
    phase(f"starting {plural(spec.layout.local_processes, 'process')}{why} and reading data")
    try:
        failure = run_task(task, spec, timeout_seconds, on_message, start, stops=stops)
    except KeyboardInterrupt as asked:
        if not show.started:
            raise
        show.finish("interrupted", None)
        return STOPPED if isinstance(asked, StopRequested) else INTERRUPTED
    except SystemExit:  # the console's reader has ended, as in `gpipe train | head`
        show.finish("interrupted", "nobody reads the output any more")
        raise
    except OSError as error:  # this process cannot write a file that the run needs
        gone = None if folder.is_dir() else f"{folder}: {RUN_FOLDER_MISSING}"
        if not show.started:
            if gone is not None and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(gone) from error
            raise
        show.finish("failed", gone or error_text(error))
        return FAILED
    if failure is None:
        show.finish("interrupted" if stopped else "completed", None)
        return 0 if stopped is None else STOPPED if stopped.signal in STOP_SIGNALS else INTERRUPTED
    return failure


def _report_failure(failure: Failure, show: Report, folder: Path) -> int:
    """Show a failure; returns the exit code. Raises InputError as `run_and_report`."""
    if failure.reason is Reason.USER and not show.started:
        raise failure.invalid_setting or InputError(failure.text)
    text = failure.text
    details = folder / "failure.txt"
    if failure.traceback:
        with suppress(OSError):  # no folder, or a full disk: why the run failed matters more
            write_atomic(details, failure.traceback)
            text += f" (traceback in {details})"
    show.finish("failed", text)
    return BAD_INPUT if failure.reason is Reason.USER else FAILED
