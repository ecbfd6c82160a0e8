"""Schedules side by side: `gpipe plan` simulates each on 2, 4 and 8 devices, and `gpipe bench` measures each on as many
as this machine has. Not in the paper, which has one schedule: it shows what later ones gain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.pipeline.schedule.orders import order
from gpipe_cli.pipeline.schedule.simulator import StageCost, simulate
from gpipe_cli.reporting.plots.timeline_values import idle
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.reproduction.runner import Findings, Runner, number, numbers
from gpipe_cli.units import percent, size

# by number of stages on each device; speeds are relative to gpipe with as many stages
_ROWS = {1: ("gpipe", "1f1b", "zero_bubble", "auto"), 2: ("gpipe", "1f1b", "interleaved", "zero_bubble", "auto")}


@dataclass(frozen=True, slots=True)
class Schedules:
    devices: tuple[int, ...]

    def reproduce(self, runner: Runner) -> Findings:
        runner.refuse()
        cores = hardware((), 1)["cores"]
        assert isinstance(cores, int)
        here = [devices for devices in self.devices if devices <= (len(runner.gpus) or cores)][-1:]
        measured: dict[tuple[int, str, int], dict[str, Any]] = {}
        for devices in here:
            measured |= _measured(runner, devices)
        planned = {row: runner.plan(f"{row[0]}_{row[1]}_{row[2]}", *_settings(*row)) for row in _rows(self.devices)}
        notes = list(_notes(planned, measured))
        tables = tuple(_table(devices, planned, measured) for devices in self.devices)
        return Findings(tables, tuple(notes), comparable=not runner.changed())


def _rows(every: tuple[int, ...]) -> Iterator[tuple[int, str, int]]:
    """Tuples of devices, schedule and stages on each device."""
    for devices in every:
        for each, schedules in _ROWS.items():
            for schedule in schedules:
                yield devices, schedule, each


def _settings(devices: int, schedule: str, each: int) -> tuple[str, ...]:
    several = (f"stages_per_process={each}",) if each > 1 else ()
    return f"partitions={devices * each}", f"schedule={schedule}", *several


def _measured(runner: Runner, devices: int) -> dict[tuple[int, str, int], dict[str, Any]]:
    """The rows of `gpipe bench`, from a sweep with one stage on each device and one with two."""
    found = {}
    for each, names in _ROWS.items():
        partitions, _, *several = _settings(devices, "", each)
        rows = runner.bench(f"measured_{each}", f"schedule={','.join(names)}", partitions, *several)["rows"]
        for row in rows:
            found[devices, row["settings"]["schedule"], each] = row
    return found


def _notes(planned: dict[Any, dict[str, Any]], measured: dict[Any, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for (devices, schedule, each), plan in planned.items():
        if schedule == "auto":
            stages = f"{devices} devices of {each} stage{'s' * (each > 1)}"
            yield "auto", f"{stages}: {plan['schedule'].removeprefix('auto ').strip('()')}"
    yield "simulated", f"from {next(iter(planned.values()))['hardware']['source']}; each device computes by itself"
    yield "unit clock", "every F, I and W takes one tick, a B two, transfers none"
    for kind in sorted({row["kind"] for row in measured.values() if row["kind"]} - {"measured"}):
        yield "measured", f"{speed_kind(kind)}; not the speed of a pipeline"


def _table(devices: int, planned: dict[Any, dict[str, Any]], measured: dict[Any, dict[str, Any]]) -> Table:
    rows = [row for row in planned if row[0] == devices]
    base = {each: planned[devices, "gpipe", each] for each in _ROWS}
    plans = [planned[row] for row in rows]
    micro_batches = plans[0]["micro_batches"]
    simulated = (
        Column("idle", "simulated", [percent(plan["breakdown"] and idle(plan["breakdown"])) for plan in plans]),
        Column("activations", "simulated", [size(_activations(plan)) for plan in plans]),
        numbers("speed", "simulated", [base[row[2]]["step_seconds"] / planned[row]["step_seconds"] for row in rows], 2),
        Column("unit clock", "simulated", [_unit_clock(row, micro_batches) for row in rows]),
    )
    here = tuple(
        Column(heading, "measured", [cell(row, planned, measured) for row in rows])
        for heading, cell in (("idle", _measured_idle), ("activations", _measured_activations), ("speed", _speed))
        if any(row in measured for row in rows)
    )
    names = (
        Column("schedule", cells=[schedule for _, schedule, _ in rows]),
        Column("K", cells=[str(devices * each) for _, _, each in rows], number=True),
    )
    title = f"{devices} devices, M = {micro_batches}; speed relative to gpipe with as many stages"
    return Table(title, (*names, *simulated, *here))


def _activations(plan: dict[str, Any], of_stages: Sequence[int] = ()) -> int:
    """Bytes of activations on the fullest device, as planned or as given ``of_stages``."""
    together: dict[int, int] = {}
    for k, stage in enumerate(plan["stages"]):
        held = of_stages[k] if of_stages else stage["memory"]["activations_bytes"]
        together[stage["process"]] = together.get(stage["process"], 0) + held
    return max(together.values())


def _unit_clock(row: tuple[int, str, int], micro_batches: int) -> str:
    """The speed relative to gpipe's; none for `auto`, whose order depends on costs."""
    devices, schedule, each = row
    if schedule == "auto":
        return NONE
    seconds, stages = [], devices * each
    tick = StageCost(1.0, 1.0, 2.0, 1.0, 1.0)
    for name in ("gpipe", schedule):
        device_of_stage = [k % devices if name == "interleaved" else k // each for k in range(stages)]
        timeline = simulate(
            order(name, stages, micro_batches, devices), [tick] * stages, device_of_stage=device_of_stage
        )
        seconds.append(timeline.step_seconds)
    return number(seconds[0] / seconds[1], 2)


_Row = tuple[int, str, int]
_Facts = dict[_Row, dict[str, Any]]


def _measured_idle(row: _Row, planned: _Facts, measured: _Facts) -> str:
    shares = measured.get(row, {}).get("breakdown")
    return NONE if shares is None else percent(idle(shares))


def _measured_activations(row: _Row, planned: _Facts, measured: _Facts) -> str:
    held = measured.get(row, {}).get("activation_bytes")
    return NONE if not held else size(_activations(planned[row], held))


def _speed(row: _Row, planned: _Facts, measured: _Facts) -> str:
    speed, base = (measured.get(key, {}).get("samples_per_second") for key in (row, (row[0], "gpipe", row[2])))
    return NONE if speed is None or base is None else number(speed / base, 2)
