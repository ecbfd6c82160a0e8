"""`gpipe bench`: measures the speed of a configuration or, with -m, of several (the paper's Tables 2 and 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.compose_config import TRAINING_KEYS, command_settings, compose, training_config
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.run_start import start_run
from gpipe_cli.commands.sweep import find_sweep, run_sweep
from gpipe_cli.commands.sweep_plan import SweepPlan
from gpipe_cli.config.settings import BenchSettings
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.reporting.tables.sweep import Run, bench_status, bench_table, show_bench, write_bench

# Settings that `gpipe bench` refuses, with the reason and the remedy.
UNSUPPORTED = {
    "resume": "a measurement starts from scratch, and this is not a sweep (it has no sweep.json); remove it",
    "dry_run": "a measurement of nothing; remove it, or use gpipe train or gpipe plan",
    "max_steps": "a measurement ends after its steps; give steps=... and warm_up_steps=...",
    "epochs": "a measurement ends after its steps, be they many epochs or less than one; give steps=...",
    "evaluate_every_epochs": "a measurement evaluates nothing; remove it",
    "check_layers": "a measurement keeps nothing of what it trains; remove it",
    "checkpoint": "a measurement writes no checkpoints; remove it",
}


def main(arguments: Sequence[str]) -> int:
    line, sweep = find_sweep(parse_command_line("bench", arguments))
    line.check_allowed(UNSUPPORTED)
    if "rounds" in line.swept:
        raise InvalidSettingError(
            "rounds", line.overrides["rounds"], "all rows of a table have the same; give one number"
        )
    if line.is_sweep:
        statuses = {bench_status(run) for run in run_sweep(line, arguments, sweep, _make_request, _show)}
        return 1 if "failed" in statuses or "measured" not in statuses else 0
    if (cfg := compose(line, TRAINING_KEYS)) is None:
        return 0
    request = _make_request(cfg, line.overrides)
    if line.overrides.get("rounds", 1) != 1:  # typed; a recipe's own rounds apply when it is swept
        raise InputError(f"rounds={line.overrides['rounds']}: one configuration has nothing to alternate with; add -m")
    return start_run(request, "bench", *arguments)


def _make_request(cfg: DictConfig, overrides: Mapping[str, object]) -> RunRequest:
    """The measurement that `cfg` describes; `overrides`: the typed settings. Raises InputError for a wrong setting."""
    settings = command_settings(BenchSettings, "bench", cfg)
    steps = settings.warm_up_steps + settings.steps
    # There are as many epochs as steps: every epoch has a step or more, so max_steps ends the measurement.
    for key, value in {"epochs": steps, "max_steps": steps, "dry_run": False, "resume": None}.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return RunRequest(*training_config(cfg, overrides), settings)


def _show(folder: Path, plan: SweepPlan, runs: Sequence[Run]) -> None:
    table = bench_table(runs, plan.rounds, plan.baseline)
    try:
        write_bench(folder, table)
    finally:  # show the table even if it cannot be written
        show_bench(Console(), table, folder)
