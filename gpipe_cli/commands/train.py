"""`gpipe train`: a run, or with -m a sweep of runs (the tables of the paper are sweeps over K and M)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.commands.command_line import parsed_settings
from gpipe_cli.commands.composing import take_auto, training, with_given
from gpipe_cli.commands.run_request import RunRequest, load_run
from gpipe_cli.commands.run_start import perform
from gpipe_cli.commands.sweep import sweep_of
from gpipe_cli.config.comments import GROUPS
from gpipe_cli.config.groups import TARGET, choice_of
from gpipe_cli.config.settings import (
    AUTO_BATCH,
    GO_ON,
    OF_INVOCATION,
    TrainConfig,
    find_run,
    has_checkpoint,
    naming,
    read_config,
)
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.reporting.tables.sweep import show_sweep


def main(arguments: Sequence[str]) -> int:
    sweep = sweep_of("train", arguments, requested)
    line = sweep.line
    line.check_allowed({})
    if line.overrides.get("resume") == GO_ON and line.options["multirun"]:
        raise InvalidSettingError(
            "resume", GO_ON, "a sweep goes on by its own folder, alone: resume=FOLDER, without -m"
        )
    run = _to_go_on_with(line.overrides.get("resume"), line.overrides.get("run_folder"))
    if run is not None and "resume" not in line.swept:
        folder = find_run("resume", run, str(line.overrides.get("output") or "outputs"))
        saved = read_config(folder, _instead(line.overrides))
        # The run's own choices, so that `dataset.root=...` is known where the run's dataset has a root.
        chosen = [f"{group}={choice_of(getattr(saved, group))}" for group in GROUPS if group not in line.overrides]
        line = replace(line, typed=(*line.typed, *chosen), parsed=(*line.parsed, *parsed_settings(chosen)))

    def show() -> None:
        show_sweep(sweep.runs)
        sweep.show_remaining()

    tree = sweep.compose(line, show)
    if tree is None:
        return 1 if any(run.failed for run in sweep.runs) or {run.refused for run in sweep.runs} == {True} else 0
    return perform(requested(tree, line.overrides), "train", *arguments, guided=True)


def requested(tree: DictConfig, given: Mapping[str, object]) -> RunRequest:
    """The run that `tree` describes; `given`: the typed settings. Raises InputError for a wrong setting, or if there is
    no run to resume."""
    run = _to_go_on_with(OmegaConf.select(tree, "resume"), OmegaConf.select(tree, "run_folder"))
    if run is None:
        return RunRequest(*training(tree, given))
    model = "" if OmegaConf.select(tree, "model.name") == "custom" else "model=custom "
    folder, target = find_run("resume", run, str(tree.output)), OmegaConf.select(tree, TARGET)
    saved = load_run(folder, target, lambda saved: model + naming(saved), _instead(given))
    begun = [key for key in ("init_from", "init_head") if key in given and tree.resume == GO_ON]
    for key in ("init_from", "init_head"):
        if given.get(key) is not None and not (key in begun and given[key] == getattr(saved, key)):
            raise InvalidSettingError(
                key, given[key], f"the run that is resumed has its weights already; leave {key} out"
            )
    auto = take_auto(tree)
    kept = [*begun, *(key for key in auto if key in AUTO_BATCH)]  # values chosen at the run's first start are kept
    auto = tuple(key for key in auto if key not in AUTO_BATCH)
    return RunRequest(resumed(saved, tree, [key for key in given if key not in kept], auto), auto)


def _instead(given: Mapping[str, object]) -> dict[str, object]:
    """The typed settings, which replace those of the resumed run; another K replaces its balance, too."""
    return ({"partition.balance": None} if "partitions" in given else {}) | dict(given)


def _to_go_on_with(resume: object, run_folder: object) -> str | None:
    """The folder of the run to resume; None if a new run begins."""
    if resume == GO_ON:
        return str(run_folder) if run_folder is not None and has_checkpoint(Path(str(run_folder))) else None
    return resume if isinstance(resume, str) else None


def resumed(saved: TrainConfig, tree: DictConfig, given: Sequence[str], auto: Sequence[str] = ()) -> TrainConfig:
    """The configuration of the resumed run `saved`, with the keys and groups in `given` as in `tree`."""
    values = {"partition.balance": None} if "partitions" in auto else {}  # the balance is for another K
    values |= {key: OmegaConf.select(tree, key) for key in (*OF_INVOCATION, *given)}
    return with_given(saved, values)
