"""`gpipe plan`: predicts a step on this or another machine without running it (the paper's Tables 1 to 3)."""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from gpipe_cli.commands.command_line import CommandLine, parse_command_line, setting_values
from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.compose_config import (
    TRAINING_KEYS,
    ConfigComposer,
    combinations,
    command_settings,
    compose,
    training_config,
)
from gpipe_cli.commands.folders import check_writable, run_folder
from gpipe_cli.commands.split_arguments import split_arguments
from gpipe_cli.commands.sweep_plan import describe_differences
from gpipe_cli.config.pipeline_settings import SCHEDULE_FILE
from gpipe_cli.config.settings import PlanSettings
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import InputError, InvalidSettingError, InvalidValueError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.tables.table import TABLE, to_text
from gpipe_cli.results.files import as_json
from gpipe_cli.system.interrupts import import_in_thread

if TYPE_CHECKING:  # it imports torch
    from gpipe_cli.planner.plan import Plan


def main(arguments: Sequence[str]) -> int:
    arguments, options = split_arguments(arguments, "format")
    line = parse_command_line("plan", arguments)
    form = options["format"]
    line.check_allowed(
        dict.fromkeys(("resume", "dry_run", "quiet"), "a plan runs nothing, and is what is shown; remove it")
    )
    check_not_torchrun("a plan needs one process, whatever it is for; call gpipe plan")
    if line.is_sweep:
        return _sweep(line, form)
    cfg = compose(line, TRAINING_KEYS)
    if cfg is None:
        return 0
    plan = _plan(cfg, line.overrides, form, shown=form == TABLE)
    if form != TABLE:
        from gpipe_cli.reporting.tables.plan import stage_table

        sys.stdout.write(as_json(plan.tree()) if form == "json" else to_text(stage_table(plan), form))
    return 0


def _plan(cfg: DictConfig, overrides: Mapping[str, object], form: str, *, shown: bool) -> "Plan":
    """The plan that `cfg` describes; `overrides`: the typed settings. Raises InputError."""
    settings = command_settings(PlanSettings, "plan", cfg)
    config, auto = training_config(cfg, overrides)
    if settings.solve is not None and config.partition.balance is not None:
        why = f"is a cut of one size of the model, and solve={settings.solve} tries others; remove it"
        raise InvalidSettingError("partition.balance", config.partition.balance, why)
    if settings.solve is not None and auto:
        raise InputError(f"solve={settings.solve}: {auto[0]}=auto cannot be chosen at the same time; give a number")
    if (file := settings.write_schedule) is not None:
        if not file.endswith(SCHEDULE_FILE):
            why = f"a schedule is read by its ending; use write_schedule={file}{SCHEDULE_FILE}"
            raise InvalidSettingError("write_schedule", file, why)
        check_writable("write_schedule", Path(file), alternative="another, or remove it")
    console = Console(stderr=form != TABLE)  # only the JSON or CSV document goes to stdout
    with run_folder(config, datetime.now(), auto, "plan") as folder, show_preparation():
        if config.cost != "datasheet" and config.hardware.is_this_machine:
            fork_server.start()  # the server imports torch in parallel with this process
        import_in_thread("gpipe_cli.commands.plan_run")  # torch comes with it
        from gpipe_cli.commands.plan_run import plan

        return plan(config, auto, settings, folder, console, shown=shown)


def _sweep(line: CommandLine, form: str) -> int:
    """Plan each combination of the settings; print a table of the plans, or all of them as a JSON or CSV document."""
    for key, why in (
        ("run_folder", "each plan of a sweep has its own folder; give output=FOLDER"),
        ("write_schedule", "each plan of a sweep has its own schedule; plan one of them without -m"),
        ("verbose", "a sweep is a table with a row for each plan; plan one of them without -m"),
    ):
        if (value := line.overrides.get(key)) is not None:
            raise InvalidSettingError(key, value, why)
    from gpipe_cli.reporting.tables.plan import SweptPlan, plan_table, show_plans

    plans: list[SweptPlan] = []
    refused: list[InputError] = []
    composer = ConfigComposer(line, TRAINING_KEYS)
    jobs = combinations(line)
    for job, (_, varied) in zip(jobs, describe_differences(jobs, line.single_valued), strict=True):
        try:
            plans.append(SweptPlan(varied, None, _plan(composer.compose(job), setting_values(job), form, shown=False)))
        except InvalidValueError:
            raise
        except InputError as error:
            plans.append(SweptPlan(varied, str(error), None))
            refused.append(error)
    if len(refused) == len(plans):
        raise refused[0]
    if form == "json":
        sys.stdout.write(as_json([plan.tree() for plan in plans]))
    elif form != TABLE:
        sys.stdout.write(to_text(plan_table(plans), form))
    else:
        show_plans(Console(), plans)
    return 0
