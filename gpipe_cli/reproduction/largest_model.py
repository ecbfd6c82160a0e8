"""The largest models that can be trained: the paper's Table 1.

First planned for the paper's hardware: what its models would take there, and the largest model that would fit. Then
on the device at hand: the largest model of a family below a limit is found by a plan and trained. What was planned and
what was counted never share a column.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpipe_cli.config.setting_owners import key_of
from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.reporting.run.result import read_result
from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NO_DIFFERENCES, NONE, differences, number
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.units import count, size

_OWN = ("partitions", "micro_batches", "recompute")  # what rows differ in
_LIMIT = "hardware.memory_gib"
_SOLVED = "++solve=max_model"  # `++`: the file of a recipe has no such key
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


@dataclass(frozen=True, slots=True)
class LargestModel:
    unit: Literal["GB", "GiB"]
    micro_batches: int  # of the pipelines
    sizes: tuple[Size, ...]  # the first is naive: one partition, one micro-batch, nothing recomputed
    measured: tuple[int, ...]  # partitions of the pipelines that are trained on the device at hand
    grown: str  # what grows there, of the model's sizes: `filters`

    def cell(self, partitions: int, naive: bool) -> tuple[str, ...]:
        """Settings of a row."""
        micro_batches, mode = (1, "never") if naive else (self.micro_batches, "always")
        return f"partitions={partitions}", f"micro_batches={micro_batches}", f"recompute={mode}"


def reproduce(what: LargestModel, runner: Runner) -> Findings:
    """Runs the recipe. Raises ValueError for a setting that the rows differ in."""
    runner.refuse(*_OWN, *(key_of(setting) for one in what.sizes for setting in one.settings))
    trained = _train(what, runner)  # first: it refuses what a measurement has no use for
    paper = runner.with_settings().without("cost")  # nothing of that size is timed here
    plans, fits = _planned(what, paper)
    largest = [_solved(paper, f"largest_{at + 1}", *_settings(what, at)) for at in range(len(what.sizes))]
    comparable = not runner.changed()
    tables = (
        parameters_table(what.sizes, plans, comparable),
        model_table(what.sizes, plans, what.unit, comparable),
        activations_table(what.sizes, plans, fits, what.unit, comparable),
        *largest_tables(what.sizes, largest, comparable),
        *trained_tables(what.sizes, trained),
    )
    notes = [*_notes(what, plans, fits, largest, trained, runner)]
    if not comparable:
        notes.append(NO_DIFFERENCES)
    return Findings(tables, tuple(notes))


def _settings(what: LargestModel, at: int) -> tuple[str, ...]:
    one = what.sizes[at]
    return *one.settings, *what.cell(one.partitions, naive=at == 0)


def _planned(what: LargestModel, runner: Runner) -> tuple[list[dict[str, Any]], list[bool]]:
    """A plan of each of the paper's models, and whether it fits; what does not is planned without a limit."""
    plans, fits = [], []
    for at in range(len(what.sizes)):
        settings = _settings(what, at)
        try:
            plans.append(runner.plan(f"planned_{at + 1}", *settings))
            fits.append(True)
        except NothingFitsError:
            unlimited = runner.without(_LIMIT)
            plans.append(unlimited.plan(f"planned_{at + 1}", *settings, f"{_LIMIT}=null"))
            fits.append(False)
    return plans, fits


def _solved(runner: Runner, folder: str, *settings: str) -> dict[str, Any] | None:
    """The plan of the largest model that fits; None if not even the smallest does."""
    try:
        return runner.plan(folder, *settings, _SOLVED)
    except NothingFitsError:
        return None


def _train(what: LargestModel, runner: Runner) -> list[Trained]:
    """Solves for the largest model on the device at hand, and trains it for two steps."""
    rows = []
    for k, naive in ((1, True), *((k, False) for k in what.measured)):
        name = f"{'Naive' if naive else 'Pipeline'}-{k}"
        cell = what.cell(k, naive)
        folder = f"here_{name.lower()}"
        largest = _grown(what.grown, _solved(runner, f"{folder}_largest", *cell))
        if largest is None:
            continue
        grown = runner.without(largest.partition("=")[0])
        plan = grown.plan(f"{folder}_plan", *cell, largest)
        (row,) = grown.bench(folder, *cell, largest, "warm_up_steps=1", "steps=1", "rounds=1")["rows"]
        predicted = None
        if row["folders"]:
            predicted = read_result(runner.folder / folder / row["folders"][0])["prediction"]
        memory = max((stage["memory"] for stage in plan["stages"]), key=lambda stage: stage["total_bytes"])
        rows.append(
            Trained(
                name=name,
                shown=shown(plan),
                parameters=plan["parameters"],
                fullest_bytes=memory["total_bytes"],
                limit_bytes=memory["limit_bytes"],
                planned=predicted and predicted["activation_bytes"],
                counted=row["activation_bytes"],
            )
        )
    return rows


def _grown(key: str, plan: Mapping[str, Any] | None) -> str | None:
    """The largest value of one size that fits, as a setting; None if there is none.

    Growing another size may give more parameters; but models that differ in one size only can be compared.
    """
    tried = [c for c in plan["comparisons"] if c["setting"] == f"model.{key}"] if plan is not None else []
    found = [
        candidate["value"] for comparison in tried for candidate in comparison["candidates"] if candidate["chosen"]
    ]
    return f"model.{key}={found[0]}" if found else None


def _notes(
    what: LargestModel,
    plans: Sequence[Mapping[str, Any]],
    fits: Sequence[bool],
    largest: Sequence[Mapping[str, Any] | None],
    trained: Sequence[Trained],
    runner: Runner,
) -> Iterator[tuple[str, str]]:
    """What the columns mean, and what does not agree with the paper."""
    view = plans[0]["hardware"]
    yield "planned", f"for {view['name']}: bytes follow from shapes, in float32; nothing of it was run"
    yield (
        "planned",
        "activations: all that stages keep for the backward, and the workspace of one recomputation and one layer",
    )
    yield "planned", "the paper holds 12 bytes a parameter; ours holds the gradient too, 16 with RMSProp or Adam"
    unfit = [one.name for one, fit in zip(what.sizes, fits, strict=True) if not fit]
    if unfit:
        where = f"{view['name']} with what was given" if runner.changed() else "the paper's accelerators"
        yield "found", f"by our count {', '.join(unfit)} would not fit {where}, gradients included"
    none = [one.name for one, plan in zip(what.sizes, largest, strict=True) if plan is None]
    if none:
        yield "found", f"by our count no model of this family fits as {', '.join(none)}, however small"
    if trained:
        times = trained[-1].parameters / trained[0].parameters
        where = "at a desk" if runner.desk else "here"
        yield "found", f"{where} {trained[-1].name} holds {times:.1f} times the parameters of {trained[0].name}"
        exact = [row for row in trained if row.planned is not None and row.planned == row.counted]
        yield (
            "found",
            f"activations planned and counted are the same to the byte in {len(exact)} of {len(trained)} rows",
        )
    missing = 1 + len(what.measured) - len(trained)
    if missing:
        yield "found", f"{missing} of {1 + len(what.measured)} rows could not be trained here: no model fits the limit"


# --- the tables


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
            differences("planned - paper, %", shares, [100.0] * len(sizes), comparable, 1),
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
            differences("planned - paper", state, paper, comparable),
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
            differences("planned - paper", ours, paper, comparable),
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
        differences("planned - paper", ours, paper, comparable, 1),
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


def _off(row: Trained) -> str:
    if row.planned is None or row.counted is None:
        return NONE
    off = sum(row.counted) - sum(row.planned)
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"
