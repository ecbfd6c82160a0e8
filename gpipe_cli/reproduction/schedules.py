"""Schedules side by side: `gpipe plan` simulates each on 2, 4 and 8 devices, and `gpipe bench` measures each on as many
as this machine has. The paper, which has one schedule, has no such table; it shows what later schedules gain.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from gpipe_cli.pipeline.schedule.dependencies import linearize
from gpipe_cli.pipeline.schedule.named_schedules import ORDERS, order
from gpipe_cli.pipeline.schedule.placement import place
from gpipe_cli.pipeline.schedule.schedule import Kind, Schedule
from gpipe_cli.pipeline.schedule.simulator import StageCost, simulate
from gpipe_cli.reporting.plots.timeline_values import idle
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import Column, Origin, Table
from gpipe_cli.reproduction.runner import Findings, Runner, number
from gpipe_cli.units import percent, size

# Schedules by the number of stages on each device.
_ROWS = {
    1: ("gpipe", "1f1b", "zero_bubble", "auto"),
    2: ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "v_half", "v_min", "auto"),
}


@dataclass(frozen=True)
class Row:
    """A row of a table; its speed is relative to that of gpipe with as many stages."""

    devices: int
    each: int  # stages on a device
    schedule: str

    @property
    def stages(self) -> int:
        return self.devices * self.each

    @property
    def base(self) -> "Row":
        return replace(self, schedule="gpipe")

    @property
    def settings(self) -> tuple[str, ...]:
        several = (f"stages_per_process={self.each}",) if self.each > 1 else ()
        return f"partitions={self.stages}", *several


_Results = Mapping[Row, Mapping[str, Any]]  # row -> results in plan.json, or in a row of bench.json


@dataclass(frozen=True, slots=True)
class Schedules:
    devices: tuple[int, ...]

    def reproduce(self, runner: Runner) -> Findings:
        runner.refuse()
        here = [devices for devices in self.devices if devices <= runner.devices][-1:]
        measured = {row: found for devices in here for row, found in _measured(runner, devices)}
        planned = {
            row: runner.plan(f"{row.devices}_{row.schedule}_{row.each}", *row.settings, f"schedule={row.schedule}")
            for row in (Row(d, each, name) for d in self.devices for each, names in _ROWS.items() for name in names)
        }
        tables = tuple(_table(devices, planned, measured) for devices in self.devices)
        return Findings(tables, tuple(_notes(planned, measured)), comparable=not runner.changed())

    def smallest(self) -> Self:
        return replace(self, devices=self.devices[:1])


def _measured(runner: Runner, devices: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The rows of `gpipe bench`, from a sweep with one stage on each device and one with two."""
    for each, names in _ROWS.items():
        settings = Row(devices, each, "gpipe").settings
        for found in runner.bench(f"measured_{each}", f"schedule={','.join(names)}", *settings)["rows"]:
            yield Row(devices, each, found["settings"]["schedule"]), found


def _notes(planned: _Results, measured: _Results) -> Iterator[tuple[str, str]]:
    for row, plan in planned.items():
        if row.schedule == "auto":
            stages = f"{row.devices} devices of {row.each} stage{'s' * (row.each > 1)}"
            yield "auto", f"{stages}: {plan['schedule'].removeprefix('auto ').strip('()')}"
    yield "simulated", f"from {next(iter(planned.values()))['hardware']['source']}; each device computes by itself"
    yield "unit clock", "every F, I and W takes one tick, a B two, transfers none"
    yield "graphs", "how many micro-batches' activations, from F to W or B, the fullest device holds on that clock"
    for kind in sorted({found["kind"] for found in measured.values() if found["kind"]} - {"measured"}):
        yield "measured", f"{speed_kind(kind)}; not the speed of a pipeline"


def _table(devices: int, planned: _Results, measured: _Results) -> Table:
    rows = [row for row in planned if row.devices == devices]
    micro_batches = planned[rows[0]]["micro_batches"]

    def column(heading: str, origin: Origin, form: Callable[[Any], str], of: Callable[[Row], Any]) -> Column:
        values = [of(row) if origin == "simulated" or row in measured else None for row in rows]
        return Column.of("", heading, values, form, origin=origin)

    def relative(found: _Results, key: str, row: Row, power: int = 1) -> float | None:
        one, base = found[row][key], found[row.base][key]
        return (one / base) ** power if one and base else None

    def waits(found: Mapping[str, Any]) -> float | None:
        return None if found["breakdown"] is None else idle(found["breakdown"])

    speed = partial(number, digits=2)
    columns = [
        Column("schedule", cells=[row.schedule for row in rows]),
        Column("K", cells=[str(row.stages) for row in rows], number=True),
        column("idle", "simulated", percent, lambda row: waits(planned[row])),
        column("activations", "simulated", size, lambda row: _fullest(planned[row])),
        column("speed", "simulated", speed, lambda row: relative(planned, "step_seconds", row, -1)),
        column("unit clock", "simulated", speed, lambda row: _unit_clock(row, micro_batches)),
        column("graphs", "simulated", partial(number, digits=1), lambda row: _graphs(row, micro_batches)),
    ]
    if any(row in measured for row in rows):
        columns += [
            column("idle", "measured", percent, lambda row: waits(measured[row])),
            column("activations", "measured", size, lambda row: _fullest(planned[row], measured[row])),
            column("speed", "measured", speed, lambda row: relative(measured, "samples_per_second", row)),
        ]
    title = f"{devices} devices, M = {micro_batches}; speed relative to gpipe with as many stages"
    return Table(title, columns)


def _fullest(plan: Mapping[str, Any], measured: Mapping[str, Any] | None = None) -> int | None:
    """Bytes of activations on the fullest device, as planned or as ``measured``; None if they were not measured."""
    held = [stage["memory"]["activations_bytes"] for stage in plan["stages"]]
    if measured is not None:
        held = measured["activation_bytes"]
    together = Counter[int]()
    for stage, held_bytes in zip(plan["stages"], held or (), strict=bool(held)):
        together[stage["process"]] += held_bytes
    return max(together.values(), default=None)


def _unit_clock(row: Row, micro_batches: int) -> float | None:
    """The simulated speed relative to gpipe's by a unit clock; None for `auto`, whose order depends on costs."""
    if row.schedule == "auto":
        return None
    tick = StageCost(1.0, 1.0, 2.0, 1.0, 1.0)

    def seconds(one: Row) -> float:
        actions, device_of_stage = _placed(one, micro_batches)
        return simulate(actions, [tick] * one.stages, device_of_stage=device_of_stage).step_seconds

    return seconds(row.base) / seconds(row)


def _graphs(row: Row, micro_batches: int) -> float | None:
    """The most micro-batches whose activations a device holds by the unit clock; one of its stages has 1/`each` of
    them. None for `auto`."""
    if row.schedule == "auto":
        return None
    actions, device_of_stage = _placed(row, micro_batches)
    held, most = Counter[int](), 0
    for action in linearize(actions, device_of_stage):
        device = device_of_stage[action.stage]
        held[device] += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        most = max(most, held[device])
    return most / row.each


def _placed(row: Row, micro_batches: int) -> tuple[Schedule, tuple[int, ...]]:
    """The order of a row that is not `auto`, and the device of each stage."""
    actions = order(row.schedule, row.stages, micro_batches, row.devices)
    return actions, place(ORDERS[row.schedule].placement or "neighbours", row.stages, row.devices)
