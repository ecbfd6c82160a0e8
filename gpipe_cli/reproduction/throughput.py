"""Speed over K and M, relative to one cell: the paper's tables 2 and 3, and figure 3 of its first versions.

Three kinds of numbers of our own stand beside the paper's, each in its column: what `gpipe bench` measured as far as
there are devices; what is simulated from the seconds of layers that were timed here, as if every stage had a device;
and what is simulated at the paper's size from the figures of the paper's hardware.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NO_DIFFERENCES, NONE, differences, number
from gpipe_cli.reproduction.runner import THROUGH_HOST, Findings, Runner, gpus
from gpipe_cli.units import plural

_OWN = ("partitions", "micro_batches", "recompute")  # what rows differ in
_DOES_NOT_FIT = "no fit"
IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the paper: speed relative to the first row's."""

    partitions: int
    micro_batches: int
    paper: float
    torchgpipe: float | None = None
    name: str = ""  # `pipeline-2`; "" where K and M say it
    recompute: str | None = None  # None: as the recipe says


@dataclass(frozen=True, slots=True)
class Model:
    """A table: one model over K and M."""

    name: str  # as the paper writes it
    rows: tuple[Row, ...]
    figures: tuple[str, ...]  # settings: the paper's hardware
    settings: tuple[str, ...] = ()  # of a second model, beside the recipe's
    desk: tuple[str, ...] = ()  # in place of the recipe's settings for a desk; (): those


@dataclass(frozen=True)
class Speed:
    """The result of a row: its speed relative to the first row, or a word that says why there is none."""

    relative: float | None
    word: str = NONE
    reason: str = ""  # why it is impossible

    @property
    def text(self) -> str:
        return self.word if self.relative is None else number(self.relative, 2)


@dataclass(frozen=True, slots=True)
class Throughput:
    models: tuple[Model, ...]
    slow_links: bool = False  # measured through the host's memory, or not at all


def reproduce(what: Throughput, runner: Runner) -> Findings:
    """Runs the recipe. A cell that is impossible says so, and what was measured stays.

    Raises ValueError as the commands do for bad input, and for a setting that the rows differ in.
    """
    runner.refuse(*_OWN)
    stages, comparable = _stages(runner, what.slow_links), not runner.changed()
    tables: list[Table] = []
    notes: list[tuple[str, str]] = []
    for index, model in enumerate(what.models):
        folder = "" if len(what.models) == 1 else f"{index + 1}_"
        here = runner
        if runner.desk and model.desk:
            here = runner.with_settings(*model.desk)
        elif model.settings and not runner.desk:
            here = runner.with_settings(*model.settings)
        measured, kinds = _measured(model, here, stages, folder, what.slow_links)
        nothing = not tables and not _any(measured)
        timed, samples = _simulated(model, here, f"{folder}layers", _of_layers(here), nothing)
        paper_size = runner.with_settings(*model.settings, *model.figures)
        nothing = nothing and not _any(timed)
        figured, paper_samples = _simulated(model, paper_size, f"{folder}figures", ("cost=figures",), nothing)
        sizes = f"N = {_samples(samples)} here, N = {_samples(paper_samples)} at the paper's size"
        tables.append(throughput_table(model, measured, timed, figured, sizes, desk=runner.desk, comparable=comparable))
        notes += found(model, measured, timed, figured, comparable)
        for kind in sorted(kinds - {"measured"}):
            notes.append(("measured", f"{model.name}: {speed_kind(kind)}; not the speed of a pipeline"))
    return Findings(tuple(tables), (*_notes(what, runner, stages), *notes))


def _stages(runner: Runner, slow_links: bool) -> int:
    """The most stages that get a device, or a core, of their own here; 0: nothing is measured."""
    gpus = _gpu_bytes(runner)
    if slow_links and (runner.desk or len(gpus) < 2):
        return 0
    cores = hardware((), 1)["cores"]
    assert isinstance(cores, int)
    return len(gpus) or cores


def _gpu_bytes(runner: Runner) -> list[int]:
    """Of each GPU that may be used."""
    return [] if runner.given("device") == "cpu" else [gpu.memory_bytes for gpu in gpus()]


