"""The largest models that can be trained: the paper's Table 1.

Plans for the paper's hardware show the memory that its models would take there, and the largest model that would fit.
On the device at hand, a plan finds the largest model of a family below a memory limit, which is then trained. Planned
and counted numbers never share a column.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from gpipe_cli.config.settings import key_of, load_hardware
from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.reporting.tables.table import Column, Origin, Table
from gpipe_cli.reproduction.runner import NONE, Findings, Runner, counts, differences, number, numbers
from gpipe_cli.results.files import read_result
from gpipe_cli.units import size

_LIMIT = "hardware.memory_gib"
_SOLVED = "++solve=max_model"  # `++`: the file of a recipe has no such key
BYTES = {"GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Size:
    """A column of Table 1: a model, and the paper's figures for its memory, summed over all accelerators."""

    name: str  # `Pipeline-2`
    shown: str  # `(18, 544)`, as the paper writes it
    settings: tuple[str, ...]
    partitions: int
    parameters: float
    model: float  # memory of the parameters, in the unit of the table
    activations: float  # peak memory of the activations, in the same unit


@dataclass(frozen=True)
class Planned:
    """One of the paper's models, planned for the paper's hardware."""

    size: Size
    plan: Mapping[str, Any]
    fits: bool
    largest: Mapping[str, Any] | None  # the plan of the largest model that fits; None: not even the smallest does

    def bytes(self, *parts: str) -> float:
        """Bytes of these parts of the memory, such as `weights`, summed over all stages."""
        return float(sum(stage["memory"][f"{part}_bytes"] for stage in self.plan["stages"] for part in parts))


@dataclass(frozen=True)
class Naive:
    """Activations of the naive model, if it was trained in this precision with this N; the paper states neither."""

    precision: str
    samples: int  # N
    activations: int  # peak bytes, with the workspace of one layer
    fused: int  # bytes if a compiler keeps only the inputs of matrix products and convolutions with weights

    @property
    def name(self) -> str:
        return f"{self.precision}, N = {self.samples}"


