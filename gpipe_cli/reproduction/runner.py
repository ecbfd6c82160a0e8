"""What experiments share: running `gpipe` commands, reading the files that these write, and comparing numbers.

Each command runs in its own process and prints to a log file, as a recipe runs dozens of commands and prints one
report. A difference from the paper is taken only where data and sizes are the paper's: not at small scale (except in
`breakdown`, whose model the paper does not name), nor where a setting of the user may have changed them.
"""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import IO, Any

from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.schema import quote
from gpipe_cli.config.settings import key_of, only_command_of, overridden_batch_key, settings_not_affecting
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.scale import Scale
from gpipe_cli.reproduction.simulated import Simulate, SimulatedPlan
from gpipe_cli.results.files import RESULT_FILE, read_result
from gpipe_cli.system.gpus import Gpu
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.units import duration

RECIPES_DIR = Path(str(resources.files("gpipe_cli.recipes")))
DISABLE_P2P = "NCCL_P2P_DISABLE"  # environment variable: with 1, NCCL copies between GPUs through host memory
# Settings of groups, and of `gpipe bench`, that leave data and sizes as they are.
_HARMLESS = ("dataset.root", "dataset.cache", "dataset.download", "warm_up_steps", "steps", "rounds")
ROWS_DIFFER = "the rows of this table differ in this setting"
Note = tuple[str, str]  # label, line: what was simulated and from what, what is odd
# Runs a command and writes its output to a file. Raises the command's InputError, or CommandFailedError.
RunCommand = Callable[[Sequence[str], IO[str]], None]


@dataclass(frozen=True)
class Findings:
    """What an experiment found."""

    tables: Sequence[Table]
    notes: Sequence[Note] = ()
    files: Sequence[tuple[str, str]] = ()  # description, path: pictures
    comparable: bool = True  # False: data or sizes are not the paper's, so no difference was taken
    simulates_paper_size: bool = False  # whether simulations have the paper's size at every scale


class CommandFailedError(RuntimeError):
    """A command of the recipe failed, neither because of bad input nor because of Ctrl-C."""


