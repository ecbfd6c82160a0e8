"""Speed over K and M, relative to one cell: the paper's tables 2 and 3, and figure 3 of its first versions.

Three kinds of numbers of our own stand beside the paper's, each in its column: what `gpipe bench` measured as far as
there are devices; what is simulated from the seconds of layers that were timed here, as if every stage had a device;
and what is simulated at the paper's size from the figures of the paper's hardware.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from gpipe_cli.reporting.measurement import hardware
from gpipe_cli.reporting.recipe_report import Column, Table
from gpipe_cli.reporting.units import plural
from gpipe_cli.reproduction.numbers import NONE, difference, number
from gpipe_cli.reproduction.runner import THROUGH_HOST, Findings, Runner, gpus

_OWN = ("partitions", "micro_batches", "recompute")  # what rows differ in
_DOES_NOT_FIT = "no fit"


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


@dataclass(frozen=True, slots=True)
class Throughput:
    models: tuple[Model, ...]
    slow_links: bool = False  # measured through the host's memory, or not at all


@dataclass(frozen=True)
class _Speed:
    """What came out for a row: relative to the first row, or a word in its place."""

    relative: float | None
    word: str = NONE

    @property
    def text(self) -> str:
        return self.word if self.relative is None else number(self.relative, 2)


def reproduce(what: Throughput, runner: Runner) -> Findings:
    """Runs the recipe. Raises ValueError for a setting that the rows differ in."""
    for key in _OWN:
        if (value := runner.given(key)) is not None:
            raise ValueError(f"{key}={value}: is what the rows of this table differ in; leave it out")
    stages = _stages(runner, what.slow_links)
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
        timed, samples = _simulated(model, here, f"{folder}layers", _of_layers(here))
        paper_size = runner.with_settings(*model.settings, *model.figures)
        figured, paper_samples = _simulated(model, paper_size, f"{folder}figures", ("cost=figures",))
        tables.append(_table(model, runner.desk, measured, timed, figured, samples, paper_samples))
        notes += _found(model, measured, figured)
        if "measured_one_device" in kinds:
            notes.append(("measured", f"{model.name}: stages shared a device or cores: not the speed of a pipeline"))
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


def _measured(
    model: Model, runner: Runner, stages: int, folder: str, slow_links: bool
) -> tuple[list[_Speed], set[str]]:
    """Of each row, and of what kind the measurements were; rows that recompute differently need a sweep each."""
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
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
        with _through_host() if slow_links else contextlib.nullcontext():
            rows = runner.bench(sweep, *settings)["rows"]
        for at in wanted:
            cells = {"partitions": model.rows[at].partitions, "micro_batches": model.rows[at].micro_batches}
            found[at] = sweep, next(r for r in rows if cells.items() <= {**cells, **r["settings"]}.items())
    kinds = {str(row["kind"]) for _, row in found.values()}
    if 0 not in found:
        return [_Speed(None)] * len(model.rows), kinds
    return [_relative(found.get(at), found[0]) for at in range(len(model.rows))], kinds


def _relative(one: tuple[str, Mapping[str, Any]] | None, first: tuple[str, Mapping[str, Any]]) -> _Speed:
    """Within a sweep the rounds are compared one by one; between two sweeps their medians are."""
    if one is None:
        return _Speed(None)
    if one[1]["status"] != "measured":
        return _Speed(None, str(one[1]["status"]).replace("_", " "))
    key = "relative" if one[0] == first[0] else "samples_per_second"
    base = first[1][key]
    return _Speed(one[1][key] / base if base else None)


def _of_layers(runner: Runner) -> tuple[str, ...]:
    """Settings of a plan from timed layers, each stage with a device of its own.

    One process times the layers, alone: more of them than there are cores would slow each other down. The name of a
    hardware says that the stages are not those that are here; none of its figures enters but the memory.
    """
    gpus = _gpu_bytes(runner)
    machine = ("hardware=h200", f"hardware.memory_gib={min(gpus) / 2**30:.1f}") if gpus else ("hardware=cpu",)
    return "cost=measured", "executor=in_process", *machine


def _simulated(model: Model, runner: Runner, folder: str, settings: tuple[str, ...]) -> tuple[list[_Speed], float]:
    """Of each row, and the samples of a mini-batch."""
    speeds: list[float | None] = []
    samples = 0.0
    for at, row in enumerate(model.rows):
        cell = [f"partitions={row.partitions}", f"micro_batches={row.micro_batches}"]
        cell += [] if row.recompute is None else [f"recompute={row.recompute}"]
        try:
            planned = runner.plan(f"{folder}_{at + 1}", *settings, *cell)
        except ValueError as error:
            if "hardware.memory_gib" not in str(error):
                raise
            speeds.append(None)
        else:
            speeds.append(planned["samples_per_second"])
            samples = planned["step_samples"]
    first = speeds[0]
    words = [_DOES_NOT_FIT if speed is None else NONE for speed in speeds]
    relative = [speed / first if speed and first else None for speed in speeds]
    return [_Speed(speed, word) for speed, word in zip(relative, words, strict=True)], samples


def _table(
    model: Model,
    desk: bool,
    measured: list[_Speed],
    timed: list[_Speed],
    figured: list[_Speed],
    samples: float,
    paper_samples: float,
) -> Table:
    """A row for each of the paper's numbers. What nobody has is no column."""
    named = any(row.name for row in model.rows)
    peers = any(row.torchgpipe is not None for row in model.rows)
    any_measured = any(speed.text != NONE for speed in measured)
    columns = [
        *([Column("")] if named else []),
        Column("K"),
        Column("M"),
        Column("paper", "paper"),
        *([Column("torchgpipe", "torchgpipe")] if peers else []),
        Column("here", "measured"),
        Column("layers", "simulated"),
        Column("full size", "simulated"),
        *([Column("here - paper", "difference")] if any_measured else []),
        Column("full size - paper", "difference"),
    ]
    rows = []
    for at, row in enumerate(model.rows):
        rows.append(
            (
                *([row.name] if named else []),
                str(row.partitions),
                str(row.micro_batches),
                number(row.paper, 2),
                *([number(row.torchgpipe, 2)] if peers else []),
                measured[at].text,
                timed[at].text,
                figured[at].text,
                *([difference(measured[at].relative, row.paper, desk)] if any_measured else []),
                difference(figured[at].relative, row.paper, False),
            )
        )
    first = model.rows[0]
    base = first.name or f"K = {first.partitions}, M = {first.micro_batches}"
    sizes = f"N = {samples:g} here, N = {paper_samples:g} at the paper's size"
    return Table(f"{model.name}: throughput relative to {base} of each column; {sizes}", tuple(columns), tuple(rows))


def _notes(what: Throughput, runner: Runner, stages: int) -> Iterator[tuple[str, str]]:
    """What is behind each column."""
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
    yield from runner.users_note()
    if runner.desk and stages:
        yield "difference", "none where measured: the models differ in size"


def _found(model: Model, measured: list[_Speed], figured: list[_Speed]) -> Iterator[tuple[str, str]]:
    """How far from the paper; the first row is 1 everywhere and does not count."""
    rows = range(1, len(model.rows))
    for whose in ("paper", "torchgpipe"):
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
    refused = [at for at, speed in enumerate(measured) if speed.relative is None and speed.word != NONE]
    if refused:
        cells = ", ".join(f"K = {model.rows[at].partitions}, M = {model.rows[at].micro_batches}" for at in refused)
        yield "found", f"{model.name}: not to be measured here: {cells}"


def _possessive(whose: str) -> str:
    return "the paper's" if whose == "paper" else f"{whose}'s"


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
