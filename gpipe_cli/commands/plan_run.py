"""The work of `gpipe plan`: profile the model, choose the `auto` settings, simulate, and write and show the plan."""

import gc
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from gpipe_cli.benchmark.machine_timing import times_layers
from gpipe_cli.commands.prepare import NOT_COMPILED, prepare
from gpipe_cli.config.settings import PlanSettings, TrainConfig, to_yaml
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.schedule_file import csv_of
from gpipe_cli.planner.auto_settings import solve_max_model
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.reporting.page.page import PAGE, write_page
from gpipe_cli.reporting.plots.chrome_trace import TRACE, TracedStep, write_trace
from gpipe_cli.reporting.plots.picture import write_picture
from gpipe_cli.reporting.plots.timeline import draw
from gpipe_cli.reporting.plots.timeline_values import predicted_view
from gpipe_cli.reporting.run.lines import show_text
from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.reporting.tables.plan_result import plan_result
from gpipe_cli.results.files import write_result
from gpipe_cli.results.plan import PLAN, PlanResult
from gpipe_cli.system.files import write_whole

PICTURE = "timeline.png"
SETTINGS = "settings.yaml"  # not config.yaml, which would make the folder a run's


def plan(
    config: TrainConfig,
    auto: Sequence[str],
    settings: PlanSettings,
    folder: Path,
    console: Console,
    *,
    shown: bool,
) -> PlanResult:
    """Plan `config`, write the plan into `folder`, and return its numbers.

    `console` gets a line before each slow part, and the plan if `shown`. Raises InputError for what cannot be planned
    or does not fit the memory.
    """
    gc.disable()  # a large plan has a million small objects, and garbage collections would take seconds
    try:
        log = partial(show_text, console)
        _require_figures(config, settings.solve, several=config.partitions > 1 or "partitions" in auto)
        if settings.solve is None:
            prepared = prepare(config, auto, log, elsewhere=not config.hardware.here)
            config, profile, made, comparisons = prepared.config, prepared.profile, prepared.plan, prepared.comparisons
        else:
            config, profile, made, comparisons = solve_max_model(config, log)
        if config.compile:
            log(f"planned {NOT_COMPILED}")
        files = {"page": str(folder / PAGE), "picture": str(folder / PICTURE)}
        files["trace"] = f"{folder / TRACE} (for ui.perfetto.dev)"
        if (file := settings.write_schedule) is not None:
            files["schedule_file"] = file
        result = plan_result(config, profile, made, comparisons, files)
        title = f"{result.model_name}, K = {len(made.stages)}, M = {made.micro_batches}"
        about = f"{result.model_name} on {config.dataset.name}"
        commands = [shlex.join(["gpipe", *sys.argv[1:]])]
        try:
            if file is not None:
                of_all = checked_schedule(made.order, config.micro_batches, made.recompute)  # the plan may have fewer
                write_whole(Path(file), csv_of(of_all, made.layout.row_of_stage))
            write_whole(folder / SETTINGS, to_yaml(config))
            write_page(folder / PAGE, about, simulation_data(config, profile, made), (), commands=commands)
            write_picture(folder / PICTURE, draw([predicted_view(title, made)]))
            write_trace(folder, [TracedStep("predicted", made.timeline, made.timeline.start_seconds)])
        finally:  # a plan that cannot be written is still shown
            if shown:
                show_plan(console, result, folder, verbose=settings.verbose)
            else:
                write_result(folder, asdict(result), PLAN)
        return result
    finally:
        gc.freeze()
        gc.unfreeze()  # moves all objects to the oldest generation, which the next collection skips
        gc.enable()


def _require_figures(config: TrainConfig, solve: str | None, *, several: bool) -> None:
    """Raises InputError if a plan by a data sheet lacks a figure; `several` partitions need the link's too."""
    layout = layout_of(config)
    hardware = resolved(config.hardware, layout.devices)
    wanted = ["tflops", "memory_gb_per_second", *(["link_gb_per_second"] if several else [])]
    missing = [key for key in wanted if getattr(hardware, key) is None]
    if missing and (solve or not times_layers(config, layout)):
        what = "this GPU has no file in conf/hardware" if hardware.here else f"hardware={hardware.name}"
        raise InputError(
            f"hardware.{missing[0]}=null: a step cannot be predicted without it ({what}); "
            f"give hardware.{missing[0]}=..., or another hardware"
        )
