"""Throughput over K and M, relative to one cell: the paper's Tables 2 and 3, and Figure 3 of its first versions.

Two kinds of our numbers stand beside the paper's, in separate columns: simulated at the paper's size from the figures
of its hardware, and measured by `gpipe bench` as far as there are devices. One rule of the recipe chooses N for all
cells of a table. Every cell is simulated twice: cut as Lingvo cuts, and by our own partitioner.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final, Self

from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import NONE, Column, Origin, Table
from gpipe_cli.reproduction.runner import THROUGH_HOST, Findings, Runner, differences, number, numbers
from gpipe_cli.units import plural

MEASURED: Final = "measured"  # the status of a row of bench.json, and the origin of a column
IMPOSSIBLE: Final = "impossible"
SIMULATED: Final = "simulated"
SPEED = "speed"  # the quantity of columns whose heading names the source of their numbers


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the paper's table: its throughput relative to the first row's."""

    partitions: int
    micro_batches: int
    paper: float
    name: str = ""  # `pipeline-2`; "" where K and M are name enough
    recompute: str | None = None  # the mode of recomputation; None: the recipe's

    @property
    def cell(self) -> str:
        return f"K = {self.partitions}, M = {self.micro_batches}"


@dataclass(frozen=True, slots=True)
class Model:
    """A table of the paper: one model over K and M."""

    name: str  # name in the paper
    rows: tuple[Row, ...]
    figures: tuple[str, ...]  # the settings that stand for the paper's hardware
    settings: tuple[str, ...] = ()  # a second model's changes to the recipe's settings

    def cells(self, rows: Iterable[int]) -> str:
        return "; ".join(self.rows[at].cell for at in rows)


@dataclass(frozen=True)
class Speed:
    """The result of a row: its speed relative to the first row, or a word that says why there is none."""

    relative: float | None
    word: str = NONE
    reason: str = ""  # why the row is impossible

    @property
    def text(self) -> str:
        return self.word if self.relative is None else number(self.relative, 2)


@dataclass(frozen=True, slots=True)
class Throughput:
    models: tuple[Model, ...]
    slow_links: bool = False  # GPUs exchange tensors through the host's memory; without GPUs nothing is measured

    def reproduce(self, runner: Runner) -> Findings:
        """Run the recipe. A cell that is impossible says so; the others are still measured.

        Raises InputError for bad input, as the commands do, and if the user sets what the rows differ in.
        """
        runner.refuse()
        unfit = self.slow_links and (runner.desk or len(runner.gpus) < 2)
        stages = 0 if unfit else runner.devices  # stages that get a device of their own here; 0: nothing is measured
        tables: list[Table] = []
        notes = list(self._notes(runner, stages))
        for index, model in enumerate(self.models, start=1):
            folder = "" if len(self.models) == 1 else f"{index}_"
            here = runner.with_settings(*model.settings) if model.settings else runner
            paper_size = runner.with_settings(*model.settings, *model.figures)
            measured = _measured(model, here, stages, folder, self.slow_links)
            lingvo = _simulated(model, paper_size, "lingvo", first=not tables and not measured)
            exact = _simulated(model, paper_size, "exact", first=False)
            speeds = {MEASURED: _speeds(model, measured), SIMULATED: _speeds(model, lingvo)}
            tables.append(_table(model, speeds, lingvo, exact, runner))
            notes += _found(model, speeds, runner)
            for kind in sorted({row["kind"] for row in measured.values() if row["kind"]} - {MEASURED}):
                notes.append((MEASURED, f"{model.name}: {speed_kind(kind)}; not the speed of a pipeline"))
        return Findings(tuple(tables), tuple(notes), comparable=not runner.changed())

    def smallest(self) -> Self:
        return replace(self, models=tuple(replace(one, rows=(one.rows[0], one.rows[-1])) for one in self.models))

    def _notes(self, runner: Runner, stages: int) -> Iterator[tuple[str, str]]:
        """Where the numbers of each column come from."""
        if self.slow_links and stages:
            yield MEASURED, f"from GPU to GPU through the host's memory ({THROUGH_HOST}=1)"
        elif self.slow_links:
            yield MEASURED, "nothing: slow links need 2 GPUs or more"
        elif all(model.rows[0].partitions > stages for model in self.models):
            yield MEASURED, f"nothing: only {stages} of K stages would have a device here"
        else:
            most = max(row.partitions for model in self.models for row in model.rows if row.partitions <= stages)
            yield MEASURED, f"up to K = {most}, as far as each stage has a device or a core of its own here"
        for figures in dict.fromkeys(" ".join(model.figures) for model in self.models):
            yield SIMULATED, f"at the paper's size, from the figures of the hardware and not from a run ({figures})"
        yield SIMULATED, "cut by Lingvo's rule (partition.method=lingvo) and exactly, each with the N of its own plan"
        yield SIMULATED, "exact / Lingvo's: samples/s; below 1 where the exact cut sends more (M = 1, or slow links)"
        if runner.desk and stages and not runner.changed():
            yield "difference", "none where measured: the models differ in size"


