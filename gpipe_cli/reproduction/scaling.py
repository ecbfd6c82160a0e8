"""Weak and strong scaling over K partitions and R replicas, simulated: the paper's largest models on 2,048 devices.

Weak: the mini-batch grows with the number of replicas, and M per replica is fixed. Strong: the mini-batch is fixed, so
with more replicas each has fewer micro-batches, and the bubble grows (section 2.3 of the paper).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Self

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.plots.timeline_values import idle
from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.runner import CommandFailedError, Findings, Runner
from gpipe_cli.system.forked_call import in_forks
from gpipe_cli.units import percent, plural, size

if TYPE_CHECKING:  # recipes are listed without torch
    from gpipe_cli.planner.model_profile import ModelProfile


@dataclass(frozen=True, slots=True)
class Pipelines:
    partitions: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaledModel:
    name: str
    samples: int  # samples in a micro-batch
    weak: int  # samples of each replica in a mini-batch, under weak scaling
    strong: int  # samples in a mini-batch, under strong scaling
    grid: tuple[Pipelines, ...]
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of the table: one plan."""

    model: str
    scaling: str  # `weak`, `strong`
    partitions: int
    replicas: int
    batch_size: int
    micro_batches: int  # M of each replica
    missing_bytes: int = 0  # bytes that the fullest stage needs beyond its memory
    samples_per_second: float = 0.0  # 0 if the model does not fit
    idle: float = 0.0  # share of stage time, 0 to 1
    sums: float = 0.0  # largest share of a step that a stage spends on summing its gradients over the replicas

    @property
    def devices(self) -> int:
        return self.partitions * self.replicas


@dataclass(frozen=True, slots=True)
class Scaling:
    settings: tuple[str, ...]  # settings of all models
    models: tuple[ScaledModel, ...]

    def reproduce(self, runner: Runner) -> Findings:
        from gpipe_cli.reporting.plots.picture import write_picture  # here, as matplotlib takes half a second to import
        from gpipe_cli.reporting.plots.recipes import draw_scaling

        runner.refuse("replicas", "batch_size")
        work: list[tuple[TrainConfig, ModelProfile, Cell]] = []
        for model in self.models:
            runner.progress(f"traces       {model.name}")
            # the profile depends on none of K, M and N; K is the largest one so that a micro-batch fits
            sizes = f"partitions={model.grid[-1].partitions}", "micro_batches=1", f"batch_size={model.samples}"
            found = runner.simulated(*self.settings, *model.settings, *sizes)
            work += [(found.config, found.profile, cell) for cell in _cells(model)]
        runner.progress(f"plans        {plural(len(work), 'cell')}")
        try:
            cells = in_forks(_planned, work)
        except RuntimeError as error:
            raise CommandFailedError(str(error)) from error
        picture = runner.folder / "scaling.png"
        write_picture(picture, draw_scaling({kind: _lines(cells, kind) for kind in ("weak", "strong")}))
        tables = tuple(_table(model.name, cells) for model in self.models)
        return Findings(tables, tuple(_notes(cells)), (("picture", str(picture)),), comparable=not runner.changed())

    def smallest(self) -> Self:
        return replace(self, models=self.models[-1:])


