"""`gpipe check`: verifies the paper's promise, partitions change nothing, on the user's model, data and machine."""

from collections.abc import Sequence
from datetime import datetime

from gpipe_cli.commands.command_line import read
from gpipe_cli.commands.composing import TRAINING_KEYS, compose, own, training
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.outcome import preparing
from gpipe_cli.commands.run_start import check_data_present
from gpipe_cli.config.settings import CheckSettings, find_run
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import import_apart

# Settings that `gpipe check` refuses, with the reason and the remedy.
REFUSED = {
    "resume": "a check runs the first mini-batch of a training; leave it out, or take its weights by init_from=...",
    "dry_run": "a check trains nothing in any case; leave it out",
    "quiet": "the table is the result; leave it out",
}


def main(arguments: Sequence[str]) -> int:
    line = read("check", arguments, "it tries all partitions, schedules and recompute modes by itself")
    line.check_allowed(REFUSED)
    tree = compose(line, TRAINING_KEYS)
    if tree is None:
        return 0
    settings = own(CheckSettings, "check", tree)
    if settings.against is not None and "recompute" not in line.overrides:
        tree.recompute = "never"  # torch's schedules recompute nothing
    config, auto = training(tree, line.overrides)
    for key in auto:
        raise InputError(f"{key}=auto: a check needs a number; give one")
    if config.init_from is not None:
        find_run("init_from", config.init_from, config.output)
    check_data_present(config)
    with preparing(), run_folder(config, datetime.now(), what="check") as folder:
        fork_server.start(config)  # the server imports torch in parallel with this process
        import_apart("gpipe_cli.commands.check_against", "gpipe_cli.commands.check_run")  # they import torch
        from gpipe_cli.commands.check_against import run_against
        from gpipe_cli.commands.check_run import run_check

        check_not_torchrun("gpipe check starts its own processes; call it without torchrun")
        return run_check(config, folder) if settings.against is None else run_against(config, settings, folder)