def _measured(model: Model, runner: Runner, stages: int, folder: str, slow_links: bool) -> tuple[list[Speed], set[str]]:
    """Of each row, and of what kind the measurements were; rows that recompute differently need a sweep each."""
    came: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for mode in dict.fromkeys(row.recompute for row in model.rows):
        wanted = [at for at, row in enumerate(model.rows) if row.recompute == mode and row.partitions <= stages]
        if not wanted:
            continue
        settings = [
            f"partitions={_several(model.rows[at].partitions for at in wanted)}",
            f"micro_batches={_several(model.rows[at].micro_batches for at in wanted)}",
            *([] if mode is None else [f"recompute={mode}"]),
        ]
        sweep = f"{folder}measured{'' if mode is None else f'_{mode}'}"
        try:
            with _through_host() if slow_links else contextlib.nullcontext():
                rows = runner.bench(sweep, *settings)["rows"]
        except ValueError as error:
            if not came:  # nothing was measured yet: bad input
                raise
            rows = [{"settings": {}, "status": IMPOSSIBLE, "reason": str(error), "kind": None}]
        for at in wanted:
            cells = {"partitions": model.rows[at].partitions, "micro_batches": model.rows[at].micro_batches}
            came[at] = sweep, next(r for r in rows if cells.items() <= {**cells, **r["settings"]}.items())
    kinds = {str(row["kind"]) for _, row in came.values()}
    if 0 not in came:
        return [Speed(None)] * len(model.rows), kinds
    return [_relative(came.get(at), came[0]) for at in range(len(model.rows))], kinds


def _relative(one: tuple[str, Mapping[str, Any]] | None, first: tuple[str, Mapping[str, Any]]) -> Speed:
    """Within a sweep the rounds are compared one by one; between two sweeps their medians are."""
    if one is None:
        return Speed(None)
    status = str(one[1]["status"])
    if status != "measured":
        reason = str(one[1]["reason"] or "") if status == IMPOSSIBLE else ""
        return Speed(None, status.replace("_", " "), reason)
    key = "relative" if one[0] == first[0] else "samples_per_second"
    base = first[1][key]
    return Speed(one[1][key] / base if base else None)


def _of_layers(runner: Runner) -> tuple[str, ...]:
    """Settings of a plan from timed layers, each stage with a device of its own.

    One process times the layers, alone: more of them than there are cores would slow each other down. The name of a
    hardware says that the stages are not those that are here; none of its figures enters but the memory.
    """
    gpus = _gpu_bytes(runner)
    machine = ("hardware=h200", f"hardware.memory_gib={min(gpus) / 2**30:.1f}") if gpus else ("hardware=cpu",)
    return "cost=measured", "executor=in_process", *machine


def _simulated(
    model: Model, runner: Runner, folder: str, settings: tuple[str, ...], nothing: bool
) -> tuple[list[Speed], float | None]:
    """Of each row, and the samples of a mini-batch: None if no row is possible.

    Raises ValueError if not even the first row is, and ``nothing`` else has been found that would be lost.
    """
    runner = runner.without("cost", "executor")  # the user's are for what is measured
    planned: list[Mapping[str, Any] | Speed] = []
    for at, row in enumerate(model.rows):
        one = [f"partitions={row.partitions}", f"micro_batches={row.micro_batches}"]
        one += [] if row.recompute is None else [f"recompute={row.recompute}"]
        try:
            planned.append(runner.plan(f"{folder}_{at + 1}", *settings, *one))
        except NothingFitsError:
            planned.append(Speed(None, _DOES_NOT_FIT))
        except ValueError as error:
            if at == 0 and nothing:
                raise
            planned.append(Speed(None, IMPOSSIBLE, str(error)))
    first = planned[0]
    base = None if isinstance(first, Speed) else first["samples_per_second"]
    speeds = [
        one if isinstance(one, Speed) else Speed(one["samples_per_second"] / base if base else None) for one in planned
    ]
    return speeds, next((float(one["step_samples"]) for one in planned if not isinstance(one, Speed)), None)


def _any(speeds: Sequence[Speed]) -> bool:
    return any(speed.relative is not None for speed in speeds)


def _samples(samples: float | None) -> str:
    return NONE if samples is None else f"{samples:g}"


def _notes(what: Throughput, runner: Runner, stages: int) -> Iterator[tuple[str, str]]:
    """Where the numbers of each column come from."""
    if what.slow_links and stages:
        yield "measured", f"from GPU to GPU through the host's memory ({THROUGH_HOST}=1)"
    elif what.slow_links:
        yield "measured", "nothing: slow links need 2 GPUs or more"
    elif all(row.partitions > stages for model in what.models for row in model.rows[:1]):
        yield "measured", f"nothing: only {stages} of K stages would have a device here"
    else:
        yield "measured", f"as far as each stage has a device or a core of its own here, which is K = {stages}"
    here = "at the desk's size" if runner.desk else "at the paper's size"
    yield (
        "simulated",
        f"layers: from layers timed on this machine, {here}; each stage has a device, links cost nothing",
    )
    for figures in dict.fromkeys(model.figures for model in what.models):
        yield "simulated", f"full size: the paper's, from figures, not from anything that was run ({' '.join(figures)})"
    if runner.changed():
        yield NO_DIFFERENCES
    elif runner.desk and stages:
        yield "difference", "none where measured: the models differ in size"