def _cells(model: ScaledModel) -> Iterator[Cell]:
    for scaling, pipelines in product(("weak", "strong"), model.grid):
        for replicas in pipelines.replicas:
            batch_size = model.weak * replicas if scaling == "weak" else model.strong
            if (micro_batches := batch_size // (replicas * model.samples)) > 0:
                yield Cell(model.name, scaling, pipelines.partitions, replicas, batch_size, micro_batches)


def _planned(work: Sequence[tuple[TrainConfig, "ModelProfile", Cell]]) -> list[Cell]:
    gc.disable()  # a large plan has a million small objects; the process ends after the plans
    return [plan_cell(config, profile, cell) for config, profile, cell in work]


def plan_cell(config: TrainConfig, profile: "ModelProfile", cell: Cell) -> Cell:
    """A copy of ``cell`` with the results of its plan."""
    from gpipe_cli.planner.make_plan import plan_step
    from gpipe_cli.planner.plan import TooLargeError

    sizes = {key: getattr(cell, key) for key in ("partitions", "replicas", "micro_batches", "batch_size")}
    config = replace(config, **sizes)
    try:
        plan = plan_step(config, profile)
    except TooLargeError as error:
        return replace(cell, missing_bytes=error.missing_bytes)
    return replace(
        cell,
        samples_per_second=cell.batch_size / plan.step_seconds,
        idle=idle(asdict(plan.breakdown)),
        sums=max(stage.sum_seconds for stage in plan.stage_costs) / plan.step_seconds,
    )


def _efficiencies(cells: Sequence[Cell]) -> dict[Cell, float]:
    """Throughput per device, relative to the fewest devices that hold the same model in the same scaling."""
    fitting = [cell for cell in cells if not cell.missing_bytes]
    found = {}
    for cell in fitting:
        base = min((c for c in fitting if (c.model, c.scaling) == (cell.model, cell.scaling)), key=lambda c: c.devices)
        found[cell] = cell.samples_per_second / cell.devices / (base.samples_per_second / base.devices)
    return found


def _lines(cells: Sequence[Cell], scaling: str) -> dict[str, list[tuple[int, float]]]:
    """Lines of the picture, one per model and K, as points (number of devices, efficiency)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell, efficiency in _efficiencies(cells).items():
        if cell.scaling == scaling:
            lines.setdefault(f"{cell.model}, K = {cell.partitions}", []).append((cell.devices, efficiency))
    return lines


def _table(model: str, cells: Sequence[Cell]) -> Table:
    efficiencies = _efficiencies(cells)
    rows = [cell for cell in cells if cell.model == model]

    def simulated(heading: str, of: Callable[[Cell], float], form: Callable[[float], str]) -> Column:
        values = [None if cell.missing_bytes else of(cell) for cell in rows]
        return Column.of("", heading, values, form, origin="simulated")

    fits = [f"no, {size(cell.missing_bytes)} over" if cell.missing_bytes else "yes" for cell in rows]
    return Table(
        f"{model}: K partitions, R replicas; efficiency relative to the fewest devices that hold it",
        (
            Column("scaling", cells=[cell.scaling for cell in rows]),
            Column("K", cells=[str(cell.partitions) for cell in rows], number=True),
            Column("R", cells=[str(cell.replicas) for cell in rows], number=True),
            Column("devices", cells=[f"{cell.devices:,}" for cell in rows], number=True),
            Column("N", cells=[f"{cell.batch_size:,}" for cell in rows], number=True),
            Column("M", cells=[str(cell.micro_batches) for cell in rows], number=True),
            simulated("samples/s", lambda cell: cell.samples_per_second, "{:,.1f}".format),
            simulated("efficiency", efficiencies.__getitem__, percent),
            simulated("idle", lambda cell: cell.idle, percent),
            simulated("sum of gradients", lambda cell: cell.sums, percent),
            Column("fits", "simulated", fits),
        ),
    )


def _notes(cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    yield "simulated", "nothing was run; a stage sums its gradients over the replicas after its last backward"
    yield "M", "of each replica; the paper finds the bubble negligible from M = 4 K on"
    for model in dict.fromkeys(cell.model for cell in cells):
        strong = [cell for cell in cells if (cell.model, cell.scaling, cell.missing_bytes) == (model, "strong", 0)]
        if len(strong) > 1:
            fewest, most = (pick(strong, key=lambda cell: cell.devices) for pick in (min, max))
            found = f"{model}, strong: from {fewest.devices:,} to {most.devices:,} devices a replica's M goes from "
            found += f"{fewest.micro_batches} to {most.micro_batches}, idle from {percent(fewest.idle)} to "
            found += (
                f"{percent(most.idle)}, the sum of gradients from {percent(fewest.sums)} to {percent(most.sums)} of"
            )
            yield "found", f"{found} a step"
