"""The tables of the paper's Table 1: what it says of each model, what is planned for it, and what was counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NONE, difference, number
from gpipe_cli.units import count, size

BYTES = {"GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Size:
    """A column of Table 1: a model and what the paper says that it takes, on all accelerators together."""

    name: str  # `Pipeline-2`
    shown: str  # `(18, 544)`, as the paper writes it
    settings: tuple[str, ...]
    partitions: int
    parameters: float
    model: float  # memory of the parameters, in the unit of the table
    activations: float  # peak


@dataclass(frozen=True)
class Trained:
    """The largest model of a row on the device at hand; planned and counted bytes of activations, per stage."""

    name: str
    shown: str
    parameters: int
    fullest_bytes: int
    limit_bytes: int
    planned: Sequence[int] | None
    counted: Sequence[int] | None


def shown(plan: Mapping[str, Any]) -> str:
    """`(18, 48)` of AmoebaNet-D (18, 48), `103` of Transformer-103, of whatever width."""
    name = str(plan["model_name"])
    return name[name.index("(") :] if "(" in name else name.partition("-")[2].partition(" ")[0]


def parameters_table(sizes: Sequence[Size], plans: Sequence[Mapping[str, Any]], comparable: bool) -> Table:
    shares = [100 * plan["parameters"] / one.parameters for one, plan in zip(sizes, plans, strict=True)]
    return Table(
        "The paper's models: parameters",
        [
            Column("", cells=[one.name for one in sizes]),
            Column("size", cells=[one.shown for one in sizes]),
            Column("parameters", "paper", [count(round(one.parameters)) for one in sizes]),
            Column("parameters", "planned", [count(plan["parameters"]) for plan in plans]),
            _differences("planned - paper, %", shares, [100.0] * len(sizes), comparable, 1),
        ],
    )


def model_table(sizes: Sequence[Size], plans: Sequence[Mapping[str, Any]], unit: str, comparable: bool) -> Table:
    paper = [one.model for one in sizes]
    state = [summed(plan, "weights_bytes", "optimizer_bytes") / BYTES[unit] for plan in plans]
    whole = [summed(plan, "weights_bytes", "optimizer_bytes", "gradients_bytes") / BYTES[unit] for plan in plans]
    return Table(
        f"The paper's models: memory of the parameters, all stages, {unit}",
        [
            Column("", cells=[one.name for one in sizes]),
            Column("weights, optimizer", "paper", [number(value, 2) for value in paper]),
            Column("weights, optimizer", "planned", [number(value, 2) for value in state]),
            Column("and gradients", "planned", [number(value, 2) for value in whole]),
            _differences("planned - paper", state, paper, comparable),
        ],
    )


def activations_table(
    sizes: Sequence[Size], plans: Sequence[Mapping[str, Any]], fits: Sequence[bool], unit: str, comparable: bool
) -> Table:
    paper = [one.activations for one in sizes]
    ours = [summed(plan, "activations_bytes", "workspace_bytes") / BYTES[unit] for plan in plans]
    fullest = [max(stage["memory"]["total_bytes"] for stage in plan["stages"]) for plan in plans]
    return Table(
        f"The paper's models: peak of the activations, all stages, {unit}",
        [
            Column("", cells=[one.name for one in sizes]),
            Column("activations", "paper", [number(value, 2) for value in paper]),
            Column("activations", "planned", [number(value, 2) for value in ours]),
            _differences("planned - paper", ours, paper, comparable),
            Column("fullest stage", "planned", [size(value) for value in fullest]),
            Column("fits", "planned", ["yes" if fit else "no" for fit in fits]),
        ],
    )


def summed(plan: Mapping[str, Any], *keys: str) -> float:
    return float(sum(stage["memory"][key] for stage in plan["stages"] for key in keys))


def largest_tables(sizes: Sequence[Size], largest: Sequence[Mapping[str, Any] | None], comparable: bool) -> list[Table]:
    """One, or none if nothing fits at all."""
    parameters = [None if plan is None else plan["parameters"] for plan in largest]
    first = next((at for at, found in enumerate(parameters) if found is not None), None)
    if first is None:
        return []
    paper = [one.parameters / sizes[first].parameters for one in sizes]
    ours = [None if found is None else found / parameters[first] for found in parameters]
    columns = [
        Column("", cells=[one.name for one in sizes]),
        Column("parameters", "paper", [count(round(one.parameters)) for one in sizes]),
        Column("parameters", "planned", [NONE if found is None else count(found) for found in parameters]),
        Column("size", "planned", [NONE if plan is None else shown(plan) for plan in largest]),
        Column("times", "paper", [number(times, 1) for times in paper]),
        Column("times", "planned", [number(times, 1) for times in ours]),
        _differences("planned - paper", ours, paper, comparable, 1),
    ]
    return [Table(f"The largest model that fits, by our count; times {sizes[first].name}'s", columns)]


def trained_tables(sizes: Sequence[Size], rows: Sequence[Trained]) -> list[Table]:
    """One, or none if nothing fits."""
    if not rows:
        return []
    first, theirs = rows[0], {one.name: one.parameters for one in sizes}
    naive = theirs.get(first.name)
    paper = [theirs[row.name] / naive if naive and row.name in theirs else None for row in rows]
    columns = [
        Column("", cells=[row.name for row in rows]),
        Column("size", "planned", [row.shown for row in rows]),
        Column("parameters", "counted", [count(row.parameters) for row in rows]),
        Column("times", "paper", [number(times, 1) for times in paper]),
        Column("times", "counted", [number(row.parameters / first.parameters, 1) for row in rows]),
        Column("fullest stage", "planned", [size(row.fullest_bytes) for row in rows]),
        Column("activations", "planned", [NONE if row.planned is None else size(sum(row.planned)) for row in rows]),
        Column("activations", "counted", [NONE if row.counted is None else size(sum(row.counted)) for row in rows]),
        Column("counted - planned", "difference", [_off(row) for row in rows]),
    ]
    title = f"Trained here: the largest model below {size(first.limit_bytes)} a stage; times {first.name}'s"
    return [Table(title, columns)]


def _differences(
    heading: str, ours: Sequence[float | None], paper: Sequence[float], comparable: bool, digits: int = 2
) -> Column:
    cells = [difference(mine, theirs, comparable, digits) for mine, theirs in zip(ours, paper, strict=True)]
    return Column(heading, "difference", cells)


def _off(row: Trained) -> str:
    if row.planned is None or row.counted is None:
        return NONE
    off = sum(row.counted) - sum(row.planned)
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"
