"""The work of `gpipe plan`: profile the model, choose the `auto` settings, simulate, and write and show the plan."""

import gc
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.benchmark.machine_timing import step_costs, times_machine
from gpipe_cli.commands.prepare import not_compiled, prepare
from gpipe_cli.config.settings import PlanSettings, TrainConfig, key_of, to_yaml
from gpipe_cli.config.typed import show
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.schedule_file import csv_of
from gpipe_cli.planner.auto_settings import solve_max_model
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.memory_time import AXES, Curve, Point, solve_memory_time
from gpipe_cli.planner.simulation_data import rows_of, simulation_data
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.reporting.page.page import PAGE, write_page
from gpipe_cli.reporting.plots.chrome_trace import TRACE, TracedStep, write_trace
from gpipe_cli.reporting.plots.curve import draw_curve
from gpipe_cli.reporting.plots.picture import write_picture
from gpipe_cli.reporting.plots.timeline import draw
from gpipe_cli.reporting.plots.timeline_values import predicted_view
from gpipe_cli.reporting.run.lines import show_text
from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.reporting.tables.plan_result import plan_result, planned_curve
from gpipe_cli.results.files import write_result
from gpipe_cli.results.plan import PLAN, PlannedCurve, PlanResult
from gpipe_cli.system.files import write_whole

PICTURE, CURVE = "timeline.png", "curve.png"
SETTINGS = "settings.yaml"  # not config.yaml, which would make the folder a run's


def plan(
    config: TrainConfig,
    auto: Sequence[str],
    settings: PlanSettings,
    folder: Path,
    console: Console,
    typed: Sequence[str],
    given: Collection[str],
    *,
    shown: bool,
) -> PlanResult:
    """Plan `config`, write the plan into `folder`, and return its numbers.

    `console` gets a line before each slow part, and the plan if `shown`; `typed`: the user's arguments, which set the
    keys `given`. Raises InputError for what cannot be planned or does not fit the memory.
    """
    gc.disable()  # a large plan has a million small objects, and garbage collections would take seconds
    try:
        log = partial(show_text, console)
        _require_figures(config, several=config.partitions > 1 or "partitions" in auto)
        costs_of, curve = partial(step_costs, log=log), None
        drawn: dict[str, Any] = {}  # of the page, besides the plan
        if settings.solve is None:
            prepared = prepare(config, auto, log, elsewhere=not config.hardware.here)
            config, profile, made, comparisons = prepared.config, prepared.profile, prepared.plan, prepared.comparisons
        elif settings.solve == "max_model":
            config, profile, made, comparisons = solve_max_model(config, costs_of, log)
        else:
            profile, made, found = solve_memory_time(config, given, costs_of, log)
            config, comparisons = found.fastest.config, ()
            curve = planned_curve(found, partial(_command, typed))
            drawn["curve"] = _with_orders(curve, found)
        if config.compile:
            log(f"planned {not_compiled(config)}")
        files = {"page": str(folder / PAGE), "picture": str(folder / PICTURE)}
        files["trace"] = f"{folder / TRACE} (for ui.perfetto.dev)"
        if curve is not None:
            files["curve"] = str(folder / CURVE)
        if (file := settings.write_schedule) is not None:
            files["schedule_file"] = file
        result = plan_result(config, profile, made, comparisons, files, curve)
        title = f"{result.model_name}, K = {len(made.stages)}, M = {made.micro_batches}"
        about = f"{result.model_name} on {config.dataset.name}"
        commands = [shlex.join(["gpipe", *sys.argv[1:]])]
        try:
            if file is not None:
                of_all = checked_schedule(made.order, config.micro_batches, made.recompute)  # the plan may have fewer
                write_whole(Path(file), csv_of(of_all, made.layout.row_of_stage))
            write_whole(folder / SETTINGS, to_yaml(config))
            offered = {point.setting.micro_batches for point in curve.points} if curve else ()
            data = simulation_data(config, profile, made, offered) | drawn
            write_page(folder / PAGE, about, data, (), commands=commands)
            write_picture(folder / PICTURE, draw([predicted_view(title, made)]))
            write_trace(folder, [TracedStep("predicted", made.timeline, made.timeline.start_seconds)])
            if curve is not None:
                write_picture(folder / CURVE, draw_curve(curve, about))
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


def _with_orders(curve: PlannedCurve, found: Curve) -> dict[str, Any]:
    """The curve for the page, which cannot search: with the rows of the orders on the front that were searched for."""
    points = [
        asdict(point) | ({} if of.searched is None or point.dominated else {"rows": rows_of(of.searched)})
        for point, of in zip(curve.points, found.points, strict=True)
    ]
    return asdict(curve) | {"points": points}


def _command(typed: Sequence[str], point: Point) -> str:
    """The command that trains a point or, for other hardware, plans it: the user's own arguments, and the settings of
    the point in place of those."""
    replaced = {"solve", "format", "write_schedule", "run_folder", *AXES, *point.settings}
    kept = (one for one in typed if key_of(one) not in replaced)
    command = "train" if point.config.hardware.here else "plan"
    return shlex.join(["gpipe", command, *kept, *(f"{key}={show(value)}" for key, value in point.settings.items())])


def _require_figures(config: TrainConfig, *, several: bool) -> None:
    """Raises InputError if cost=figures lacks a figure of the hardware; `several` partitions need the link's too."""
    layout = layout_of(config)
    hardware = resolved(config.hardware, layout.devices)
    wanted = ["tflops", "memory_gb_per_second", *(["link_gb_per_second"] if several else [])]
    missing = [key for key in wanted if getattr(hardware, key) is None]
    if config.cost == "figures" and missing and not times_machine(config, layout):
        what = "this GPU has no file in conf/hardware" if hardware.here else f"hardware={hardware.name}"
        raise InputError(
            f"hardware.{missing[0]}=null: a step cannot be predicted without it ({what}); "
            f"give hardware.{missing[0]}=..., another hardware, or cost=measured"
        )
