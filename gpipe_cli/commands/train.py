"""`gpipe train`: one run, or with -m a sweep of runs (the tables of the paper are sweeps over K and M)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.commands.command_line import GROUPS, TRAINING_KEYS, compose, take_auto, training, with_given
from gpipe_cli.commands.run_request import OF_INVOCATION, RunRequest
from gpipe_cli.commands.sweep import sweep_of
from gpipe_cli.config.groups import choice_of
from gpipe_cli.config.settings import TrainConfig, find_run, load
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.reporting.tables.sweep import show_rest, show_sweep


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises ValueError, one line, for what the user can mend."""
    sweep = sweep_of("train", arguments, requested)
    line = sweep.line
    line.refuse({})
    if isinstance(run := line.overrides.get("resume"), str) and "resume" not in line.swept:
        saved = load(find_run("resume", run, str(line.overrides.get("output") or "outputs")))
        # The run's own choices, so that `dataset.root=...` is known where the run's dataset has a root.
        chosen = {group: choice_of(getattr(saved, group)) for group in GROUPS if group not in line.overrides}
        line = replace(line, arguments=(*line.arguments, *(f"{group}={name}" for group, name in chosen.items())))
    try:
        tree = compose(line, TRAINING_KEYS)
    finally:  # also after Ctrl-C
        sweep.end()
        if sweep.runs:
            show_sweep(sweep.runs)
            show_rest(sweep.planned, sweep.runs, sweep.go_on_with)
    if tree is None:
        return 1 if any(run.failed for run in sweep.runs) else 0
    return requested(tree, line.overrides).perform()


def requested(tree: DictConfig, given: Mapping[str, object]) -> RunRequest:
    """The run that `tree` describes, of which `given` was typed. Raises ValueError for a wrong setting, and where there
    is no run to go on with."""
    if OmegaConf.select(tree, "resume") is None:
        return RunRequest(*training(tree, given))
    for key in ("init_from", "init_head"):
        if given.get(key) is not None:
            raise RefusedError(key, given[key], f"the run that is resumed has its weights already; leave {key} out")
    auto = take_auto(tree)
    saved = load(find_run("resume", str(tree.resume), str(tree.output)))
    return RunRequest(resumed(saved, tree, list(given), auto), auto)


def resumed(saved: TrainConfig, tree: DictConfig, given: Sequence[str], auto: Sequence[str] = ()) -> TrainConfig:
    """The configuration of the run to go on with, where the keys and groups in `given` are as `tree` has them."""
    values = {"partition.balance": None} if "partitions" in auto else {}  # which was made for another number of them
    values |= {key: OmegaConf.select(tree, key) for key in (*OF_INVOCATION, *given)}
    return with_given(saved, values)
