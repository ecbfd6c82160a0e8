"""Compares plans with speeds and memory that others have published: torchgpipe, zero bubble, FSDP and more.

The paper's own tables leave the batch size and more to guesswork. These sources report what ran: hardware, model, batch
size, K, M and schedule are settings of `gpipe plan`. No figure is fitted to a single cell, but three were set by these
tables: the FLOP/s of an A100 and of convolutions on tensor cores, and the memory bandwidth of a P40.

Where stages hand long skips to others that are not next to them, a table has the bytes that this saves.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from gpipe_cli.errors import InputError
from gpipe_cli.reporting.tables.table import Origin, Table
from gpipe_cli.reproduction.comparison import Difference, Shown, make_table
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.reproduction.simulated import SimulatedPlan
from gpipe_cli.units import GIB, plural

MEMORY = "GiB"  # the unit of cells whose figure is the memory of all devices
SENT = (
    Shown("cell", "name"),
    Shown("samples", "samples", number=True),
    Shown("straight", "straight", "size", "planned"),
    Shown("through all stages", "through", "size", "planned"),
    Shown("saved", "saved", ".1%", number=True),
)
SUMMARY = (
    Shown("source", "name"),
    Shown("cells", "cells", number=True),
    Shown("median of |error|, %", "median", ".1f", "difference"),
    Shown("of ratios within a table, %", "of_ratios", ".1f", "difference"),
)


def reproduce(runner: Runner, settings: str, sources: Sequence[Mapping[str, Any]]) -> Findings:
    """Plan every cell of the ``sources``; ``settings``: of all cells. Raises InputError as `gpipe plan` does."""
    comparable = not runner.incomparable_settings()
    if runner.scale == "smoke":
        sources = sources[:1]
    tables = list[Table]()
    errors = list[tuple[str, list[float], list[float]]]()  # of figures, and of their ratios to the first of a table
    for source in sources:
        cells = sum(len(table["cells"]) for table in source["tables"])
        runner.progress(f"plans        {source['name']}: {plural(cells, 'cell')}")
        off, ratios = list[float](), list[float]()
        for table in source["tables"]:
            rows = [
                _plan_cell(cell, table["unit"], f"{settings} {table['settings']}", runner) for cell in table["cells"]
            ]
            of_rows = [row["ours"] / row["published"] - 1 for row in rows]
            off += of_rows
            ratios += [(1 + each) / (1 + of_rows[0]) - 1 for each in of_rows[1:]]
            tables += _make_tables(source["name"], table, rows, comparable)
        errors.append((source["name"], off, ratios))
    of_all, of_all_ratios = [*chain(*(off for _, off, _ in errors))], [*chain(*(ratios for _, _, ratios in errors))]
    errors.append(("all", of_all, of_all_ratios))
    notes = [("source", f"{source['name']}: {source['hardware']}; {source['source']}") for source in sources]
    if comparable:
        figures = "figures" if sources[0]["tables"][0]["unit"] == MEMORY else "speeds"
        notes += [("off", f"{source['name']}: {source['note']}") for source in sources]
        summary = [
            {"name": name, "cells": len(off), "median": _median(off), "of_ratios": _median(ratios)}
            for name, off, ratios in errors
        ]
        tables.append(make_table(f"How far the simulated {figures} are off", SUMMARY, summary))
        every = summary[-1]
        if every["of_ratios"] is not None:
            error = f"median |error| of {every['cells']} {figures} {every['median']:.1f} %"
            notes.append(("found", f"{error}, of ratios within a table {every['of_ratios']:.1f} %"))
    return Findings(tables, notes, comparable=comparable)


def _make_tables(
    source: str, table: Mapping[str, Any], rows: Sequence[dict[str, Any]], comparable: bool
) -> Iterator[Table]:
    """Published figures next to ours; and the bytes that stages send, of cells where a straight way saves some."""
    origin: Origin = "planned" if table["unit"] == MEMORY else "simulated"
    columns: list[Shown | Difference] = [Shown("cell", "name")]
    if any("parameters" in row for row in rows):
        columns += [Shown("parameters", "parameters", "count", "published"), Shown("", "counted", "count", "counted")]
    ours = Shown(origin, "ours", "figures", origin)
    columns += [Shown("published", "published", "figures", "published"), ours]
    columns.append(Difference(f"{origin} - published, %", ours, "published", digits=1, relative=True))
    if table.get("speed_up"):
        for row in rows:
            row["speed_up"], row["our_speed_up"] = (row[key] / rows[0][key] for key in ("published", "ours"))
        columns += [Shown("speed-up", "speed_up", ",.2f", "published"), Shown("", "our_speed_up", ",.2f", "simulated")]
    yield make_table(f"{source}: {table['model']}, {table['unit']}", columns, rows, comparable)
    if sent := [row for row in rows if row["straight"] < row["through"]]:
        title = f"{source}: {table['model']}, bytes sent in the forwards of a micro-batch"
        yield make_table(title, SENT, sent)


def _plan_cell(cell: Mapping[str, Any], unit: str, settings: str, runner: Runner) -> dict[str, Any]:
    """A row with the figure of its plan, and the bytes that its stages send in the forwards of a micro-batch."""
    from gpipe_cli.pipeline.runtime.routes import forward_bytes  # imports torch, which listing recipes avoids

    simulated = runner.simulate_plan(*f"{settings} {cell['settings']}".split())
    boundaries = [simulated.profile.costs[end - 1].outputs for _, end in simulated.plan.bounds[:-1]]
    straight, through = forward_bytes(boundaries, simulated.plan.samples, simulated.profile.lengths)
    return {
        **cell,
        "ours": _figure(simulated, unit),
        "counted": sum(layer.parameters for layer in simulated.profile.weights),
        "samples": simulated.plan.samples,
        "straight": straight,
        "through": through,
        "saved": 1 - straight / through if through else None,
    }


def _figure(simulated: SimulatedPlan, unit: str) -> float:
    """The simulated speed of a cell, or its planned memory, in its unit."""
    gpus = len(set(simulated.plan.device_of_stage)) * simulated.config.replicas
    match unit:
        case "samples/s":
            return simulated.samples_per_second
        case "samples/s per GPU":
            return simulated.samples_per_second / gpus
        case "tokens/s per GPU":
            return simulated.samples_per_second * max(simulated.profile.lengths) / gpus
        case "s per step":
            return simulated.plan.step_seconds
        case "GiB":  # memory of all devices
            return sum(stage.total_bytes for stage in simulated.plan.memory) / GIB
    raise InputError(f"unit {unit}: no such unit; choose samples/s or one of those in published.yaml")


def _median(off: Sequence[float]) -> float | None:
    """The median of errors without their sign, in percent."""
    return 100 * statistics.median(map(abs, off)) if off else None