# --- results: number of a row in the table -> its result, with the keys of a row of bench.json


def _measured(model: Model, runner: Runner, stages: int, folder: str, slow_links: bool) -> dict[int, dict[str, Any]]:
    """Measure the rows whose stages each have a device; each mode of recomputation is a sweep of its own."""
    came: dict[int, dict[str, Any]] = {}
    for mode in dict.fromkeys(row.recompute for row in model.rows):
        wanted = {
            at: {"partitions": row.partitions, "micro_batches": row.micro_batches}
            for at, row in enumerate(model.rows)
            if row.recompute == mode and row.partitions <= stages
        }
        if not wanted:
            continue
        settings = [
            f"{key}={','.join(dict.fromkeys(str(cell[key]) for cell in wanted.values()))}"
            for key in ("partitions", "micro_batches")
        ]
        sweep = f"{folder}measured"
        if mode is not None:
            sweep, settings = f"{sweep}_{mode}", [*settings, f"recompute={mode}"]
        try:
            with _through_host() if slow_links else contextlib.nullcontext():
                rows = runner.bench(sweep, *settings)["rows"]
        except InputError as error:
            if not came:  # nothing was measured yet: bad input
                raise
            rows = [{"settings": {}, "status": IMPOSSIBLE, "reason": str(error), "kind": None}]
        for at, cell in wanted.items():
            row = next(row for row in rows if cell.items() <= {**cell, **row["settings"]}.items())
            came[at] = row | {"sweep": sweep}
    return came


@contextlib.contextmanager
def _through_host() -> Iterator[None]:
    """Make the GPUs of commands exchange tensors through host memory. Commands inherit the environment variable;
    workers inherit that of their fork server, which is therefore restarted."""
    before = os.environ.get(THROUGH_HOST)
    fork_server.kill()
    os.environ[THROUGH_HOST] = "1"
    try:
        yield
    finally:
        fork_server.kill()
        del os.environ[THROUGH_HOST]
        if before is not None:
            os.environ[THROUGH_HOST] = before


def _simulated(model: Model, runner: Runner, method: str, *, first: bool) -> dict[int, dict[str, Any]]:
    """Plan all rows. Raises InputError if the first one is impossible and nothing else has been found (``first``)."""
    runner = runner.without("cost", "executor")  # the user's values are for measurements
    came: dict[int, dict[str, Any]] = {}
    for at, row in enumerate(model.rows):
        one = [f"partitions={row.partitions}", f"micro_batches={row.micro_batches}", f"partition.method={method}"]
        one += [] if row.recompute is None else [f"recompute={row.recompute}"]
        came[at] = {"status": MEASURED, "relative": None, "samples": None, "sweep": method}
        try:
            found = runner.simulated(*one)
            came[at] |= {"relative": found.samples_per_second, "samples": found.samples}
        except NothingFitsError:
            came[at] |= {"status": "no_fit"}
        except InputError as error:
            if at == 0 and first:
                raise
            came[at] |= {"status": IMPOSSIBLE, "reason": str(error)}
    return came