def _several(values: Iterator[int]) -> str:
    """`1,4,32`."""
    return ",".join(str(value) for value in dict.fromkeys(values))


@contextlib.contextmanager
def _through_host() -> Iterator[None]:
    """Around commands whose GPUs are not to reach each other directly: children inherit the environment."""
    before = os.environ.get(THROUGH_HOST)
    os.environ[THROUGH_HOST] = "1"
    try:
        yield
    finally:
        del os.environ[THROUGH_HOST]
        if before is not None:
            os.environ[THROUGH_HOST] = before


# --- the table and what it shows


def throughput_table(
    model: Model,
    measured: Sequence[Speed],
    timed: Sequence[Speed],
    figured: Sequence[Speed],
    sizes: str,
    *,
    desk: bool,
    comparable: bool,
) -> Table:
    """A row for each of the paper's numbers. Columns without any number are left out.

    Args:
        sizes: the samples of a mini-batch, in words.
        desk: what is measured is of another size than the paper's.
        comparable: what is simulated at the paper's size is of that size.
    """
    rows, paper = model.rows, [row.paper for row in model.rows]
    columns = [
        Column("", cells=[row.name for row in rows]),
        Column("K", cells=[str(row.partitions) for row in rows]),
        Column("M", cells=[str(row.micro_batches) for row in rows]),
        Column("paper", "paper", [number(row.paper, 2) for row in rows]),
        Column("torchgpipe", "torchgpipe", [number(row.torchgpipe, 2) for row in rows]),
        Column("here", "measured", [speed.text for speed in measured]),
        Column("layers", "simulated", [speed.text for speed in timed]),
        Column("full size", "simulated", [speed.text for speed in figured]),
        differences("here - paper", [speed.relative for speed in measured], paper, comparable and not desk),
        differences("full size - paper", [speed.relative for speed in figured], paper, comparable),
    ]
    left_out = {
        "": not any(row.name for row in rows),
        "torchgpipe": all(row.torchgpipe is None for row in rows),
        "here - paper": all(speed.text == NONE for speed in measured),
    }
    base = rows[0].name or cell(rows[0])
    title = f"{model.name}: throughput relative to {base} of each column; {sizes}"
    return Table(title, [column for column in columns if not left_out.get(column.heading)])


def found(
    model: Model, measured: Sequence[Speed], timed: Sequence[Speed], figured: Sequence[Speed], comparable: bool
) -> Iterator[tuple[str, str]]:
    """Notes: how far from the paper, where the first row is 1 everywhere and does not count; and which cells have no
    number."""
    rows = range(1, len(model.rows))
    for whose in ("paper", "torchgpipe") if comparable else ():
        off = [
            abs(ours - theirs)
            for at in rows
            if (ours := figured[at].relative) is not None and (theirs := getattr(model.rows[at], whose)) is not None
        ]
        if off:
            yield (
                "found",
                f"{model.name}, simulated at the paper's size: off from {_possessive(whose)} by {mean(off):.2f} in the "
                f"mean of {plural(len(off), 'cell')}",
            )
    worded = [at for at, speed in enumerate(measured) if speed.relative is None and speed.word != NONE]
    refused = [at for at in worded if not measured[at].reason]
    if refused:
        yield "found", f"{model.name}: not to be measured here: {_cells(model, refused)}"
    impossible: dict[str, dict[int, None]] = {}
    for column in (measured, timed, figured):
        for at, speed in enumerate(column):
            if speed.reason:
                impossible.setdefault(speed.reason, {})[at] = None
    for reason, cells in impossible.items():
        yield IMPOSSIBLE, f"{model.name}, {_cells(model, cells)}: {reason}"


def cell(row: Row) -> str:
    return f"K = {row.partitions}, M = {row.micro_batches}"


def _cells(model: Model, rows: Iterable[int]) -> str:
    return "; ".join(cell(model.rows[at]) for at in rows)


def _possessive(whose: str) -> str:
    return "the paper's" if whose == "paper" else f"{whose}'s"
