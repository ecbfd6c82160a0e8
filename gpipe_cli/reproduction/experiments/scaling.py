"""Weak and strong scaling: plans of every number of partitions and replicas, and how efficient they are."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.plots.timeline_values import idle_share
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.comparison import Shown, make_table
from gpipe_cli.reproduction.runner import ROWS_DIFFER, CommandFailedError, Findings, Runner
from gpipe_cli.system.forked_call import map_in_forks
from gpipe_cli.units import percent, plural, size

if TYPE_CHECKING:  # recipes are listed without torch
    from gpipe_cli.planner.model_profile import ModelProfile

Row = dict[str, Any]
COLUMNS = (
    Shown("scaling", "scaling"),
    Shown("K", "partitions", number=True),
    Shown("R", "replicas", number=True),
    Shown("devices", "devices", ",", number=True),
    Shown("N", "batch_size", ",", number=True),
    Shown("M", "micro_batches", number=True),
    Shown("samples/s", "samples_per_second", ",.1f", "simulated"),
    Shown("efficiency", "efficiency", ".1%", "simulated"),
    Shown("idle", "idle", ".1%", "simulated"),
    Shown("sum of gradients", "sums", ".1%", "simulated"),
    Shown("fits", "fits", "", "simulated"),
)


def reproduce(runner: Runner, models: Sequence[Mapping[str, Any]]) -> Findings:
    """``models``: the name and the settings of each, and rows: numbers of partitions K and replicas R, N, and M.
    Efficiency is samples/s of a device, relative to the fewest devices that hold the model."""
    from gpipe_cli.reporting.plots.picture import write_picture  # not at the top, as matplotlib takes half a second
    from gpipe_cli.reporting.plots.recipes import draw_scaling

    keys = "partitions", "micro_batches", "recompute", "replicas", "batch_size"
    runner.check_not_given(dict.fromkeys(keys, ROWS_DIFFER))
    models = models[-1:] if runner.scale == "smoke" else models
    work: list[tuple[TrainConfig, ModelProfile, Row]] = []
    for model in models:
        runner.progress(f"traces       {model['name']}")
        # the profile depends on none of K, M and N; K is the largest, so that a micro-batch fits
        row = model["rows"][-1]
        samples = row["batch_size"] // (row["replicas"] * row["micro_batches"])
        sizes = f"partitions={row['partitions']}", "micro_batches=1", f"batch_size={samples}"
        traced = runner.simulate_plan(*model["settings"], *sizes)
        work += [(traced.config, traced.profile, row) for row in model["rows"]]
    runner.progress(f"plans        {plural(len(work), 'cell')}")
    try:
        planned = iter(map_in_forks(_plan_in_fork, work))
    except RuntimeError as error:
        raise CommandFailedError(str(error)) from error
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"weak": {}, "strong": {}}
    tables = list[Table]()
    notes = [
        ("simulated", "nothing was run; a stage sums its gradients over the replicas after its last backward"),
        ("M", "of each replica; the paper finds the bubble negligible from M = 4 K on"),
    ]
    for model in models:
        name = model["name"]
        rows = [{**row, "devices": row["partitions"] * row["replicas"], **next(planned)} for row in model["rows"]]
        for kind, panel in panels.items():
            fitting = [row for row in rows if row["scaling"] == kind and row["fits"] == "yes"]
            fitting.sort(key=lambda row: row["devices"])
            for row in fitting:
                speed, first = (each["samples_per_second"] / each["devices"] for each in (row, fitting[0]))
                row["efficiency"] = speed / first
                line = panel.setdefault(f"{name}, K = {row['partitions']}", [])
                line.append((row["devices"], row["efficiency"]))
            if kind == "strong" and len(fitting) > 1:
                notes.append(("found", f"{name}, strong: {_change(fitting[0], fitting[-1])}"))
        title = f"{name}: K partitions, R replicas; efficiency relative to the fewest devices that hold it"
        tables.append(make_table(title, COLUMNS, rows))
    picture = runner.folder / "scaling.png"
    write_picture(picture, draw_scaling(panels))
    return Findings(tables, notes, (("picture", str(picture)),))


def _change(fewest: Row, most: Row) -> str:
    """What becomes of M, of idle time and of the sum of gradients with more devices."""
    idle, sums = (f"{percent(fewest[key])} to {percent(most[key])}" for key in ("idle", "sums"))
    return (
        f"from {fewest['devices']:,} to {most['devices']:,} devices a replica's M goes from {fewest['micro_batches']} "
        f"to {most['micro_batches']}, idle from {idle}, the sum of gradients from {sums} of a step"
    )


def _plan_in_fork(work: Sequence[tuple[TrainConfig, "ModelProfile", Row]]) -> list[Row]:
    gc.disable()  # a large plan has a million small objects; the process ends after the plans
    return [_plan_row(config, profile, row) for config, profile, row in work]


def _plan_row(config: TrainConfig, profile: "ModelProfile", row: Row) -> Row:
    """The speed of a row's plan, and the shares of a step that stages are idle, and sum their gradients at most."""
    from gpipe_cli.planner.make_plan import plan_step
    from gpipe_cli.planner.process_layout import TooLargeError

    sizes = {key: row[key] for key in ("partitions", "replicas", "micro_batches", "batch_size")}
    try:
        plan = plan_step(replace(config, **sizes), profile)
    except TooLargeError as error:
        return {"fits": f"no, {size(error.missing_bytes)} over"}
    return {
        "fits": "yes",
        "samples_per_second": row["batch_size"] / plan.step_seconds,
        "idle": idle_share(plan.breakdown._asdict()),
        "sums": max(stage.sum_seconds for stage in plan.stage_costs) / plan.step_seconds,
    }
