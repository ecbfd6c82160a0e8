"""The work of `gpipe plan`: profile the model, choose the `auto` settings, simulate, and write and show the plan."""

import gc
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gpipe_cli.benchmark.machine_timing import uses_measured_costs
from gpipe_cli.commands.prepare_run import NOT_COMPILED, check_feasible, prepare
from gpipe_cli.config.groups import model_name
from gpipe_cli.config.settings import PlanSettings, TrainConfig, to_yaml
from gpipe_cli.errors import InputError
from gpipe_cli.planner.auto_settings import solve_max_model
from gpipe_cli.planner.data_sheet import with_data_sheet
from gpipe_cli.planner.plan import PLAN, Plan
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.planner.step_schedule import validated_schedule_for
from gpipe_cli.reporting.page.page import PAGE, PageContext, write_page
from gpipe_cli.reporting.plots.chrome_trace import TRACE, write_trace
from gpipe_cli.reporting.plots.picture import write_picture
from gpipe_cli.reporting.plots.timeline import draw
from gpipe_cli.reporting.plots.timeline_values import view_of_plan
from gpipe_cli.reporting.run.lines import print_fields, show_text
from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.results.files import write_result
from gpipe_cli.schedule.schedule_file import schedule_to_csv
from gpipe_cli.system.files import write_atomic

PICTURE_FILE = "timeline.png"
SETTINGS_FILE = "settings.yaml"  # not config.yaml, which would make the folder a run's


def plan(
    config: TrainConfig,
    auto: Sequence[str],
    settings: PlanSettings,
    folder: Path,
    console: Console,
    *,
    shown: bool,
) -> Plan:
    """Plan `config`, write the plan into `folder`, and return it.

    `console` gets a line before each slow part, and the plan if `shown`. Raises InputError for what cannot be planned
    or does not fit the memory.
    """
    gc.disable()  # a large plan has a million small objects, and garbage collections would take seconds
    try:
        log = partial(show_text, console)
        _check_data_sheet(config, settings.solve, several=config.partitions > 1 or "partitions" in auto)
        if settings.solve is None:
            check_feasible(config, auto)
            made = prepare(config, auto, log, other_machine=not config.hardware.is_this_machine).plan
        else:
            made = solve_max_model(config, log)
        config = made.config
        if config.compile:
            log(f"planned {NOT_COMPILED}")
        files = {"page": str(folder / PAGE), "picture": str(folder / PICTURE_FILE)}
        files["trace"] = f"{folder / TRACE} (for ui.perfetto.dev)"
        if (file := settings.write_schedule) is not None:
            files["schedule_file"] = file
        made = replace(made, files=files)
        name = model_name(config.model)
        commands = [shlex.join(["gpipe", *sys.argv[1:]])]
        if shown:  # before anything is drawn
            show_plan(console, made, folder, verbose=settings.verbose)
        else:
            write_result(folder, made.tree(), PLAN)
        if file is not None:
            # the file has all micro-batches; the plan may have fewer
            schedule = validated_schedule_for(made.order, config.micro_batches, made.recompute)
            write_atomic(Path(file), schedule_to_csv(schedule, made.layout.row_of_stage))
        write_atomic(folder / SETTINGS_FILE, to_yaml(config))
        about = f"{name} on {config.dataset.name}"
        write_page(folder / PAGE, about, simulation_data(made), (), PageContext(commands))
        title = f"{name}, K = {len(made.balance)}, M = {made.micro_batches}"
        views = [view_of_plan(title, made)]
        write_picture(folder / PICTURE_FILE, draw(views))
        write_trace(folder, views)
        if shown:
            print_fields(console, [*files.items(), ("written to", str(folder / PLAN))])
        return made
    finally:
        gc.freeze()
        gc.unfreeze()  # moves all objects to the oldest generation, which the next collection skips
        gc.enable()


def _check_data_sheet(config: TrainConfig, solve: str | None, *, several: bool) -> None:
    """Raises InputError if a plan by a data sheet lacks a figure; `several` partitions also need the link's figure."""
    layout = layout_of(config)
    hardware = with_data_sheet(config.hardware, layout.devices)
    wanted = ["tflops", "memory_gb_per_second", *(["link_gb_per_second"] if several else [])]
    missing = [key for key in wanted if getattr(hardware, key) is None]
    if missing and (solve or not uses_measured_costs(config, layout)):
        what = "this GPU has no file in conf/hardware" if hardware.is_this_machine else f"hardware={hardware.name}"
        raise InputError(
            f"hardware.{missing[0]}=null: a step cannot be predicted without it ({what}); "
            f"give hardware.{missing[0]}=..., or another hardware"
        )
