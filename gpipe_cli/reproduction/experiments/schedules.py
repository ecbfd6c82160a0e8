"""Schedules side by side: idle time, activations and speed of each, relative to gpipe with as many stages."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from gpipe_cli.reporting.plots.timeline_values import idle_share
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.comparison import Shown, describe_speed_kinds, make_table
from gpipe_cli.reproduction.runner import ROWS_DIFFER, Findings, Note, Runner
from gpipe_cli.schedule.dependencies import topological_order
from gpipe_cli.schedule.named_schedules import ORDERS, order
from gpipe_cli.schedule.placement import place
from gpipe_cli.schedule.schedule import Kind, Schedule
from gpipe_cli.schedule.simulator import StageCost, simulate
from gpipe_cli.units import plural

Row = dict[str, Any]
COLUMNS = (
    Shown("schedule", "schedule"),
    Shown("K", "partitions", number=True),
    Shown("idle", "planned_idle", ".1%", "simulated"),
    Shown("activations", "planned_activations", "size", "simulated"),
    Shown("speed", "planned_speed", ",.2f", "simulated"),
    Shown("unit clock", "unit_clock", ",.2f", "simulated"),
    Shown("graphs", "graphs", ",.1f", "simulated"),
)
MEASURED = (
    Shown("idle", "measured_idle", ".1%", "measured"),
    Shown("activations", "measured_activations", "size", "measured"),
    Shown("speed", "measured_speed", ",.2f", "measured"),
)


def reproduce(runner: Runner, devices: Sequence[int], one_stage: Sequence[str], two_stages: Sequence[str]) -> Findings:
    """A table for each number of ``devices``: the schedules ``one_stage`` with one stage on each, ``two_stages`` with
    two. The last table for which there are enough devices here is also measured."""
    runner.check_not_given(dict.fromkeys(("partitions", "micro_batches", "recompute"), ROWS_DIFFER))
    if runner.scale == "smoke":
        devices = devices[:1]
    measured_here = max((number for number in devices if number <= runner.devices), default=0)
    tables, notes, measured = list[Table](), list[Note](), list[Row]()
    for number in devices:
        groups: list[list[Row]] = [
            [{"schedule": schedule, "partitions": number * each, "each": each} for schedule in schedules]
            for each, schedules in ((1, one_stage), (2, two_stages))
        ]
        if number == measured_here:
            for group in groups:
                results = runner.bench_rows(f"measured_{group[0]['each']}", group, ["schedule"], *_stages(group[0]))
                for row, result in zip(group, results, strict=True):
                    row["measured"] = result
                measured += results
        for row in chain(*groups):
            folder = f"{number}_{row['schedule']}_{row['each']}"
            row["planned"] = runner.plan(folder, *_stages(row), f"schedule={row['schedule']}")
        for group in groups:
            for row in group:
                _compare(row, group[0])
        rows = [*chain(*groups)]
        title = f"{number} devices, M = {rows[0]['planned']['micro_batches']}"
        columns = [*COLUMNS, *(MEASURED if number == measured_here else ())]
        tables.append(make_table(f"{title}; speed relative to gpipe with as many stages", columns, rows))
        for row in rows:
            if "chosen" in row:
                notes.append(("auto", f"{number} devices of {plural(row['each'], 'stage')}: {row['chosen']}"))
    notes += [
        ("simulated", f"from {rows[0]['planned']['hardware']['source']}; each device computes by itself"),
        ("unit clock", "every F, I and W takes one tick, a B two, transfers none"),
        ("graphs", "how many micro-batches' activations, from F to W or B, the fullest device holds on that clock"),
        *(("measured", f"{kind}; not the speed of a pipeline") for kind in describe_speed_kinds(measured)),
    ]
    return Findings(tables, notes)


def _stages(row: Row) -> list[str]:
    """The settings of the number of stages, and of those on each device."""
    each = [f"stages_per_process={row['each']}"] if row["each"] > 1 else []
    return [f"partitions={row['partitions']}", *each]


def _compare(row: Row, base: Row) -> None:
    """Add idle time, activations and speed, relative to the row ``base`` of gpipe."""
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
