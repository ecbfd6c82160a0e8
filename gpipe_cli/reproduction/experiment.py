"""What a recipe runs and shows, as its file describes it: runs, the rows and columns of its tables, and its notes.

A run is made once, or once for each row of the tables. `presentation` makes tables and notes of the results, and a
function of `computed` may add to them what no command computes.
"""

import contextlib
import os
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, Literal

from gpipe_cli.config.settings import key_of
from gpipe_cli.errors import InputError, NothingFitsError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.presentation import EVERY_SCALE, ColumnSpec, Note, Values, fill_template, make_table
from gpipe_cli.reproduction.recipe_functions import COMPUTED, IMPOSSIBLE
from gpipe_cli.reproduction.runner import DISABLE_P2P, Findings, Runner, Scale, keep_last

UNKNOWN = dict.fromkeys(("samples", "samples_per_second"))  # what an impossible plan lacks


@dataclass(frozen=True, slots=True)
class Run:
    """A command that is run once, or for each row of a table."""

    name: str  # the key of its result
    command: Literal["train", "evaluate", "bench", "plan", "simulated"]  # simulated: a plan made in this process
    each_row: bool = False
    sweep: tuple[str, ...] = ()  # rows that differ in these settings alone are measured alternately
    settings: tuple[str, ...] = ()  # templates; those whose value is missing are left out
    small: tuple[str, ...] = ()  # settings added at scale=small and scale=smoke
    smoke: tuple[str, ...] = ()  # settings added at scale=smoke
    folder: tuple[str, ...] = ()  # templates, joined by `_`, without those whose value is missing; (): the name
    scales: tuple[Scale, ...] = EVERY_SCALE
    unless_given: str | None = None  # is not run if the user gives this setting
    paper_size: bool = False  # without the scale's settings, which make models smaller
    alone: bool = False  # without any settings of the scale or the user
    without: tuple[str, ...] = ()  # settings that do not go to this command, the user's included
    slow_links: bool = False  # GPUs exchange tensors through the host's memory; without GPUs nothing is measured
    last_table: bool = False  # of the tables whose rows have enough devices here, only the last is measured

    def is_wanted(self, runner: Runner) -> bool:
        given = self.unless_given is not None and runner.setting_value(self.unless_given) is not None
        return runner.scale in self.scales and not given

    def result(self, settings: Sequence[str], values: Values, runner: Runner) -> dict[str, Any]:
        """Run the command with ``settings`` and its own; ``values``: those that templates name."""
        if self.paper_size:
            runner = runner.with_settings()
        if self.alone:
            runner = replace(runner, settings=())
        templates = (
            *self.settings,
            *(self.small if runner.is_small else ()),
            *(self.smoke if runner.scale == "smoke" else ()),
        )
        filled_in = [text for template in templates if (text := fill_template(template, values)) is not None]
        settings = keep_last((*settings, *filled_in))
        runner = runner.without(*self.without)
        if self.command == "simulated":
            plan = runner.simulate_plan(*settings)
            return {"samples": plan.samples, "samples_per_second": plan.samples_per_second}
        folder = "_".join(text for part in self.folder or (self.name,) if (text := fill_template(part, values)))
        with _exchange_through_host() if self.slow_links else contextlib.nullcontext():
            result: dict[str, Any] = getattr(runner, self.command)(folder, *settings)
        if self.command == "bench" and not self.each_row:
            (result,) = result["rows"]
        return {**result, "folder": str(runner.folder / folder)}

    def devices(self, runner: Runner) -> int:
        """The number of devices on which rows are measured."""
        return 0 if self.slow_links and (runner.is_small or len(runner.gpus) < 2) else runner.devices


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table, or a table for each member of a list. Its rows have values, such as the paper's, or are
    computed; without rows it is left out."""

    title: str
    rows: tuple[dict[str, Any], ...] = ()
    rows_from: str | None = None  # the key of rows that are computed
    each: str | None = None  # the key of a list, whose members have the key `rows_from`
    columns: tuple[ColumnSpec, ...] = ()  # (): the experiment's
    name: str | None = None
    settings: tuple[str, ...] = ()  # settings of all its runs
    at_small: tuple[int, ...] | None = None  # the numbers of the rows at scale=small, from 0; None: all
    at_smoke: tuple[int, ...] | None = None  # those at scale=smoke; None: as at scale=small

    def at(self, scale: Scale) -> list[dict[str, Any]]:
        small = None if scale == "paper" else self.at_small
        chosen = small if scale != "smoke" or self.at_smoke is None else self.at_smoke
        return [dict(self.rows[at]) for at in (range(len(self.rows)) if chosen is None else chosen)]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a recipe runs and shows. Values of the runs, rows and tables are found by keys; see `presentation`."""

    tables: tuple[TableSpec, ...]
    runs: tuple[Run, ...] = ()
    columns: tuple[ColumnSpec, ...] = ()  # columns of the tables without columns
    notes: tuple[Note, ...] = ()
    varied: tuple[str, ...] = ()  # the keys of rows that are settings: `partitions`
    refused: dict[str, str] | None = None  # settings that the user cannot give, and why
    required: dict[str, str] | None = None  # settings that the user has to give at the paper's scale, and why
    values: dict[str, Any] | None = None  # further values that keys may name
    computes: str | None = None  # the function of `computed` that adds to the results
    compared_at: tuple[Scale, ...] = EVERY_SCALE  # the scales at which differences are taken
    harmless: tuple[str, ...] = ()  # settings that change no number of the recipe

    def reproduce(self, runner: Runner) -> Findings:
        """Run everything. Raises InputError for bad input, as the commands do, and for a setting that the tables do
        not allow."""
        if self.computes is not None and self.computes not in COMPUTED:
            raise InputError(f"computes: {self.computes}: no such function; choose {', '.join(COMPUTED)}")
        shown = [table for table in self.tables if table.at(runner.scale)]
        tables: list[dict[str, Any]] = [
            {"name": table.name, "settings": table.settings, "rows": table.at(runner.scale),
             "number": number if len(self.tables) > 1 else None}
            for number, table in enumerate(shown, start=1)
        ]  # fmt: skip
        runner = self._apply_required(runner, [row for table in tables for row in table["rows"]])
        results: dict[str, Any] = {**(self.values or {}), "tables": tables, "folder": runner.folder}
        results["comparable"] = runner.scale in self.compared_at and not runner.incomparable_settings(*self.harmless)
        for each_row, group in groupby(self.runs, lambda run: run.each_row):
            runs = [run for run in group if run.is_wanted(runner)]
            if each_row:
                self._run_rows(runs, results, runner)
            else:
                for run in runs:
                    results[run.name] = run.result((), results, runner)
        files = COMPUTED[self.computes](results, runner) if self.computes is not None else ()
        filled_tables = tuple(self._tables(results, runner.scale))
        notes = tuple(line for note in self.notes for line in note.lines(results))
        return Findings(filled_tables, notes, files, results["comparable"])

    def _tables(self, results: dict[str, Any], scale: Scale) -> Iterator[Table]:
        with_rows = iter(results["tables"])
        for each, group in groupby(self.tables, lambda table: table.each):
            for member, table in product(results[each] if each is not None else [{}], [*group]):
                values = next(with_rows) if table.at(scale) else member
                members = ChainMap(values, results).get(table.rows_from or "rows", ())
                rows = [ChainMap(row, values, results) for row in members]
                columns = [column for column in table.columns or self.columns if scale in column.scales]
                if rows:
                    yield make_table(table.title, columns, rows, results["comparable"])

    def _apply_required(self, runner: Runner, rows: Sequence[Values]) -> Runner:
        """The runner without required settings that are given as null. Raises InputError for a refused setting, and at
        the paper's scale for a required setting that is missing."""
        for setting in runner.user_settings:
            key = key_of(setting)
            if self.refused is not None and key in self.refused:
                values = [*dict.fromkeys(str(row[key]) for row in rows if key in row)]
                why = self.refused[key].format(values=", ".join(values), last=values[-1] if values else "")
                raise InputError(f"{setting.lstrip('+')}: {why}; remove it")
        missing = {
            key: why for key, why in (self.required or {}).items() if runner.setting_value(key) in (None, "null")
        }
        for key, why in missing.items():
            if not runner.is_small:
                raise InputError(f"{key}=null: {why}")
        return runner.without(*missing)

    def _run_rows(self, runs: Sequence[Run], results: dict[str, Any], runner: Runner) -> None:
        """Run the rows that have settings, table by table."""
        tables = [table for table in results["tables"] if table["rows"][0].keys() & {*self.varied}]
        for table, run in product(tables, runs):
            if run.command != "bench":
                for row in table["rows"]:
                    row[run.name] = self._row_result(run, row, table, results, runner)
                continue
            results["devices"] = run.devices(runner)
            fitting = [other for other in tables if _devices(other["rows"][0]) <= results["devices"]]
            if not run.last_table or table in fitting[-1:]:
                self._measure(run, table, results, runner)

    def _settings(self, row: Values, *without: str) -> list[str]:
        keys = [key for key in self.varied if row.get(key) is not None and key not in without]
        return [f"{key}={row[key]}" for key in keys]

    def _row_result(
        self, run: Run, row: dict[str, Any], table: Values, results: Values, runner: Runner
    ) -> dict[str, Any]:
        settings = *self._settings(row), *table["settings"]
        try:
            return run.result(settings, ChainMap(row, {**table}, {**results}), runner)
        except NothingFitsError:
            if run.command != "simulated":
                raise
            return {**UNKNOWN, "status": "no fit"}
        except InputError as error:
            if run.command != "simulated" or not self._has_results(results):
                raise
            return {**UNKNOWN, "status": IMPOSSIBLE, "reason": str(error)}

    def _measure(self, run: Run, table: Values, results: Values, runner: Runner) -> None:
        """Measure the rows whose stages each have a device. Rows that differ in the settings of the sweep alone are a
        sweep; the results of an impossible sweep have the reason."""
        sweeps: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in table["rows"]:
            if _devices(row) <= results["devices"]:
                sweeps.setdefault((*self._settings(row, *run.sweep),), []).append(row)
        for fixed, rows in sweeps.items():
            swept = [f"{key}={','.join(dict.fromkeys(str(row[key]) for row in rows))}" for key in run.sweep]
            settings = *swept, *fixed, *table["settings"]
            try:
                measured = run.result(settings, ChainMap(rows[0], {**table}, {**results}), runner)["rows"]
            except InputError as error:
                if not self._has_results(results):
                    raise
                measured = [{**UNKNOWN, "settings": {}, "status": IMPOSSIBLE, "reason": str(error), "kind": None}]
            for row in rows:
                cell = {key: row[key] for key in run.sweep}
                result = next(each for each in measured if cell.items() <= {**cell, **each["settings"]}.items())
                row[run.name] = {**result, "sweep": fixed}

    def _has_results(self, results: Values) -> bool:
        return any(run.name in row for run in self.runs for table in results["tables"] for row in table["rows"])


def _devices(row: Values) -> int:
    """The number of devices that a row needs, to have a device for each process."""
    return int(row.get("partitions", 1)) // int(row.get("stages_per_process", 1))


@contextlib.contextmanager
def _exchange_through_host() -> Iterator[None]:
    """Make the GPUs of commands exchange tensors through host memory. Commands inherit the environment variable;
    workers inherit their fork server's, which is therefore restarted."""
    before = os.environ.get(DISABLE_P2P)
    fork_server.kill()
    os.environ[DISABLE_P2P] = "1"
    try:
        yield
    finally:
        fork_server.kill()
        del os.environ[DISABLE_P2P]
        if before is not None:
            os.environ[DISABLE_P2P] = before
