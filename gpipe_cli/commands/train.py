"""`gpipe train`: one run, or with -m a sweep of runs (the tables of the paper are sweeps over K and M)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.commands import CommandLine, compose, preparing, replace_batch_size, sweep, take_auto
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.sweep_folder import sweep_of
from gpipe_cli.config.model import choice_of
from gpipe_cli.config.settings import TrainConfig, find_run, from_tree, load
from gpipe_cli.config.typed import ELSEWHERE, show
from gpipe_cli.distributed.torchrun import leads, may_restart
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.launch.job import Bench
from gpipe_cli.reporting.tables.sweep import Run, show_rest, show_sweep
from gpipe_cli.system.interrupts import interruptible_import

# What belongs to one invocation of the command and not to the run that it goes on with.
NOT_RESUMED = ("resume", "run_folder", "output", "dry_run", "max_steps")
GROUPS = ("model", "dataset", "optimizer", "learning_rate", "hardware")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user can mend it; one line.
    """
    folder, arguments, line = sweep_of("train", arguments)
    refuse_groups(line)
    for key in ("init_from", "init_head"):
        if line.overrides.get("resume") is not None and (value := line.overrides.get(key)) is not None:
            raise ValueError(f"{key}={show(value)}: the run that is resumed has its weights already; leave {key} out")
    saved = None
    if isinstance(line.overrides.get("resume"), str) and "resume" not in line.swept:
        output = line.overrides.get("output")
        saved = load(find_run("resume", str(line.overrides["resume"]), str(output or "outputs")))
        # The run's own choices, so that `dataset.root=...` is known where the run's dataset has a root.
        chosen = {group: choice_of(getattr(saved, group)) for group in GROUPS if group not in line.overrides}
        arguments = [*arguments, *(f"{group}={name}" for group, name in chosen.items())]

    def configured(tree: DictConfig, given: Mapping[str, object]) -> tuple[TrainConfig, tuple[str, ...]]:
        replace_batch_size(tree, given)
        auto = take_auto(tree)
        return from_tree(TrainConfig, tree) if saved is None else resumed(saved, tree, list(given), auto), auto

    # where the runs of a sweep go on with different ones, only they know whose settings these are
    sweep.register_launcher(folder, None if "resume" in line.swept else configured)
    received: list[DictConfig | Run] = []
    try:
        compose("train", arguments, TrainConfig, received)
    finally:
        folder.discard()
        runs = [run for run in received if isinstance(run, Run)]
        if runs and not folder.refused:  # also after Ctrl-C
            show_sweep(runs)
            show_rest(folder.planned, runs, folder.go_on_with)
    for tree in received:
        if isinstance(tree, DictConfig):
            config, auto = configured(tree, line.overrides)
            with preparing():
                return perform(config, auto)
    return 1 if any(run.failed for run in runs) else 0


def refuse_groups(line: CommandLine) -> None:
    """Raises ValueError for a group that is set to something else than the name of a choice."""
    if (preset := line.overrides.get("presets")) is not None:  # which is optional: Hydra leaves out what is not there
        raise ValueError(
            f"presets={show(preset)}: the model and the data set choose it; leave it out, or give ~presets"
        )
    for group in GROUPS:
        if not isinstance(choice := line.overrides.get(group, ""), str):
            number = isinstance(choice, int | float) and group == "learning_rate"
            hint = f"write {ELSEWHERE['lr']}={choice}" if number else "gpipe train --help lists them"
            raise ValueError(f"{group}={show(choice)}: must be the name of a choice; {hint}")


def perform(config: TrainConfig, auto: Sequence[str], what: str = "", bench: Bench | None = None) -> int:
    """Trains, or with `bench` measures a training; returns the exit code. `what` is as `run_folder` has it."""
    if config.init_from is not None and config.resume is None:
        find_run("init_from", config.init_from, config.output)
    config, restarted = _after_restart(config) if may_restart() and leads() else (config, False)
    with run_folder(config, datetime.now(), auto, what, restarted=restarted) as folder:
        if not config.dry_run:
            fork_server.start()  # in a process beside this one, while this one imports torch itself
        with interruptible_import():
            from gpipe_cli.launch.training_run import launch  # torch comes with it

        return launch(config, folder, auto, bench)


def _after_restart(config: TrainConfig) -> tuple[TrainConfig, bool]:
    """What goes on with the run that an earlier start by torchrun has left, if there was one."""
    fork_server.start()
    with interruptible_import():
        from gpipe_cli.distributed.rendezvous import earlier_folder
        from gpipe_cli.training.checkpoint.store import checkpoints_in

    folder = earlier_folder()
    if folder is None:
        return config, False
    resume = str(folder) if checkpoints_in(folder) else config.resume
    return replace(config, run_folder=str(folder), resume=resume), True


def resumed(saved: TrainConfig, tree: DictConfig, given: Sequence[str], auto: Sequence[str] = ()) -> TrainConfig:
    """The configuration of the run to go on with, where the keys and groups in `given` are as `tree` has them.

    A group that is given with the choice that the run has already keeps the run's settings.
    """
    base = OmegaConf.create(asdict(saved))
    if "partitions" in given and ("partitions" in auto or OmegaConf.select(tree, "partitions") != saved.partitions):
        OmegaConf.update(base, "partition.balance", None)  # it was made for another number of partitions
    for key in (*NOT_RESUMED, *given):
        value = OmegaConf.select(tree, key)
        if isinstance(value, DictConfig) and value.get("name") == OmegaConf.select(base, f"{key}.name"):
            continue
        OmegaConf.update(base, key, value, merge=False, force_add=True)
    return from_tree(TrainConfig, base)
