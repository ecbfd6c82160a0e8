"""`gpipe evaluate`: a checkpoint of a run on its test set; K and M need not be those of the training."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from omegaconf import OmegaConf

from gpipe_cli.commands.command_line import compose, read, replace_batch_size
from gpipe_cli.commands.outcome import preparing
from gpipe_cli.config.model import choice_of
from gpipe_cli.config.settings import EvaluateConfig, EvaluateSettings, TrainConfig, find_run, from_tree, load
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import interruptible_import


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises ValueError, one line, for what the user can mend."""
    line = read("evaluate", arguments, "call it once for each run")
    tree = compose(line, EvaluateSettings)
    if tree is None:
        return 0
    config = evaluation(from_tree(EvaluateSettings, tree))
    for key in line.overrides:
        if key.partition(".")[0] == "decode" and config.training.task != "translation":
            why = f"nothing is translated by a run of model={choice_of(config.training.model)}; leave it out"
            raise RefusedError(key, line.overrides[key], why)

    fork_server.start()  # in a process beside this one, while this one imports torch itself
    with preparing():
        with interruptible_import():
            from gpipe_cli.launch.training_run import launch  # torch comes with it

        return launch(config, Path(config.run))


def evaluation(settings: EvaluateSettings) -> EvaluateConfig:
    """The configuration of the run to evaluate, with what was given on the command line in its place."""
    saved = load(find_run("run", settings.run, settings.output))
    base = OmegaConf.create(asdict(saved))
    if settings.partitions not in (None, saved.partitions):
        OmegaConf.update(base, "partition.balance", None)  # it was made for another number of partitions
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None and field.name not in ("run", "checkpoint", "decode", "output", "partition", "dataset"):
            OmegaConf.update(base, field.name, value)
    replace_batch_size(base, asdict(settings))
    if settings.partition.balance is not None:
        OmegaConf.update(base, "partition.balance", list(settings.partition.balance), merge=False)
    if settings.dataset.root is not None:
        OmegaConf.update(base, "dataset.root", settings.dataset.root)
    return EvaluateConfig(settings.run, settings.checkpoint, settings.decode, from_tree(TrainConfig, base))