def _speeds(model: Model, came: Mapping[int, Mapping[str, Any]]) -> list[Speed]:
    """The relative speeds of all rows: compared round by round within a sweep, by their medians between sweeps."""

    def speed(at: int) -> Speed:
        if 0 not in came or at not in came:
            return Speed(None)
        one, first = came[at], came[0]
        if one["status"] != MEASURED:
            reason = str(one["reason"] or "") if one["status"] == IMPOSSIBLE else ""
            return Speed(None, one["status"].replace("_", " "), reason)
        key = "relative" if one["sweep"] == first["sweep"] else "samples_per_second"
        return Speed(one[key] / first[key] if first[key] else None)

    return [speed(at) for at in range(len(model.rows))]


# --- the table and what it shows


def _table(
    model: Model,
    speeds: Mapping[str, Sequence[Speed]],
    lingvo: Mapping[int, Mapping[str, Any]],
    exact: Mapping[int, Mapping[str, Any]],
    runner: Runner,
) -> Table:
    """The table of a model, from `speeds` by origin and the plans with either cut, without columns that would be empty
    in every row."""
    rows, comparable = model.rows, not runner.changed()

    def samples(heading: str, plans: Mapping[int, Mapping[str, Any]]) -> Column:
        return numbers(heading, SIMULATED, [plans[at]["samples"] for at in range(len(rows))], 0)

    def relative(heading: str, origin: Origin) -> Column:
        values, cells = [one.relative for one in speeds[origin]], [one.text for one in speeds[origin]]
        return Column(heading, origin, cells, values=values, quantity=SPEED)

    pairs = [(exact[at]["relative"], lingvo[at]["relative"]) for at in range(len(rows))]
    gains = [ours / theirs if ours and theirs else None for ours, theirs in pairs]
    paper = numbers("paper", "paper", [row.paper for row in rows], 2, SPEED)
    simulated, measured = relative("Lingvo's cut", SIMULATED), relative("here", MEASURED)
    columns = [
        *([Column("", cells=[row.name for row in rows])] if any(row.name for row in rows) else []),
        Column("K", cells=[str(row.partitions) for row in rows]),
        Column("M", cells=[str(row.micro_batches) for row in rows]),
        paper,
        samples("N", lingvo),
        simulated,
        differences("Lingvo's cut - paper", simulated, paper, comparable),
        samples("N, exact cut", exact),
        numbers("exact / Lingvo's", SIMULATED, gains, 2),
    ]
    if any(cell != NONE for cell in measured.cells):
        columns.append(measured)
        if not runner.desk:  # a desk's model has another size
            columns.append(differences("here - paper", measured, paper, comparable))
    title = f"{model.name}: throughput relative to {rows[0].name or rows[0].cell} of each column"
    return Table(title, columns)


def _found(model: Model, speeds: Mapping[str, Sequence[Speed]], runner: Runner) -> Iterator[tuple[str, str]]:
    """Notes: the mean difference from the paper without the first row, which is 1 by definition; and the cells without
    a number."""
    pairs = list(zip(speeds[SIMULATED], model.rows, strict=True))[1:]
    off = [abs(ours.relative - row.paper) for ours, row in pairs if ours.relative is not None]
    if off and not runner.changed():
        cells = plural(len(off), "cell")
        yield "found", f"{model.name}, simulated: off from the paper's by {mean(off):.2f} in the mean of {cells}"
    refused = [at for at, speed in enumerate(speeds[MEASURED]) if speed.word != NONE and not speed.reason]
    if refused:
        yield "found", f"{model.name}: could not be measured here: {model.cells(refused)}"
    impossible: dict[str, dict[int, None]] = {}
    for column in speeds.values():
        for at, speed in enumerate(column):
            if speed.reason:
                impossible.setdefault(speed.reason, {})[at] = None
    for reason, rows in impossible.items():
        yield IMPOSSIBLE, f"{model.name}, {model.cells(rows)}: {reason}"
