"""A sweep, `gpipe train -m micro_batches=1,4,8`: its runs in turn, each in a fork of this process.

The grammar is Hydra's, but not the launcher: that would run all jobs in the same process, where what a failed job
leaves behind (tensors, process groups, a CUDA context) affects the next. A failed run is reported at once and the
others go on. sweep.json records the runs that have ended, so that a sweep can be resumed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gpipe_cli.commands import command_runner
from gpipe_cli.commands.command_line import CommandLine, parse_command_line, setting_values
from gpipe_cli.commands.command_runner import CommandResult
from gpipe_cli.commands.compose_config import combinations
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.run_start import start_run
from gpipe_cli.commands.sweep_folder import SWEEP_DIR_SETTING, SWEEP_FILE, SweepFolder
from gpipe_cli.commands.sweep_plan import Cell, MakeRequest, SweepPlan, plan_sweep
from gpipe_cli.config.groups import TARGET
from gpipe_cli.config.schema import quote
from gpipe_cli.config.settings import has_checkpoint
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import (
    BAD_INPUT,
    INTERRUPTED,
    SIGPIPE_EXIT,
    STOPPED,
    InputError,
    InvalidSettingError,
)
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.lines import format_override, format_resume_command
from gpipe_cli.reporting.tables.sweep import Run
from gpipe_cli.results.run import run_result_or_none
from gpipe_cli.system.interrupts import StopRequested

_SWEEP_ENDS = {STOPPED: StopRequested, SIGPIPE_EXIT: BrokenPipeError}  # exit code of a run -> what ends the sweep too


def find_sweep(line: CommandLine) -> tuple[CommandLine, SweepFolder | None]:
    """The sweep that `resume` names, with the command line of its first start; else `line` and None. Raises InputError
    for what the user can fix: settings that have no effect or would change the sweep, a sweep of another command."""
    resumed = line.overrides.get("resume")
    if not isinstance(resumed, str) or "resume" in line.swept or not (Path(resumed) / SWEEP_FILE).is_file():
        _check_folders_have_effect(line)
        return line, None
    more = [setting for setting in line.typed if setting.partition("=")[0].lstrip("+") not in ("resume", TARGET)]
    named = {"config_name": "-cn", "config_dir": "-cd", "config_path": "-cp", "cfg": "--cfg", "info": "--info"}
    more += [f"{flag} {value}" for key, flag in named.items() if (value := line.options.get(key)) is not None]
    if more:
        raise InputError(f"{more[0]}: resume={resumed} is a sweep, whose runs would then differ in more; leave it out")
    sweep = SweepFolder.read(Path(resumed))
    if sweep.command != line.command:
        raise InputError(f"resume={resumed}: is a sweep of gpipe {sweep.command}; go on with it by that command")
    sweep.arguments = [argument for argument in sweep.arguments if not argument.startswith(SWEEP_DIR_SETTING)]
    if TARGET in line.overrides:
        sweep.targets = tuple(str(setting_values(job)[TARGET]) for job in combinations(line))
    first = parse_command_line(line.command, [*sweep.arguments, f"{SWEEP_DIR_SETTING}{quote(sweep.path)}"])
    if not first.is_sweep:
        raise InputError(
            f"{sweep.path}/{SWEEP_FILE}: cannot be read as a sweep (its arguments begin none); begin it again"
        )
    return replace(first, from_file=True), sweep


def _check_folders_have_effect(line: CommandLine) -> None:
    """Raises InvalidSettingError for a run's folder given to a sweep, and a sweep's folder given to a run."""
    what, given_by, other = "a run", "run_folder", "hydra.sweep.dir"
    if line.options["multirun"]:
        what, given_by, other = "a sweep, in which those of its runs lie,", other, given_by
    for key in (other, "hydra.run.dir"):
        if (value := line.overrides.get(key)) is not None:
            raise InvalidSettingError(
                key, value, f"the folder of {what} is given by {format_override(given_by, str(value))}"
            )


def run_sweep(
    line: CommandLine,
    typed: Sequence[str],
    resumed: SweepFolder | None,
    make_request: MakeRequest,
    show: Callable[[Path, SweepPlan, list[Run]], None],
) -> list[Run]:
    """Perform all runs of a sweep, but those that have ended in an earlier start. `line`: the arguments of its first
    start, `typed`: those of this start; `show` is called with the runs that have ended, however the sweep ends. Raises
    InputError."""
    check_not_torchrun("each of its processes would run the whole sweep; call gpipe without it, or it for each run")
    plan = plan_sweep(line, make_request, resumed)
    sweep = resumed or SweepFolder(line.command, typed, plan.folder)
    try:
        with sweep.lock(resumes=resumed is not None):
            sweep.record()
            sweep.ended = _ended_earlier(sweep, plan)
            for round_number, cell in plan.schedule(sweep.ended):
                title = plan.title(round_number, cell)
                if (before := sweep.ended.get((cell.number, round_number))) is not None:
                    Console().print(Text(f"{title}: {sweep.status(before)} before, skipped"), soft_wrap=True)
                else:
                    Console().rule(Text(title), align="left")
                    _run_cell(sweep, cell, round_number, typed)
            if resumed is None and all(run.effective_code == BAD_INPUT for run in sweep.ended.values()):
                (sweep.path / SWEEP_FILE).unlink()
                refused, sweep.ended = sweep.ended, {}
                raise InputError(next(iter(refused.values())).error)
    finally:  # Ctrl-C comes here, too
        scheduled = [(cell.number, round_number) for round_number, cell in plan.schedule(sweep.ended)]
        runs = [sweep.ended[key] for key in scheduled if key in sweep.ended]
        if runs:
            try:
                show(sweep.path, plan, runs)
            finally:
                left = len(scheduled) - len(runs)
                if left > 0 or any(run.failed and not sweep.is_final(run) for run in runs):
                    rest = f"{left} of {len(scheduled)} not run; " if left > 0 else ""
                    resume = format_resume_command(line.command, sweep.path, plan.targets)
                    Console().print(Text(f"{rest}resume with  {resume}"), soft_wrap=True)
    return runs


def _ended_earlier(sweep: SweepFolder, plan: SweepPlan) -> dict[tuple[int, int], Run]:
    """The runs of a sweep that is resumed which would give the same again."""
    cells = {(cell.number, cell.name): cell for cell in plan.cells}
    runs = [
        replace(run, settings=cells[run.run, run.name].settings, result=run_result_or_none(sweep.path / run.folder))
        for run in sweep.runs.values()
        if (run.run, run.name) in cells
    ]
    return {run.key: run for run in runs if sweep.is_final(run)}


def _run_cell(sweep: SweepFolder, cell: Cell, round_number: int, typed: Sequence[str]) -> None:
    """Run a cell, from the last checkpoint of an earlier start if there is one. Raises what ends the sweep."""
    before = sweep.runs.get((cell.number, round_number))
    if before is not None and before.name == cell.name:
        folder = sweep.path / before.folder
        # through a link nothing is written
        if sweep.command == "train" and before.folder and has_checkpoint(folder) and not folder.is_symlink():
            if _attempt(sweep, cell, before, typed, resume=True).effective_code != BAD_INPUT:
                return
            Console().print(Text(f"{cell.name} cannot go on; it begins again"), soft_wrap=True)
        sweep.discard(before)
    _attempt(sweep, cell, Run(cell.number, round_number, cell.name, sweep.unused_folder(cell.name).name), typed)


def _attempt(sweep: SweepFolder, cell: Cell, run: Run, typed: Sequence[str], *, resume: bool = False) -> Run:
    """Run a cell in a fork of this process, and record how that ends; `resume`: from the last checkpoint in its folder.
    Raises what ends the sweep."""
    run = replace(run, exit_code=None, error="", settings=cell.settings)
    folder = sweep.path / run.folder
    sweep.record(run)
    begin = time.monotonic()
    stop: BaseException | None = None
    try:
        ending = _start_in_fork(sweep.command, cell.request, folder, typed, resume=resume)
        if (ends := _SWEEP_ENDS.get(ending.exit_code)) is not None:
            stop = ends()
    except KeyboardInterrupt as asked:
        ending, stop = CommandResult(INTERRUPTED), asked
    if ending.exit_code < 0:
        fork_server.kill()  # ends the workers of a run that was killed before it could end them
    result = run_result_or_none(folder)
    error = ((result and result.error) or ending.error) if ending.exit_code else ""
    run = replace(run, exit_code=ending.exit_code, seconds=time.monotonic() - begin, error=error, result=result)
    sweep.record(run)
    sweep.ended[run.key] = run
    if run.effective_code:
        why = "" if isinstance(stop, KeyboardInterrupt) else f": {error}"
        Console().print(Text.assemble((sweep.status(run), "red"), f" {cell.name}{why}"), soft_wrap=True)
    if stop is not None:
        raise stop
    return run


def _start_in_fork(
    command: str, request: RunRequest | InputError, folder: Path, typed: Sequence[str], *, resume: bool
) -> CommandResult:
    """How a run ended that started in a fork of this process. Raises KeyboardInterrupt."""
    if isinstance(request, InputError):
        return CommandResult(BAD_INPUT, str(request))
    if not request.config.dry_run:
        fork_server.start(request.config)  # all forks share it
    command_runner.import_torch()
    request_in = request.to_resume if resume else request.in_folder
    return command_runner.wait_for(command_runner.fork_command(lambda: start_run(request_in(folder), command, *typed)))