@dataclass(frozen=True)
class Trained:
    """The largest model of a row on the device at hand, with planned and counted bytes of activations per stage."""

    name: str
    plan: Mapping[str, Any]
    planned: Sequence[int] | None
    counted: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class LargestModel:
    unit: Literal["GB", "GiB"]
    micro_batches: int  # M of the pipelines
    sizes: tuple[Size, ...]  # the first is naive: one partition, one micro-batch, nothing recomputed
    measured: tuple[int, ...]  # numbers of partitions of the pipelines that are trained on the device at hand
    grown: str  # the model setting that grows until the model fills the device: `filters`
    precisions: tuple[str, ...] = ("float32", "bfloat16")  # precisions for which the naive model is planned

    def reproduce(self, runner: Runner) -> Findings:
        runner.refuse(*(key_of(setting) for one in self.sizes for setting in one.settings))
        rows = ((1, True), *((k, False) for k in self.measured))
        trained = [row for k, naive in rows if (row := self.train(k, naive, runner))]
        paper = runner.with_settings().without("cost")  # no layer of that size is timed here
        planned = [self.plan(at, paper) for at in range(len(self.sizes))]
        naive = [
            one
            for precision in self.precisions
            for more in (f"{_LIMIT}=null", "batch_size=auto")
            if (one := self._naive(paper, precision, more)) is not None
        ]
        comparable = not runner.changed()
        tables = (
            *planned_tables(planned, self.unit, comparable),
            *naive_tables(self.sizes[0], naive, self.unit, comparable),
            *largest_tables(planned, comparable),
            *trained_tables(self.sizes, trained),
        )
        notes = (
            *_planned_notes(planned, paper),
            *_naive_notes(self.sizes[0], naive, self.unit, comparable),
            *_trained_notes(trained, len(rows), runner),
        )
        return Findings(tables, notes, comparable=comparable)

    def smallest(self) -> Self:
        return replace(self, sizes=self.sizes[:1], measured=(), precisions=("float32",))

    def train(self, partitions: int, naive: bool, runner: Runner) -> Trained | None:
        """Find the largest model that fits the device at hand, and train it for two steps; None if none fits."""
        name = f"{'Naive' if naive else 'Pipeline'}-{partitions}"
        cell = self.cell(partitions, naive)
        folder = f"here_{name.lower()}"
        largest = _grown(self.grown, _plan(runner, f"{folder}_largest", *cell, _SOLVED))
        if largest is None:
            return None
        grown = runner.without(key_of(largest))
        plan = grown.plan(f"{folder}_plan", *cell, largest)
        (row,) = grown.bench(folder, *cell, largest, "warm_up_steps=1", "steps=1", "rounds=1")["rows"]
        predicted = read_result(runner.folder / folder / row["folders"][0])["prediction"] if row["folders"] else None
        return Trained(name, plan, predicted and predicted["activation_bytes"], row["activation_bytes"])

    def plan(self, at: int, runner: Runner) -> Planned:
        """The plan of the paper's model ``sizes[at]``, without a memory limit if it does not fit."""
        one = self.sizes[at]
        settings = *one.settings, *self.cell(one.partitions, naive=at == 0)
        folder = f"planned_{at + 1}"
        fitting = _plan(runner, folder, *settings)
        plan = fitting or runner.without(_LIMIT).plan(folder, *settings, f"{_LIMIT}=null")
        return Planned(one, plan, fitting is not None, _plan(runner, f"largest_{at + 1}", *settings, _SOLVED))

    def _naive(self, runner: Runner, precision: str, more: str) -> Naive | None:
        """The naive model's activations as `gpipe plan` plans them, and those of its products and convolutions alone;
        None if not even one sample fits."""
        from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory  # imports torch; listing recipes does not

        halves = "schedule=zero_bubble"  # so that the profile includes what the gradients of weights need
        settings = *self.sizes[0].settings, *self.cell(1, naive=True), halves, f"precision={precision}", more
        try:
            found = runner.without(key_of(more)).simulated(*settings)
        except NothingFitsError:
            return None
        (stage,), layers = found.plan.memory, len(found.profile.costs)
        memory = ActivationMemory(found.profile.costs, found.profile.inputs, found.samples, found.profile.lengths)
        held = memory.held(0, layers)
        fused = held.weights - held.gradients
        return Naive(precision, found.samples, stage.activations_bytes + stage.workspace_bytes, fused)

    def cell(self, partitions: int, naive: bool) -> tuple[str, ...]:
        """The settings in which the rows of the table differ."""
        micro_batches, mode = (1, "never") if naive else (self.micro_batches, "always")
        return f"partitions={partitions}", f"micro_batches={micro_batches}", f"recompute={mode}"


def _plan(runner: Runner, folder: str, *settings: str) -> dict[str, Any] | None:
    """The content of plan.json; None if nothing fits."""
    try:
        return runner.plan(folder, *settings)
    except NothingFitsError:
        return None


def _grown(key: str, plan: Mapping[str, Any] | None) -> str | None:
    """The largest value of the size ``key`` that fits, as a setting; None if there is none.

    Growing another size may give more parameters, but only models that differ in one size can be compared.
    """
    tried = [one["candidates"] for one in plan["comparisons"] if one["setting"] == f"model.{key}"] if plan else []
    return next((f"model.{key}={one['value']}" for candidates in tried for one in candidates if one["chosen"]), None)


def _planned_notes(rows: Sequence[Planned], runner: Runner) -> Iterator[tuple[str, str]]:
    """What the columns mean, and what does not agree with the paper."""
    hardware = rows[0].plan["hardware"]["name"]
    precision = runner.given("precision") or "float32"
    kept = "all that stages keep for the backward, plus the workspace of one recomputation and one layer"
    yield "planned", f"for {hardware}: bytes follow from shapes, in {precision}; nothing was run"
    yield "planned", f"activations: {kept}"
    yield "planned", "the paper counts 12 bytes a parameter; we count the gradient too: 16 with RMSProp or Adam"
    given = runner.given(_LIMIT)
    limit_bytes = (float(given) if given else load_hardware(hardware).memory_gib or 0.0) * 2**30
    where = f"{hardware} with the given settings" if runner.changed() else "the paper's accelerators"
    unfit = {row.size.name: fullest(row.plan) for row in rows if not row.fits}
    for alone, why in (
        (True, "but only because of gradients, which the paper's 12 bytes a parameter leave out"),
        (False, "because of activations"),
    ):
        names = [name for name, m in unfit.items() if (m["total_bytes"] - m["gradients_bytes"] <= limit_bytes) == alone]
        if names:
            yield "found", f"{', '.join(names)}: by our count too large for {where}, {why}"
    if none := ", ".join(row.size.name for row in rows if row.largest is None):
        yield "found", f"by our count no model of this family fits as {none}, however small"


