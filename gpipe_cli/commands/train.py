"""`gpipe train`: a run, or with -m a sweep of runs (the tables of the paper are sweeps over K and M)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.commands.command_line import parse_command_line, parse_settings
from gpipe_cli.commands.compose_config import TRAINING_KEYS, apply_overrides, compose, substitute_auto, training_config
from gpipe_cli.commands.run_request import RunRequest, follow_data
from gpipe_cli.commands.run_start import start_run
from gpipe_cli.commands.sweep import find_sweep, run_sweep
from gpipe_cli.config.comments import GROUPS
from gpipe_cli.config.groups import TARGET, group_choice
from gpipe_cli.config.settings import (
    AUTO_BATCH,
    PER_INVOCATION,
    RESUME_AUTO,
    TrainConfig,
    find_run,
    format_target_setting,
    has_checkpoint,
    read_config,
    use_target,
)
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.reporting.tables.sweep import show_sweep


def main(arguments: Sequence[str]) -> int:
    line, sweep = find_sweep(parse_command_line("train", arguments))
    line.check_allowed({})
    if line.overrides.get("resume") == RESUME_AUTO and line.options["multirun"]:
        raise InvalidSettingError(
            "resume", RESUME_AUTO, "a sweep goes on by its own folder, alone: resume=FOLDER, without -m"
        )
    run = _find_run_to_resume(line.overrides.get("resume"), line.overrides.get("run_folder"))
    saved = None
    if run is not None and "resume" not in line.swept:
        folder = find_run("resume", run, str(line.overrides.get("output") or "outputs"))
        saved = read_config(folder, _resume_fallbacks(line.overrides))
        # The run's own choices, so that `dataset.root=...` is known where the run's dataset has a root.
        chosen = [f"{group}={group_choice(getattr(saved, group))}" for group in GROUPS if group not in line.overrides]
        line = replace(line, typed=(*line.typed, *chosen), parsed=(*line.parsed, *parse_settings(chosen)))
    if line.is_sweep:
        runs = run_sweep(line, arguments, sweep, make_request, lambda folder, _, runs: show_sweep(folder, runs))
        return 1 if any(run.failed for run in runs) or all(run.refused for run in runs) else 0
    cfg = compose(line, TRAINING_KEYS)
    return 0 if cfg is None else start_run(make_request(cfg, line.overrides, saved), "train", *arguments, single=True)


def make_request(cfg: DictConfig, overrides: Mapping[str, object], saved: TrainConfig | None = None) -> RunRequest:
    """The run that `cfg` describes; `overrides`: the typed settings; `saved`: the configuration of the run to resume,
    if it was read. Raises InputError for a wrong setting, or if there is no run to resume."""
    run = _find_run_to_resume(OmegaConf.select(cfg, "resume"), OmegaConf.select(cfg, "run_folder"))
    if run is None:
        return RunRequest(*training_config(cfg, overrides))
    model = "" if OmegaConf.select(cfg, "model.name") == "custom" else "model=custom "
    folder, target = find_run("resume", run, str(cfg.output)), OmegaConf.select(cfg, TARGET)
    saved = saved or read_config(folder, _resume_fallbacks(overrides))
    saved = use_target(saved, folder, target, lambda named: model + format_target_setting(named))
    saved = follow_data(saved, folder)
    begun = [key for key in ("init_from", "init_head") if key in overrides and cfg.resume == RESUME_AUTO]
    for key in ("init_from", "init_head"):
        if overrides.get(key) is not None and not (key in begun and overrides[key] == getattr(saved, key)):
            raise InvalidSettingError(
                key, overrides[key], f"the run that is resumed has its weights already; leave {key} out"
            )
    auto = substitute_auto(cfg)
    kept = [*begun, *(key for key in auto if key in AUTO_BATCH)]  # values chosen at the run's first start are kept
    auto = tuple(key for key in auto if key not in AUTO_BATCH)
    config = resumed_config(saved, cfg, [key for key in overrides if key not in kept], auto)
    if config.run_folder is None and not config.dry_run:  # a dry run would replace the run's results
        config = replace(config, run_folder=config.resume)
    return RunRequest(config, auto, saved=saved)


def _resume_fallbacks(overrides: Mapping[str, object]) -> dict[str, object]:
    """The typed settings, which replace those of the resumed run; another K replaces its balance, too."""
    return ({"partition.balance": None} if "partitions" in overrides else {}) | dict(overrides)


def _find_run_to_resume(resume: object, run_folder: object) -> str | None:
    """The folder of the run to resume; None if a new run begins."""
    if resume == RESUME_AUTO:
        return str(run_folder) if run_folder is not None and has_checkpoint(Path(str(run_folder))) else None
    return resume if isinstance(resume, str) else None


def resumed_config(
    saved: TrainConfig, cfg: DictConfig, overrides: Sequence[str], auto: Sequence[str] = ()
) -> TrainConfig:
    """The configuration of the resumed run `saved`, with the keys and groups in `overrides` as in `cfg`."""
    values = {"partition.balance": None} if "partitions" in auto else {}  # the balance is for another K
    values |= {key: OmegaConf.select(cfg, key) for key in (*PER_INVOCATION, *overrides)}
    return apply_overrides(saved, values)
