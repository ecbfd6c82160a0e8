"""`gpipe check`: verifies the paper's promise, partitions change nothing, on the user's model, data and machine."""

from collections.abc import Sequence
from datetime import datetime

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.compose_config import TRAINING_KEYS, command_settings, compose, training_config
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.run_start import check_data_present
from gpipe_cli.config.settings import CheckSettings, find_run
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import import_in_thread

# Settings that `gpipe check` refuses, with the reason and the remedy.
UNSUPPORTED = {
    "resume": "a check runs the first mini-batch of a training; remove it, or take its weights by init_from=...",
    "dry_run": "a check trains nothing in any case; remove it",
    "quiet": "the table is the result; remove it",
}


def main(arguments: Sequence[str]) -> int:
    line = parse_command_line("check", arguments, "it tries all partitions, schedules and recompute modes by itself")
    line.check_allowed(UNSUPPORTED)
    cfg = compose(line, TRAINING_KEYS)
    if cfg is None:
        return 0
    settings = command_settings(CheckSettings, "check", cfg)
    if settings.against is not None and "recompute" not in line.overrides:
        cfg.recompute = "never"  # torch's schedules recompute nothing
    config, auto = training_config(cfg, line.overrides)
    for key in auto:
        raise InputError(f"{key}=auto: a check needs a number; give one")
    if config.init_from is not None:
        find_run("init_from", config.init_from, config.output)
    check_data_present(config)
    with show_preparation(), run_folder(config, datetime.now(), what="check") as folder:
        fork_server.start(config)  # the server imports torch in parallel with this process
        import_in_thread("gpipe_cli.commands.cross_check_run", "gpipe_cli.commands.check_run")  # they import torch
        from gpipe_cli.commands.check_run import run_check
        from gpipe_cli.commands.cross_check_run import run_cross_check

        check_not_torchrun("gpipe check starts its own processes; call it without torchrun")
        return run_check(config, folder) if settings.against is None else run_cross_check(config, settings, folder)