@dataclass
class Runner:
    """What all commands of a recipe share.

    ``settings`` apply to every command: the scale's, then the user's, which win.
    """

    name: str  # the name of the recipe
    folder: Path  # the folder of all runs
    settings: tuple[str, ...]
    run_command: RunCommand
    simulate: Simulate
    progress: Callable[[str], None]  # prints a line for each command
    scale: Scale
    user_settings: tuple[str, ...] = ()  # the part of ``settings`` that the user gave
    machine: Sequence[Gpu] = ()  # the GPUs of this machine
    recipes: Path = RECIPES_DIR  # the folder of the recipe's file
    commands: list[str] = field(default_factory=list)  # all commands run so far, as a user types them

    @property
    def is_small(self) -> bool:
        """Whether the runs are smaller than the paper's."""
        return self.scale != "paper"

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs that commands may use."""
        return () if self.setting_value("device") == "cpu" else self.machine

    @property
    def devices(self) -> int:
        """The number of GPUs, or of cores if there are none: each stage is to have its own."""
        return len(self.gpus) or usable_cores()

    def setting_value(self, key: str) -> str | None:
        """The value that every command gets for the setting `key`; None if ``settings`` has none."""
        return next((setting.partition("=")[2] for setting in self.settings if key_of(setting) == key), None)

    def incomparable_settings(self, *harmless: str) -> tuple[str, ...]:
        """The user's settings that make numbers incomparable with the paper's; ``harmless``: more keys that change
        nothing in this experiment."""
        kept = (*_HARMLESS, *settings_not_affecting(Affects.SCALE), *harmless)
        prefixes = tuple(f"{key}." for key in kept)
        return tuple(setting for setting in self.user_settings if not f"{key_of(setting)}.".startswith(prefixes))

    def with_settings(self, *settings: str) -> "Runner":
        """A copy with ``settings`` instead of the scale's; without any, at the paper's size. The user's still win."""
        return replace(self, settings=add_user_settings(settings, self.user_settings))

    def without(self, *keys: str) -> "Runner":
        """A copy without these settings, the user's included: for commands that choose the values themselves."""
        kept = tuple(setting for setting in self.settings if key_of(setting) not in keys)
        return replace(self, settings=kept)

    def check_not_given(self, reasons: Mapping[str, str]) -> None:
        """Raises InputError for a setting of the user that is a key of ``reasons``."""
        for setting in self.user_settings:
            if (why := reasons.get(key_of(setting))) is not None:
                raise InputError(f"{setting.lstrip('+')}: {why}; remove it")

    def bench(self, name: str, *settings: str) -> dict[str, Any]:
        """Run `gpipe bench -m` over the settings that have several values; returns the content of bench.json.

        If no cell fits the memory, the rows have that status. Raises InputError if all cells are impossible, as then a
        setting that they share is wrong.
        """
        folder = self.folder / name
        try:
            return self._run(["bench", "-m"], folder, "bench.json", *settings)
        except CommandFailedError:
            rows = read_result(folder, "bench.json")["rows"] if (folder / "bench.json").is_file() else []
            statuses = {row["status"] for row in rows}
            if "out_of_memory" in statuses <= {"impossible", "out_of_memory"}:
                return {"rows": rows}
            if statuses != {"impossible"}:
                raise
            shutil.rmtree(folder)  # nothing ran
            raise InputError(rows[0]["reason"]) from None

    def bench_rows(
        self, name: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], *settings: str
    ) -> list[dict[str, Any]]:
        """The results of rows that differ in the settings ``keys`` alone, measured alternately; raises as ``bench``."""
        swept = [f"{key}={','.join(dict.fromkeys(str(row[key]) for row in rows))}" for key in keys]
        results = self.bench(name, *swept, *settings)["rows"]
        cells = [{key: row[key] for key in keys} for row in rows]
        return [next(row for row in results if cell.items() <= {**cell, **row["settings"]}.items()) for cell in cells]

    def plan(self, name: str, *settings: str) -> dict[str, Any]:
        """Run `gpipe plan`; returns the content of plan.json."""
        return self._run(["plan"], self.folder / name, "plan.json", *settings)

    def simulate_plan(self, *settings: str) -> SimulatedPlan:
        """The plan that `gpipe plan` makes of ``settings``, made in this process."""
        given = [
            setting for setting in keep_last((*settings, *self.settings)) if only_command_of(setting) in (None, "plan")
        ]
        self.commands.append(f"gpipe {shlex.join(['plan', '-cd', str(self.recipes), '-cn', self.name, *given])}")
        return self.simulate(given)

    def train(self, name: str, *settings: str) -> dict[str, Any]:
        """Run `gpipe train` into ``folder / name``; returns the content of result.json."""
        return self._run(["train"], self.folder / name, RESULT_FILE, *settings)

    def count_parameters(self, *settings: str) -> int:
        """The parameters of the model that `gpipe train` with ``settings`` alone builds, at the paper's size."""
        counted: int = replace(self, settings=()).train("counted", "dry_run=true", *settings)["model_parameters"]
        return counted

    def evaluate(self, name: str, *settings: str) -> dict[str, Any]:
        """Evaluate the run in ``folder / name`` without training settings; returns the content of evaluate.json."""
        folder = self.folder / name
        self._perform(["evaluate", f"run={quote(folder)}", *settings], folder)
        return read_result(folder, "evaluate.json")

    def _run(self, command: Sequence[str], folder: Path, file: str, *settings: str) -> dict[str, Any]:
        given = [
            setting
            for setting in keep_last((*settings, *self.settings))
            if only_command_of(setting) in (None, command[0])
        ]
        place = f"{'hydra.sweep.dir' if command[0] == 'bench' else 'run_folder'}={quote(folder)}"
        shown = [setting for setting in given if setting not in self.settings]  # those that differ
        arguments = [*command, "-cd", str(self.recipes), "-cn", self.name, *given, place]
        self._perform(arguments, folder, [*command, *shown])
        return read_result(folder, file)

    def _perform(self, arguments: Sequence[str], folder: Path, shown: Sequence[str] = ()) -> None:
        """``folder``: where the command writes its result; ``shown``: what to print instead of all arguments."""
        environment = f"{DISABLE_P2P}=1 " if os.environ.get(DISABLE_P2P) == "1" else ""
        typed = f"{environment}gpipe {shlex.join(arguments)}"
        self.commands.append(typed)
        self.progress(f"runs         {' '.join(shown or arguments)}")
        begin = time.monotonic()
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"\n$ {typed}\n")
            log.flush()
            try:
                self.run_command(arguments, log)
            except CommandFailedError as error:
                reason = _failure(folder) or error
                raise CommandFailedError(f"{reason}; its output is in {self.folder / LOG}") from error
        self.progress(f"             {duration(time.monotonic() - begin)}")


def keep_last(settings: Sequence[str]) -> tuple[str, ...]:
    """One value for each setting, as Hydra refuses two: the last value, at the place of the first."""
    return tuple({key_of(setting): setting for setting in settings}.values())


def add_user_settings(settings: Sequence[str], user_settings: Sequence[str]) -> tuple[str, ...]:
    """A recipe's ``settings`` and the user's, which win.

    As in the commands, whichever of `batch_size` and `batch_tokens` the user gives replaces the other.
    """
    given = {key_of(setting): value for setting in user_settings if (value := setting.partition("=")[2]) != "null"}
    return keep_last(
        (*(setting for setting in settings if key_of(setting) != overridden_batch_key(given)), *user_settings)
    )


def _failure(folder: Path) -> str:
    """Why a run (result.json) or the first failed row of a sweep (bench.json) failed; "" if neither file has it."""
    try:
        if (folder / RESULT_FILE).is_file():
            return str(read_result(folder, RESULT_FILE).get("error") or "")
        rows = read_result(folder, "bench.json")["rows"]
    except (OSError, ValueError):  # the command failed before it wrote anything
        return ""
    return next((str(row["reason"] or "") for row in rows if row["status"] == "failed"), "")
