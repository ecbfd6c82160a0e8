"""What no command of a recipe computes. Each function of ``COMPUTED`` adds values to the results of a recipe or to the
rows of its tables, for the keys of its columns and notes, and returns (description, path) of pictures.
"""

import gc
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.compare.run_record import read_run, same_curves
from gpipe_cli.reporting.plots.timeline_values import idle_share
from gpipe_cli.reproduction.largest_model import largest_model
from gpipe_cli.reproduction.last_tensors import DIGITS, compare_tensors, digest, last_tensors
from gpipe_cli.reproduction.published import published
from gpipe_cli.reproduction.runner import CommandFailedError, Runner
from gpipe_cli.results.metrics import METRICS, TRAIN_LOSS
from gpipe_cli.schedule.dependencies import topological_order
from gpipe_cli.schedule.named_schedules import ORDERS, order
from gpipe_cli.schedule.placement import place
from gpipe_cli.schedule.schedule import Kind, Schedule
from gpipe_cli.schedule.simulator import StageCost, simulate
from gpipe_cli.system.forked_call import map_in_forks
from gpipe_cli.units import plural, size

if TYPE_CHECKING:  # recipes are listed without torch
    from gpipe_cli.planner.model_profile import ModelProfile

IMPOSSIBLE = "impossible"  # the status of a row whose settings do not go together
Results = dict[str, Any]  # `tables` are the tables, whose `rows` are the rows
Row = dict[str, Any]
Pictures = tuple[tuple[str, str], ...]


def breakdown(results: Results, runner: Runner) -> Pictures:
    """The overhead and the idle time of shares of stage time, and stacked bars, which compare more easily than the pie
    chart of the paper."""
    from gpipe_cli.reporting.plots.picture import write_picture  # not at the top, as matplotlib takes half a second
    from gpipe_cli.reporting.plots.recipes import draw_shares

    measured, simulated = results["measured"], results["simulated"]
    if measured["breakdown"] is None:
        raise CommandFailedError(measured["reason"] or "no step was recorded")
    paper = {row["share"]: row["paper"] for row in results["tables"][0]["rows"] if "paper" in row}
    shares = {"paper": paper, "measured": measured["breakdown"], "simulated": simulated["breakdown"]}
    results["partitions"] = len(simulated["stages"])
    results["recomputed"] = {name: share["recompute"] / share["compute"] for name, share in shares.items()}
    results["idle"] = {name: idle_share(shares[name]) for name in ("measured", "simulated")}
    results["kinds"] = _kinds([measured])
    picture = runner.folder / "breakdown.png"
    names = "paper (TPU)", "measured here", "simulated, layers timed here"
    write_picture(picture, draw_shares([*zip(names, shares.values(), strict=True)]))
    return (("picture", str(picture)),)


