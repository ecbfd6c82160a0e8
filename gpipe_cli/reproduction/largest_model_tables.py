"""The tables of the paper's Table 1: what it says of each model, what is planned for it, and what was counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.reporting.tables.recipe import Column, Table
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
    columns = (
        Column(""),
        Column("size"),
        Column("parameters", "paper"),
        Column("parameters", "planned"),
        Column("planned - paper, %", "difference"),
    )
    rows = tuple(
        (
            one.name,
            one.shown,
            count(round(one.parameters)),
            count(plan["parameters"]),
            difference(100 * plan["parameters"] / one.parameters, 100.0, comparable, 1),
        )
        for one, plan in zip(sizes, plans, strict=True)
    )
    return Table("The paper's models: parameters", columns, rows)


def model_table(sizes: Sequence[Size], plans: Sequence[Mapping[str, Any]], unit: str, comparable: bool) -> Table:
    of_unit = BYTES[unit]
    rows = []
    for one, plan in zip(sizes, plans, strict=True):
        state = summed(plan, "weights_bytes", "optimizer_bytes") / of_unit
        gradients = summed(plan, "gradients_bytes") / of_unit
        rows.append(
            (
                one.name,
                number(one.model, 2),
                number(state, 2),
                number(state + gradients, 2),
                difference(state, one.model, comparable),
            )
        )
    columns = (
        Column(""),
        Column("weights, optimizer", "paper"),
        Column("weights, optimizer", "planned"),
        Column("and gradients", "planned"),
        Column("planned - paper", "difference"),
    )
    return Table(f"The paper's models: memory of the parameters, all stages, {unit}", columns, tuple(rows))


def activations_table(
    sizes: Sequence[Size], plans: Sequence[Mapping[str, Any]], fits: Sequence[bool], unit: str, comparable: bool
) -> Table:
    of_unit = BYTES[unit]
    rows = []
    for one, plan, fit in zip(sizes, plans, fits, strict=True):
        activations = summed(plan, "activations_bytes", "workspace_bytes") / of_unit
        rows.append(
            (
                one.name,
                number(one.activations, 2),
                number(activations, 2),
                difference(activations, one.activations, comparable),
                size(max(stage["memory"]["total_bytes"] for stage in plan["stages"])),
                "yes" if fit else "no",
            )
        )
    columns = (
        Column(""),
        Column("activations", "paper"),
        Column("activations", "planned"),
        Column("planned - paper", "difference"),
        Column("fullest stage", "planned"),
        Column("fits", "planned"),
    )
    return Table(f"The paper's models: peak of the activations, all stages, {unit}", columns, tuple(rows))


def summed(plan: Mapping[str, Any], *keys: str) -> float:
    return float(sum(stage["memory"][key] for stage in plan["stages"] for key in keys))


def largest_tables(sizes: Sequence[Size], largest: Sequence[Mapping[str, Any] | None], comparable: bool) -> list[Table]:
    """One, or none if nothing fits at all."""
    first = next((at for at, plan in enumerate(largest) if plan is not None), None)
    if first is None:
        return []
    base = largest[first]
    assert base is not None
    rows = []
    for one, plan in zip(sizes, largest, strict=True):
        paper = one.parameters / sizes[first].parameters
        ours = None if plan is None else plan["parameters"] / base["parameters"]
        rows.append(
            (
                one.name,
                count(round(one.parameters)),
                NONE if plan is None else count(plan["parameters"]),
                NONE if plan is None else shown(plan),
                number(paper, 1),
                number(ours, 1),
                difference(ours, paper, comparable, 1),
            )
        )
    columns = (
        Column(""),
        Column("parameters", "paper"),
        Column("parameters", "planned"),
        Column("size", "planned"),
        Column("times", "paper"),
        Column("times", "planned"),
        Column("planned - paper", "difference"),
    )
    title = f"The largest model that fits, by our count; times {sizes[first].name}'s"
    return [Table(title, columns, tuple(rows))]


def trained_tables(sizes: Sequence[Size], rows: Sequence[Trained]) -> list[Table]:
    """One, or none if nothing fits."""
    if not rows:
        return []
    theirs = {one.name: one.parameters for one in sizes}
    first = rows[0]
    cells = []
    for row in rows:
        known = row.name in theirs and first.name in theirs
        cells.append(
            (
                row.name,
                row.shown,
                count(row.parameters),
                number(theirs[row.name] / theirs[first.name] if known else None, 1),
                number(row.parameters / first.parameters, 1),
                size(row.fullest_bytes),
                NONE if row.planned is None else size(sum(row.planned)),
                NONE if row.counted is None else size(sum(row.counted)),
                _off(row),
            )
        )
    columns = (
        Column(""),
        Column("size", "planned"),
        Column("parameters", "counted"),
        Column("times", "paper"),
        Column("times", "counted"),
        Column("fullest stage", "planned"),
        Column("activations", "planned"),
        Column("activations", "counted"),
        Column("counted - planned", "difference"),
    )
    title = f"Trained here: the largest model below {size(first.limit_bytes)} a stage; times {first.name}'s"
    return [Table(title, columns, tuple(cells))]


def _off(row: Trained) -> str:
    if row.planned is None or row.counted is None:
        return NONE
    off = sum(row.counted) - sum(row.planned)
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"
