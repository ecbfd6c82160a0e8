"""`gpipe plan`: what a step would take, on this machine or another one (the paper's Tables 1 to 3, unrun)."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gpipe_cli.commands.command_line import TRAINING_KEYS, compose, own, read, training
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.outcome import preparing
from gpipe_cli.config.settings import SCHEDULE_FILE, PlanSettings
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import interruptible_import


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    line = read("plan", arguments, "partitions=auto and micro_batches=auto compare by themselves")
    line.refuse(dict.fromkeys(("resume", "dry_run"), "a plan runs nothing, and begins with nothing; leave it out"))
    if torchrun() is not None:
        raise InputError("torchrun: a plan needs one process, whatever it is for; call gpipe plan")
    tree = compose(line, TRAINING_KEYS)
    if tree is None:
        return 0
    settings = own(PlanSettings, "plan", tree)
    config, auto = training(tree, line.overrides)
    if settings.solve is not None and config.partition.balance is not None:
        why = f"is a cut of one size of the model, and solve={settings.solve} tries others; leave it out"
        raise RefusedError("partition.balance", config.partition.balance, why)
    if settings.solve is not None and auto:
        raise InputError(f"solve={settings.solve}: {auto[0]}=auto cannot be chosen at the same time; give a number")
    file = None if settings.write_schedule is None else _new_file(settings.write_schedule)
    with run_folder(config, datetime.now(), auto, "plan") as folder, preparing():
        if config.cost != "figures":
            fork_server.start()  # in a process beside this one, while this one imports torch itself
        with interruptible_import():
            from gpipe_cli.launch.plan_run import plan

        return plan(config, auto, settings.solve, folder, file)


def _new_file(name: str) -> Path:
    """Where the schedule goes. Raises InputError for a place that is taken, or is none."""
    file = Path(name)
    if not name.endswith(SCHEDULE_FILE):
        raise RefusedError(
            "write_schedule", name, f"a schedule is read by its ending; use write_schedule={name}{SCHEDULE_FILE}"
        )
    if not file.parent.is_dir():
        raise RefusedError("write_schedule", name, f"there is no folder {file.parent}; make it, or give another")
    if os.path.lexists(file):
        raise RefusedError("write_schedule", name, "it is there already; give another, or remove it")
    return file
