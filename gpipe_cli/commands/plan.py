"""`gpipe plan`: what a step would take, on this machine or another one (Tables 1 to 3 of the paper, before they are run)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from omegaconf import DictConfig, open_dict

from gpipe_cli.commands import arranged, compose, preparing, read, replace_batch_size, take_auto
from gpipe_cli.commands.train import make_run_folder
from gpipe_cli.config import TrainConfig, from_tree
from gpipe_cli.training.work import interruptible_import, start_importing
from gpipe_cli.typed import typed


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What `conf/plan.yaml` adds to the settings of a training."""

    solve: Literal["max_model"] | None


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user can mend it; one line.
    """
    arguments = arranged(arguments)
    line = read("plan", arguments)
    if line.options["multirun"]:
        raise ValueError("-m: plan has no sweeps; partitions=auto and micro_batches=auto compare by themselves")
    received: list[DictConfig] = []
    compose("plan", arguments, TrainConfig, received)
    if not received:
        return 0
    tree = received[0]
    with open_dict(tree):
        settings = typed(PlanSettings, {"solve": tree.pop("solve")})
    replace_batch_size(tree, line.overrides)
    auto = take_auto(tree)
    config = from_tree(TrainConfig, tree)
    if settings.solve is not None and auto:
        raise ValueError(f"solve={settings.solve}: {auto[0]}=auto cannot be chosen at the same time; give a number")
    with preparing():
        if config.cost != "figures":
            start_importing()  # in a process beside this one, while this one imports torch itself
        with interruptible_import():
            from gpipe_cli.training.plan import plan

        return plan(config, auto, settings.solve, lambda: make_run_folder(config, datetime.now(), auto, "plan"))