def _kinds(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The kinds of measured speeds that are not a pipeline's."""
    return [{"kind": kind} for kind in sorted({row["kind"] for row in measured if row["kind"]} - {"measured"})]


def fine_tuning(results: Results, runner: Runner) -> Pictures:
    """Mean and standard deviation of the top-1 accuracy over the runs that differ in their seed."""
    runs = [row["trained"] for row in results["tables"][-1]["rows"]]
    top1 = [run["test"]["top1"] for run in runs]
    results["top1"] = mean(top1)
    results["runs"] = len(runs)
    results["deviation_points"] = 100 * stdev(top1) if len(top1) > 1 else None
    results["dataset"] = runs[0]["dataset"]
    return ()


# --- throughput over K and M


def throughput(results: Results, runner: Runner) -> Pictures:
    """Speeds relative to the first row of each table, how far they are from the paper's, and what could not be run."""
    results["impossible"] = []
    measured = list[Row]()
    for table in results["tables"]:
        rows = table["rows"]
        for row, run in product(rows, ("measured", "lingvo", "exact")):
            row[f"{run}_speed"] = _relative_speed(row.get(run), rows[0].get(run))
        for row in rows:
            ours, theirs = (row[run].get("samples_per_second") for run in ("exact", "lingvo"))
            row["gain"] = ours / theirs if ours and theirs else None
        differences = [
            abs(row["lingvo_speed"] - row["paper"]) for row in rows[1:] if isinstance(row["lingvo_speed"], float)
        ]
        if differences and results["comparable"]:  # the first row is 1 by definition
            table["off"] = mean(differences)
            table["compared"] = len(differences)
        tried = [row for row in rows if "measured" in row]
        refused = [
            row for row in tried if isinstance(row["measured_speed"], str) and not _failure_reason(row["measured"])
        ]
        table["refused"] = _cells(refused) or None
        table["kinds"] = _kinds([row["measured"] for row in tried])
        reasons: dict[str, list[Row]] = {}
        for run, row in product(("measured", "lingvo"), rows):
            if (reason := _failure_reason(row.get(run, {}))) and row not in reasons.setdefault(reason, []):
                reasons[reason].append(row)
        results["impossible"] += [
            {"name": table["name"], "cells": _cells(rows), "reason": reason} for reason, rows in reasons.items()
        ]
        measured += tried
    results["shared"] = [{"name": table["name"], **kind} for table in results["tables"] for kind in table["kinds"]]
    slow = results["slow_links"]
    devices = results["devices"]
    results["through_host"] = slow and devices > 0
    results["without_links"] = slow and devices == 0
    results["too_few"] = not slow and not measured
    results["most"] = None if slow else max((row["partitions"] for row in measured), default=None)
    results["smaller"] = runner.is_small and devices > 0 and not runner.incomparable_settings()
    return ()


def _relative_speed(run: Row | None, first: Row | None) -> float | str | None:
    """The speed of a row relative to the first's, round by round if both are of one sweep; or why there is none."""
    if run is None or first is None:
        return None
    if run.get("samples_per_second") is None:
        return str(run["status"]).replace("_", " ")
    key = "relative" if run.get("sweep") == first.get("sweep") and "relative" in run else "samples_per_second"
    return run[key] / first[key] if first.get(key) else None


def _failure_reason(run: Row) -> str:
    return str(run["reason"] or "") if run.get("status") == IMPOSSIBLE else ""


def _cells(rows: Sequence[Row]) -> str:
    return "; ".join(f"K = {row['partitions']}, M = {row['micro_batches']}" for row in rows)


# --- schedules side by side


def schedules(results: Results, runner: Runner) -> Pictures:
    """Idle time, activations and speed of each schedule, relative to gpipe with as many stages."""
    rows = [row for table in results["tables"] for row in table["rows"]]
    for row in rows:
        stages = "gpipe", row["partitions"], row["each"]
        base = next(other for other in rows if (other["schedule"], other["partitions"], other["each"]) == stages)
        plan, measured = row["planned"], row.get("measured")
        row["planned_idle"] = plan["breakdown"] and idle_share(plan["breakdown"])
        row["planned_activations"] = _max_device_bytes(
            plan["stages"], [stage["memory"]["activations_bytes"] for stage in plan["stages"]]
        )
        row["planned_speed"] = base["planned"]["step_seconds"] / plan["step_seconds"]
        if row["schedule"] == "auto":  # its order depends on costs
            row["chosen"] = plan["schedule"].removeprefix("auto ").strip("()")
        else:
            row["unit_clock"] = _unit_seconds(base, plan["micro_batches"]) / _unit_seconds(row, plan["micro_batches"])
            row["graphs"] = _max_in_flight(row, plan["micro_batches"])
        if measured is not None:
            speed, first = (each["measured"]["samples_per_second"] for each in (row, base))
            row["measured_idle"] = measured["breakdown"] and idle_share(measured["breakdown"])
            row["measured_activations"] = _max_device_bytes(plan["stages"], measured["activation_bytes"] or ())
            row["measured_speed"] = speed / first if speed and first else None
    results["every"] = rows
    results["source"] = rows[0]["planned"]["hardware"]["source"]
    results["kinds"] = _kinds([row["measured"] for row in rows if "measured" in row])
    return ()


def _max_device_bytes(stages: Sequence[Row], held: Sequence[int]) -> int | None:
    """Bytes of activations on the fullest device, from each stage's; None if there are none."""
    together = Counter[int]()
    for stage, held_bytes in zip(stages, held, strict=bool(held)):
        together[stage["process"]] += held_bytes
    return max(together.values(), default=None)


def _with_placement(row: Row, micro_batches: int) -> tuple[Schedule, tuple[int, ...]]:
    """The order of a row that is not `auto`, and the device of each stage."""
    stages, devices = row["partitions"], row["partitions"] // row["each"]
    actions = order(row["schedule"], stages, micro_batches, devices)
    return actions, place(ORDERS[row["schedule"]].placement or "neighbours", stages, devices)


def _unit_seconds(row: Row, micro_batches: int) -> float:
    """The simulated time of a step if every F, I and W takes one tick, a B two, and transfers none."""
    actions, device_of_stage = _with_placement(row, micro_batches)
    costs = [StageCost(1.0, 1.0, 2.0, 1.0, 1.0)] * row["partitions"]
    return simulate(actions, costs, device_of_stage=device_of_stage).step_seconds


def _max_in_flight(row: Row, micro_batches: int) -> float:
    """The most micro-batches whose activations a device holds by the unit clock; a stage has 1/`each` of them."""
    actions, device_of_stage = _with_placement(row, micro_batches)
    held = Counter[int]()
    most = 0
    for action in topological_order(actions, device_of_stage):
        device = device_of_stage[action.stage]
        held[device] += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        most = max(most, held[device])
    return most / row["each"]


# --- weak and strong scaling


def scaling(results: Results, runner: Runner) -> Pictures:
    """Plan every row in forks, and draw the efficiency: samples/s of a device, relative to the fewest that fit."""
    from gpipe_cli.reporting.plots.picture import write_picture  # not at the top, as matplotlib takes half a second
    from gpipe_cli.reporting.plots.recipes import draw_scaling

    work: list[tuple[TrainConfig, ModelProfile, Row]] = []
    for table in results["tables"]:
        runner.progress(f"traces       {table['name']}")
        # the profile depends on none of K, M and N; K is the largest, so that a micro-batch fits
        row = table["rows"][-1]
        samples = row["batch_size"] // (row["replicas"] * row["micro_batches"])
        sizes = f"partitions={row['partitions']}", "micro_batches=1", f"batch_size={samples}"
        traced = runner.simulate_plan(*table["settings"], *sizes)
        work += [(traced.config, traced.profile, row) for row in table["rows"]]
    runner.progress(f"plans        {plural(len(work), 'cell')}")
    try:
        planned = map_in_forks(_plan_in_fork, work)
    except RuntimeError as error:
        raise CommandFailedError(str(error)) from error
    for (_, _, row), plan in zip(work, planned, strict=True):
        row |= {"devices": row["partitions"] * row["replicas"], **plan}
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"weak": {}, "strong": {}}
    for table, kind in product(results["tables"], panels):
        fitting = [row for row in table["rows"] if row["scaling"] == kind and row["fits"] == "yes"]
        fitting.sort(key=lambda row: row["devices"])
        for row in fitting:
            speed, first = (each["samples_per_second"] / each["devices"] for each in (row, fitting[0]))
            row["efficiency"] = speed / first
            line = panels[kind].setdefault(f"{table['name']}, K = {row['partitions']}", [])
            line.append((row["devices"], row["efficiency"]))
        if kind == "strong" and len(fitting) > 1:
            table |= {"fewest": fitting[0], "most": fitting[-1]}
    picture = runner.folder / "scaling.png"
    write_picture(picture, draw_scaling(panels))
    return (("picture", str(picture)),)


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


