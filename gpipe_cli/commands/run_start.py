"""How a requested training or measurement is started, before torch is imported: its folder, its log, the workers."""

import os
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.config.groups import IMAGE_DATASETS, ImagesConfig, model_name
from gpipe_cli.config.settings import (
    RESUME_AUTO,
    TrainConfig,
    fallback_values,
    find_run,
    read_config,
    resume_or_restart,
)
from gpipe_cli.distributed.torchrun_env import is_rank_zero, limit_waits, may_restart
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.lines import log, log_to_folder, show_line
from gpipe_cli.reporting.run.summary import describe_outcome
from gpipe_cli.reporting.tables.table import SYMBOLS
from gpipe_cli.results.run import Start, format_second, run_result_or_none
from gpipe_cli.system.interrupts import import_in_thread
from gpipe_cli.system.status_line import name_long_phases


def start_run(request: RunRequest, *typed: str, single: bool = False) -> int:
    """Train or measure; `typed`: the command line without `gpipe`; `single`: the command is for this training alone, so
    that Ctrl-C leaves a checkpoint, and the summary proposes commands to type next. Returns the exit code; raises
    InputError for what the user can fix."""
    started = datetime.now().astimezone()
    start = Start(format_second(started), shlex.join(["gpipe", *typed]), folder=os.getcwd())
    config = request.config
    may_exist = config.resume == RESUME_AUTO
    if config.init_from is not None and config.resume is None:
        find_run("init_from", config.init_from, config.output)
    if may_restart() and is_rank_zero() and (earlier := _previous_run_folder(config)) is not None:
        config = replace(config, run_folder=str(earlier))
        may_exist = True
    if may_exist:
        assert config.run_folder is not None
        config = resume_or_restart(config, Path(config.run_folder))
    what = "" if request.bench is None else "bench"
    if is_rank_zero() and not config.dry_run and not may_exist:  # a complete run needs its data no more
        check_data_present(config)
    title = _run_title(config, request.auto)
    printed = sys.stdout
    with (
        redirect_stdout(open(os.devnull, "w", encoding="utf-8")) if config.quiet else nullcontext(),
        run_folder(config, started, request.auto, what, may_exist=may_exist) as folder,
        log_to_folder(folder if is_rank_zero() else None),
        limit_waits(config.timeout_seconds),
    ):
        log(f"$ {start.command}")
        if is_rank_zero() and not sys.stdout.isatty():  # a terminal names it beside what is being done
            show_line(Console(), title)
            name_long_phases()
        with show_preparation(title):
            if not config.dry_run:
                fork_server.start(config)  # the server imports torch in parallel with this process
            import_in_thread("gpipe_cli.commands.training_run")  # torch comes with it
            from gpipe_cli.commands.training_run import launch

            if config.resume is not None and (request.saved is None or may_restart()):  # torchrun has begun it again
                request = replace(request, saved=read_config(Path(config.resume), fallback_values(config)))
            request = replace(request, config=config)
            code = launch(request, folder, start, may_exist=may_exist, single=single)
    if config.quiet and is_rank_zero() and (result := run_result_or_none(folder)) is not None:
        printed.write(f"{describe_outcome(result)[0]}, in {folder}\n")
    return code


def check_data_present(config: TrainConfig) -> None:
    """Raises InvalidSettingError, before torch is imported, if nothing is at dataset.root and nothing is to be
    downloaded."""
    dataset = config.dataset
    if dataset.root is None or getattr(dataset, "download", False) or os.path.exists(dataset.root):
        return
    fetched = isinstance(dataset, ImagesConfig) and IMAGE_DATASETS[dataset.name].download
    use = f"give the file or folder with the data{', or dataset.download=true' if fetched else ''}"
    raise InvalidSettingError("dataset.root", dataset.root, f"there is nothing to be read; {use}")


def _run_title(config: TrainConfig, auto: tuple[str, ...]) -> str:
    """`AmoebaNet-D (6, 16) on digits, K = 2, M = 4`."""
    cut = (f"{symbol} = {'auto' if key in auto else getattr(config, key)}" for key, symbol in SYMBOLS.items())
    return ", ".join([f"{model_name(config.model)} on {config.dataset.name}", *cut])


def _previous_run_folder(config: TrainConfig) -> Path | None:
    """The folder of an earlier start of this run by torchrun; None for the first start."""
    fork_server.start(config)
    import_in_thread("gpipe_cli.distributed.rendezvous")  # torch comes with it
    from gpipe_cli.distributed.rendezvous import previous_run_folder

    with limit_waits(config.timeout_seconds):
        return previous_run_folder()
