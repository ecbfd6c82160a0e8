"""Compares plans with speeds and memory that others have published: torchgpipe, zero bubble, FSDP and more.

The paper's own tables leave the batch size and more to guesswork. These sources report what ran: hardware, model, batch
size, K, M and schedule are settings of `gpipe plan`. No figure is fitted to a single cell, but three were set by these
tables: the FLOP/s of an A100 and of convolutions on tensor cores, and the memory bandwidth of a P40.

Where stages hand long skips to others that are not next to them, a table has the bytes that this saves.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from gpipe_cli.errors import InputError
from gpipe_cli.reproduction.runner import Runner
from gpipe_cli.reproduction.simulated import SimulatedPlan
from gpipe_cli.units import GIB, plural


def published(results: dict[str, Any], runner: Runner) -> tuple[()]:
    """Plan every cell of the sources in this process. Raises InputError as `gpipe plan` does."""
    if runner.scale == "smoke":
        results["sources"] = results["sources"][:1]
    tables: list[dict[str, Any]] = []
    errors = []
    for source in results["sources"]:
        cells = sum(len(table["cells"]) for table in source["tables"])
        runner.progress(f"plans        {source['name']}: {plural(cells, 'cell')}")
        off = list[float]()
        ratios = list[float]()
        for table in source["tables"]:
            rows = [_plan_cell(cell, table, results, runner) for cell in table["cells"]]
            for row in rows:
                row["off"] = row["ours"] / row["published"] - 1
                if table.get("speed_up"):
                    row["speed_up"], row["our_speed_up"] = (row[key] / rows[0][key] for key in ("published", "ours"))
            off += [row["off"] for row in rows]
            ratios += [(1 + row["off"]) / (1 + rows[0]["off"]) - 1 for row in rows[1:]]
            sent = [row for row in rows if row["straight"] < row["through"]]
            tables.append({**table, "source": source["name"], "rows": rows, "sent": sent})
        errors.append({"name": source["name"], "off": off, "ratios": ratios})
    together = {key: [error for source in errors for error in source[key]] for key in ("off", "ratios")}
    errors.append({"name": "all", **together})
    for row in errors:
        row |= {"cells": len(row["off"]), "median": _median(row["off"]), "median_of_ratios": _median(row["ratios"])}
    results["planned"] = tables
    results["all"] = errors[-1]
    results["errors"] = errors if results["comparable"] else []
    return ()


def _plan_cell(cell: dict[str, Any], table: dict[str, Any], results: dict[str, Any], runner: Runner) -> dict[str, Any]:
    """A row with the figure of its plan, and the bytes that its stages send in the forwards of a micro-batch."""
    from gpipe_cli.pipeline.runtime.routes import forward_bytes  # imports torch, which listing recipes avoids

    simulated = runner.simulate_plan(*f"{results['settings']} {table['settings']} {cell['settings']}".split())
    boundaries = [simulated.profile.costs[end - 1].outputs for _, end in simulated.plan.bounds[:-1]]
    straight, through = forward_bytes(boundaries, simulated.plan.samples, simulated.profile.lengths)
    return {
        **cell,
        "ours": _figure(simulated, table["unit"]),
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
    return 100 * median(map(abs, off)) if off else None