# --- the same training with several numbers of partitions


def consistency(results: Results, runner: Runner) -> Pictures:
    """Compare losses and last weights of all runs bit by bit; deviations between numbers of partitions, and seeds."""
    rows, spread = (table["rows"] for table in results["tables"])
    records = [read_run(Path(row["trained"]["folder"])) for row in rows]
    tensors = [last_tensors(record.folder) for record in records]
    curves = [record.curves.get(TRAIN_LOSS) for record in records]
    alike = next((group for group in same_curves(curves) if 0 in group), [0])
    for at, (row, record) in enumerate(zip(rows, records, strict=True)):
        row["losses"] = None if at == 0 else "as in row 1" if at in alike else "others"
        row["sha256"] = digest(tensors[at])
        row["digits"] = row["sha256"][:DIGITS]
        row["top1"], row["loss"] = (METRICS[key].value(record.result) for key in ("test_top1", "test_loss"))
    same, repeated = ([row for row in rows if row[key] == rows[0][key]] for key in ("seed", "partitions"))
    listed = ", ".join(str(row["partitions"]) for row in same)
    seeds = ", ".join(str(row["seed"]) for row in repeated)
    spread[0]["name"] = f"K = {listed}, seed {rows[0]['seed']}"
    spread[1]["name"] = f"seeds {seeds}, K = {rows[0]['partitions']}"
    for row, runs in zip(spread, (same, repeated), strict=True):
        losses = [run["loss"] for run in runs]  # None if the loss was not a number
        row["points"] = 100 * stdev(run["top1"] for run in runs)
        row["loss"] = None if None in losses else stdev(losses)
    other_losses = [str(row["partitions"]) for row in same if row["losses"] == "others"]
    others = [at for at, row in enumerate(rows) if row in same and row["sha256"] != rows[0]["sha256"]]
    apart = [f"K = {rows[at]['partitions']}: {compare_tensors(tensors[0], tensors[at])}" for at in others]
    results["dataset"] = records[0].result.dataset
    results["first"] = rows[0]["partitions"]
    results["steps"] = 0 if curves[0] is None else len(curves[0].steps)
    results["losses"] = {"same": None if other_losses else listed, "other": ", ".join(other_losses) or None}
    results["weights"] = {"same": None if others else listed, "apart": "; ".join(apart) or None}
    results["tensors"] = len(tensors[0])
    results["curves"] = shlex.quote(str(runner.folder))
    return ()


COMPUTED: Mapping[str, Callable[[Results, Runner], Pictures]] = {
    function.__name__: function
    for function in (breakdown, fine_tuning, throughput, schedules, scaling, consistency, published, largest_model)
}