def _naive_notes(size: Size, rows: Sequence[Naive], unit: str, comparable: bool) -> Iterator[tuple[str, str]]:
    """Which of the assumptions comes closest to the paper's number."""
    each = [(row.name, row.activations) for row in rows]
    each += [(f"{row.name}, one tensor for each product or convolution", row.fused) for row in rows]
    if comparable and each:
        name, found = min(each, key=lambda one: abs(one[1] / BYTES[unit] - size.activations))
        theirs, ours = number(size.activations, 2), number(found / BYTES[unit], 2)
        yield "found", f"the paper's {theirs} {unit} for {size.name} are closest to {name}: {ours} {unit}"


def _trained_notes(rows: Sequence[Trained], wanted: int, runner: Runner) -> Iterator[tuple[str, str]]:
    if len(rows) > 1:
        times = rows[-1].plan["parameters"] / rows[0].plan["parameters"]
        where = "at a desk" if runner.desk else "here"
        yield "found", f"{where} {rows[-1].name} holds {times:.1f} times the parameters of {rows[0].name}"
    if rows:
        exact = sum(row.planned is not None and row.planned == row.counted for row in rows)
        yield "found", f"activations planned and counted are the same to the byte in {exact} of {len(rows)} rows"
    if missing := wanted - len(rows):
        yield "found", f"{missing} of {wanted} rows could not be trained here: no model fits the limit"


# --- the tables


def shown(plan: Mapping[str, Any]) -> str:
    """The size in a model's name: `(18, 48)` of AmoebaNet-D (18, 48), `103` of Transformer-103, of any width."""
    name = str(plan["model_name"])
    return name[name.index("(") :] if "(" in name else name.partition("-")[2].partition(" ")[0]


def fullest(plan: Mapping[str, Any]) -> Mapping[str, int]:
    """The memory of the stage that needs the most, in bytes."""
    return max((stage["memory"] for stage in plan["stages"]), key=lambda memory: int(memory["total_bytes"]))


def planned_tables(rows: Sequence[Planned], unit: str, comparable: bool) -> list[Table]:
    names = Column("", cells=[row.size.name for row in rows])

    def gigabytes(heading: str, *parts: str) -> Column:
        return numbers(f"{heading}, {unit}", "planned", [row.bytes(*parts) / BYTES[unit] for row in rows], 2)

    model = numbers(f"weights, optimizer, {unit}", "paper", [row.size.model for row in rows], 2)
    activations = numbers(f"activations, {unit}", "paper", [row.size.activations for row in rows], 2)
    own_model = gigabytes("weights, optimizer", "weights", "optimizer")
    own_activations = gigabytes("activations", "activations", "workspace")
    percents = [100 * row.plan["parameters"] / row.size.parameters for row in rows]
    whole = numbers("", "paper", [100.0] * len(rows), 1)
    parameters = [
        names,
        Column("size", cells=[row.size.shown for row in rows]),
        counts("parameters", "paper", [round(row.size.parameters) for row in rows]),
        counts("parameters", "planned", [row.plan["parameters"] for row in rows]),
        differences("planned - paper, %", numbers("parameters", "planned", percents, 1), whole, comparable, 1),
    ]
    memory = [
        *(names, model, own_model, gigabytes("and gradients", "weights", "optimizer", "gradients")),
        differences("planned - paper", own_model, model, comparable),
    ]
    peak = [
        *(names, activations, own_activations),
        differences("planned - paper", own_activations, activations, comparable),
        Column("fullest stage", "planned", [size(fullest(row.plan)["total_bytes"]) for row in rows]),
        Column("fits", "planned", ["yes" if row.fits else "no" for row in rows]),
    ]
    return [
        Table("The paper's models: parameters", parameters),
        Table("The paper's models: memory of the parameters, all stages", memory),
        Table("The paper's models: peak of the activations, all stages", peak),
    ]


