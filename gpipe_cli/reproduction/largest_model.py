"""The largest models that can be trained: the paper's Table 1.

First planned, for the paper's hardware: what its models would take there, and how large a model could be by our own
count. Then on the device at hand: the largest of a family that stays below a limit, found by a plan, and really
trained. What was planned and what was counted never share a column.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpipe_cli.config.owners import key_of
from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.reporting.run.result import read_result
from gpipe_cli.reproduction.largest_model_tables import (
    Size,
    Trained,
    activations_table,
    largest_tables,
    model_table,
    parameters_table,
    shown,
    trained_tables,
)
from gpipe_cli.reproduction.numbers import NO_DIFFERENCES
from gpipe_cli.reproduction.runner import Findings, Runner

_OWN = ("partitions", "micro_batches", "recompute")  # what rows differ in
_LIMIT = "hardware.memory_gib"
_SOLVED = "++solve=max_model"  # `++`: the file of a recipe has no such key


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
