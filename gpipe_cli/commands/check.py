"""`gpipe check`: proves on one's own model, data and machine what the paper promises: partitions change nothing."""

from collections.abc import Sequence
from datetime import datetime

from omegaconf import DictConfig

from gpipe_cli.commands import arranged, compose, preparing, read, replace_batch_size, take_auto
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.train import refuse_groups
from gpipe_cli.config.settings import TrainConfig, find_run, from_tree
from gpipe_cli.config.typed import show
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import interruptible_import

# What a check has no use for, and what to do instead.
REFUSED = {
    "resume": "a check runs the first mini-batch of a training; leave it out, or take its weights by init_from=...",
    "dry_run": "a check trains nothing in any case; leave it out",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user can mend it; one line.
    """
    arguments = arranged(arguments)
    line = read("check", arguments)
    if line.options["multirun"]:
        raise ValueError("-m: check has no sweeps; it tries all partitions, schedules and recompute modes by itself")
    refuse_groups(line)
    for key, remedy in REFUSED.items():
        if line.overrides.get(key):
            raise ValueError(f"{key}={show(line.overrides[key])}: {remedy}")
    received: list[DictConfig] = []
    compose("check", arguments, TrainConfig, received)
    if not received:
        return 0
    replace_batch_size(received[0], line.overrides)
    for key in take_auto(received[0]):
        raise ValueError(f"{key}=auto: a check tries what it is told; give a number")
    config = from_tree(TrainConfig, received[0])
    with preparing():
        return _check(config)


def _check(config: TrainConfig) -> int:
    if config.init_from is not None:
        find_run("init_from", config.init_from, config.output)
    with run_folder(config, datetime.now(), what="check") as folder:
        fork_server.start()  # in a process beside this one, while this one imports torch itself
        with interruptible_import():
            from gpipe_cli.launch.checking import run_check

        return run_check(config, folder)
