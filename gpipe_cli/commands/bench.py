"""`gpipe bench`: how fast one configuration is, or with -m a table of them (the paper's tables 2 and 3)."""

from collections.abc import Mapping, Sequence
from importlib import resources

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from gpipe_cli.commands import CommandLine, compose, preparing, replace_batch_size, sweep, take_auto
from gpipe_cli.commands.sweep_folder import SweepFolder, sweep_of
from gpipe_cli.commands.train import perform, refuse_groups
from gpipe_cli.config.owners import BenchSettings
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.config.typed import show, typed
from gpipe_cli.launch.job import Bench
from gpipe_cli.reporting.tables.bench import bench_status, bench_table, show_bench, write_bench
from gpipe_cli.reporting.tables.sweep import Run, show_rest

# What a measurement has no use for, and what to do instead.
REFUSED = {
    "resume": "a measurement begins anew, and this is no sweep (no sweep.json lies there); leave it out",
    "dry_run": "a measurement of nothing; leave it out, or use gpipe train or gpipe plan",
    "max_steps": "a measurement ends after its steps; give steps=... and warm_up_steps=...",
    "epochs": "a measurement ends after its steps, be they many epochs or less than one; give steps=...",
    "evaluate_every_epochs": "a measurement evaluates nothing; leave it out",
    "check_layers": "a measurement keeps nothing of what it trains; leave it out",
    "checkpoint": "a measurement writes no checkpoints; leave it out",
}


OWN = tuple(BenchSettings.__dataclass_fields__)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user can mend it; one line.
    """
    folder, given, line = sweep_of("bench", arguments)
    _refuse(line)
    sweep.register_launcher(folder, _configured, lambda config: _settings(config).rounds)
    received: list[DictConfig | Run] = []
    try:
        # A recipe for gpipe train knows nothing of some: `++` sets what is there and adds what is not.
        added = [f"++{one}" if one.partition("=")[0] in OWN else one for one in given]
        compose("bench", added, TrainConfig, received)
    finally:
        folder.discard()
        runs = [run for run in received if isinstance(run, Run)]
        if runs and not folder.refused:  # also after Ctrl-C
            _show(folder, runs)
    for tree in received:
        if isinstance(tree, DictConfig):
            return _bench(tree, line)
    statuses = {bench_status(run) for run in runs}
    return 1 if runs and ("failed" in statuses or "measured" not in statuses) else 0


def _bench(tree: DictConfig, line: CommandLine) -> int:
    settings = _settings(tree)
    if "rounds" in line.overrides and settings.rounds > 1:  # a recipe's is for when it is swept
        raise ValueError(f"rounds={settings.rounds}: one configuration has nothing to take turns with; add -m")
    config, auto = _configured(tree, line.overrides)
    with preparing():
        return perform(config, auto, "bench", Bench(settings.warm_up_steps, settings.steps))


def _configured(tree: DictConfig, given: Mapping[str, object]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The training that is measured, and its settings that are to be chosen."""
    settings = _settings(tree)
    with open_dict(tree):
        for key in OWN:
            tree.pop(key, None)
    steps = settings.warm_up_steps + settings.steps
    # An epoch has at least one step: there are enough of them.
    for key, value in {"epochs": steps, "max_steps": steps, "dry_run": False, "resume": None}.items():
        OmegaConf.update(tree, key, value, force_add=True)
    replace_batch_size(tree, given)
    auto = take_auto(tree)
    return from_tree(TrainConfig, tree), auto


def _settings(tree: DictConfig) -> BenchSettings:
    """A recipe may know nothing of them: then they are as in conf/bench.yaml."""
    text = resources.files("gpipe_cli.conf").joinpath("bench.yaml").read_text(encoding="utf-8")
    both = (OmegaConf.create(text.partition("\nhydra:")[0]), tree)
    values = {key: next(v for t in reversed(both) if (v := OmegaConf.select(t, key)) is not None) for key in OWN}
    return typed(BenchSettings, values)


def _refuse(line: CommandLine) -> None:
    """Raises ValueError for what means nothing to a measurement."""
    refuse_groups(line)
    for key, value in line.overrides.items():
        remedy = REFUSED.get(key) or REFUSED.get(key.partition(".")[0])
        if remedy is not None and ("." in key or value not in (None, False)):
            raise ValueError(f"{key}={show(value)}: {remedy}")
    if "rounds" in line.swept:
        raise ValueError(
            f"rounds={line.overrides['rounds']}: all rows of a table have the same rounds; give one number"
        )


def _show(folder: SweepFolder, runs: Sequence[Run]) -> None:
    assert folder.path is not None
    table = bench_table(runs, folder.rounds)
    try:
        write_bench(folder.path, table)
    finally:  # a table that cannot be written is shown all the same
        show_bench(Console(), table, folder.path)
    unfinished = {"failed", "interrupted"} & {bench_status(run) for run in runs}
    if unfinished or len(runs) < folder.planned:
        show_rest(folder.planned, runs, folder.go_on_with)