def naive_tables(size: Size, rows: Sequence[Naive], unit: str, comparable: bool) -> list[Table]:
    """The naive model's activations under what the paper may have used: another precision, a smaller N, a compiler.

    One table, or none if not even one sample fits.
    """
    if not rows:
        return []
    paper = numbers("", "paper", [size.activations] * len(rows), 2)
    kept = numbers("activations", "planned", [row.activations / BYTES[unit] for row in rows], 2)
    fused = numbers("one tensor for each product", "planned", [row.fused / BYTES[unit] for row in rows], 2)
    columns = [
        Column("precision", cells=[row.precision for row in rows]),
        Column("N", cells=[str(row.samples) for row in rows]),
        kept,
        differences("planned - paper", kept, paper, comparable),
        fused,
        differences("one tensor - paper", fused, paper, comparable),
    ]
    open_to = f"by what the paper leaves open (its number is {number(size.activations, 2)})"
    return [Table(f"{size.name}: peak of the activations, {unit}, {open_to}", columns)]


def _times(heading: str, origin: Origin, parameters: Sequence[float | None], base: float | None) -> Column:
    """A column of parameter counts, relative to ``base``."""
    return numbers(heading, origin, [one / base if one is not None and base else None for one in parameters], 1)


def largest_tables(rows: Sequence[Planned], comparable: bool) -> list[Table]:
    """One table, or none if nothing fits at all."""
    parameters = [None if row.largest is None else row.largest["parameters"] for row in rows]
    first = next((at for at, found in enumerate(parameters) if found is not None), None)
    if first is None:
        return []
    theirs = [row.size.parameters for row in rows]
    paper = _times("times", "paper", theirs, theirs[first])
    ours = _times("times", "planned", parameters, parameters[first])
    columns = [
        Column("", cells=[row.size.name for row in rows]),
        counts("parameters", "paper", [round(one) for one in theirs]),
        counts("parameters", "planned", parameters),
        Column("size", "planned", [NONE if row.largest is None else shown(row.largest) for row in rows]),
        *(paper, ours, differences("planned - paper", ours, paper, comparable, 1)),
    ]
    return [Table(f"The largest model that fits, by our count; times: relative to {rows[first].size.name}", columns)]


def trained_tables(sizes: Sequence[Size], rows: Sequence[Trained]) -> list[Table]:
    """One table, or none if nothing fits."""
    if not rows:
        return []
    first, theirs = rows[0], {one.name: one.parameters for one in sizes}
    parameters = [row.plan["parameters"] for row in rows]
    columns = [
        Column("", cells=[row.name for row in rows]),
        Column("size", "planned", [shown(row.plan) for row in rows]),
        counts("parameters", "counted", parameters),
        _times("times", "paper", [theirs.get(row.name) for row in rows], theirs.get(first.name)),
        _times("times", "counted", parameters, parameters[0]),
        Column("fullest stage", "planned", [size(fullest(row.plan)["total_bytes"]) for row in rows]),
        Column("activations", "planned", [NONE if row.planned is None else size(sum(row.planned)) for row in rows]),
        Column("activations", "counted", [NONE if row.counted is None else size(sum(row.counted)) for row in rows]),
        Column("counted - planned", "difference", [_off(row) for row in rows]),
    ]
    limit = size(fullest(first.plan)["limit_bytes"])
    return [Table(f"Trained here: the largest model below {limit} a stage; times: relative to {first.name}", columns)]


def _off(row: Trained) -> str:
    if row.planned is None or row.counted is None:
        return NONE
    off = sum(row.counted) - sum(row.planned)
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"
