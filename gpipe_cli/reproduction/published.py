"""Compares plans with speeds and memory that others have published: torchgpipe, zero bubble, FSDP and more.

The paper's own tables leave the batch size and more to guesswork. These sources say what ran: hardware, model, batch
size, K, M and schedule are settings of `gpipe plan`. No figure is fitted to a single cell, but three were set by these
tables: the FLOP/s of an A100 and of convolutions on tensor cores, and the memory bandwidth of a P40.

Where stages hand long skips to others that are not next to them, a table says how many bytes that saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, Self

from gpipe_cli.reporting.tables.table import NONE, Column, Origin, Table
from gpipe_cli.reproduction.runner import Findings, Runner, counts, number, numbers
from gpipe_cli.reproduction.simulated import Simulated
from gpipe_cli.units import GIB, percent, plural, size

_ALL = "all"  # name of the summary row of all sources
Unit = Literal["samples/s", "samples/s per GPU", "tokens/s per GPU", "s per step", "GiB"]  # GiB: of all devices


@dataclass(frozen=True, slots=True)
class Cell:
    """One published speed, or the memory of all devices."""

    name: str
    published: float
    settings: str  # settings of this cell that its table does not share: `partitions=2 micro_batches=4`
    parameters: float | None = None  # of the model, as published; None: the table does not say, or all are the same


@dataclass(frozen=True, slots=True)
class Published:
    """A published table, or the part of one that is about one model."""

    model: str
    unit: Unit
    settings: str  # settings of all cells: the model, the hardware
    cells: tuple[Cell, ...]
    speed_up: bool = False  # whether its numbers are also shown relative to the first cell's


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    source: str  # document and table
    hardware: str
    note: str  # kinds of cells that the simulator gets wrong, and why
    tables: tuple[Published, ...]


@dataclass(frozen=True)
class Errors:
    """Relative errors of simulated speeds: 0.1 is 10 %."""

    cells: list[float]
    ratios: list[float]  # errors of the ratios between each cell of a table and its first one

    @property
    def row(self) -> tuple[str, str, str]:
        return str(len(self.cells)), _median(self.cells), _median(self.ratios)


@dataclass(frozen=True, slots=True)
class PublishedFigures:
    settings: str  # settings of all tables
    sources: tuple[Source, ...]

    def reproduce(self, runner: Runner) -> Findings:
        """Plan every cell in this process. Raises InputError as `gpipe plan` does."""
        comparable = not runner.changed()
        tables: list[Table] = []
        errors = {name: Errors([], []) for name in (*(source.name for source in self.sources), _ALL)}
        for source in self.sources:
            count = sum(len(table.cells) for table in source.tables)
            runner.progress(f"plans        {source.name}: {plural(count, 'cell')}")
            for table in source.tables:
                of_all = f"{self.settings} {table.settings}".split()
                found = [runner.simulated(*of_all, *cell.settings.split()) for cell in table.cells]
                figures = [_figure(one, table.unit) for one in found]
                off = [ours / cell.published - 1 for ours, cell in zip(figures, table.cells, strict=True)]
                for each in (errors[source.name], errors[_ALL]):
                    each.cells.extend(off)
                    each.ratios.extend((1 + one) / (1 + off[0]) - 1 for one in off[1:])
                tables.append(_table(source, table, found, figures, off if comparable else None))
                tables += _skips_tables(source, table, found)
        notes = [("source", f"{one.name}: {one.hardware}; {one.source}") for one in self.sources]
        if comparable:
            notes += [("off", f"{source.name}: {source.note}") for source in self.sources]
            cells, middle, ratios = errors[_ALL].row
            units = {table.unit for source in self.sources for table in source.tables}
            what = "figures" if "GiB" in units else "speeds"
            notes.append(("found", f"median |error| of {cells} {what} {middle} %, of ratios within a table {ratios} %"))
            tables.append(_summary(f"How far the simulated {what} are off", errors))
        return Findings(tuple(tables), tuple(notes), comparable=comparable)

    def smallest(self) -> Self:
        return replace(self, sources=self.sources[:1])


def _figure(found: Simulated, unit: Unit) -> float:
    """The simulated speed of a cell, or its planned memory, in its unit."""
    gpus = len(set(found.plan.device_of_stage)) * found.config.replicas
    match unit:
        case "samples/s":
            return found.samples_per_second
        case "samples/s per GPU":
            return found.samples_per_second / gpus
        case "tokens/s per GPU":
            return found.samples_per_second * max(found.profile.lengths) / gpus
        case "s per step":
            return found.plan.step_seconds
        case "GiB":
            return sum(stage.total_bytes for stage in found.plan.memory) / GIB


def _table(
    source: Source,
    table: Published,
    found: Sequence[Simulated],
    simulated: Sequence[float],
    off: Sequence[float] | None,
) -> Table:
    parameters = [cell.parameters for cell in table.cells if cell.parameters is not None]
    counted = [sum(layer.parameters for layer in one.profile.weights) for one in found]
    sizes = counts("parameters", "published", [round(one) for one in parameters]), counts("", "counted", counted)
    published = [cell.published for cell in table.cells]
    origin: Origin = "planned" if table.unit == "GiB" else "simulated"
    speed_ups = (
        numbers("speed-up", "published", [one / published[0] for one in published], 2),
        numbers("", origin, [one / simulated[0] for one in simulated], 2),
    )
    return Table(
        f"{source.name}: {table.model}, {table.unit}",
        (
            Column("cell", cells=[cell.name for cell in table.cells]),
            *(sizes if parameters else ()),
            Column.of("", "published", published, _figures, origin="published"),
            Column.of("", origin, simulated, _figures, origin=origin),
            Column(
                f"{origin} - published, %",
                "difference",
                [NONE] * len(simulated) if off is None else [f"{100 * each:+.1f}" for each in off],
            ),
            *(speed_ups if table.speed_up else ()),
        ),
    )


def _skips_tables(source: Source, table: Published, found: Sequence[Simulated]) -> list[Table]:
    """One table, or none if no skip jumps over a stage."""
    from gpipe_cli.pipeline.runtime.routes import forward_bytes  # imports torch; listing recipes does not

    rows = []
    for cell, one in zip(table.cells, found, strict=True):
        boundaries = [one.profile.costs[end - 1].outputs for _, end in one.plan.bounds[:-1]]
        straight, through = forward_bytes(boundaries, one.plan.samples, one.profile.lengths)
        if straight < through:
            saved = percent(1 - straight / through)
            rows.append((cell.name, str(one.plan.samples), size(straight), size(through), saved))
    columns = (
        Column("cell"), Column("samples", number=True), Column("straight", "planned"),
        Column("through all stages", "planned"), Column("saved", number=True),
    )  # fmt: skip
    title = f"{source.name}: {table.model}, bytes sent in the forwards of a micro-batch"
    return [Table.of_rows(title, columns, rows)] if rows else []


def _median(off: Sequence[float]) -> str:
    return f"{100 * median(map(abs, off)):.1f}" if off else NONE


def _figures(value: float) -> str:
    """A number with three significant digits, or with all digits before its decimal point."""
    return number(value, max(0, 3 - len(str(int(value)))) if value >= 1 else 3)


def _summary(title: str, errors: dict[str, Errors]) -> Table:
    columns = (
        Column("source"), Column("cells", number=True), Column("median of |error|, %", "difference"),
        Column("of ratios within a table, %", "difference"),
    )  # fmt: skip
    return Table.of_rows(title, columns, [(name, *each.row) for name, each in errors.items()])
