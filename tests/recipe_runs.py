"""Recipes for the tests of `gpipe_cli.reproduction`: their commands run in this process, or a formula answers them."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from gpipe_cli.commands.command_runner import run_command
from gpipe_cli.commands.recipe_run import make_recipe_simulator
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import CommandFailedError, Findings, Runner
from gpipe_cli.reproduction.scale import Scale

# All stages in one process, and no timing of the machine; and the images of any recipe, tiny.
HERE = ("executor=in_process", "device=cpu", "threads=1", "data_workers=0", "hardware=cpu")
TINY = ("model.normal_cells=3", "model.filters=4", "dataset.image_size=16", "batch_size=16", *HERE)
# (command, settings, folder) -> the file that it writes, and what is in it; or the error that it ends with
Answer = Callable[[str, Mapping[str, str], Path], tuple[str, dict[str, Any]]]


def experiment(name: str, **values: Any) -> Callable[[Runner], Findings]:
    """What the recipe ``name`` runs and shows, with other ``values``."""
    return read_recipe(name).experiment_function(**values)


def perform(arguments: Sequence[str], log: IO[str]) -> None:
    """As `gpipe reproduce` runs a command, without a process of its own."""
    with contextlib.redirect_stdout(log):
        code = run_command(arguments[0], arguments[1:])
    if code != 0:
        raise CommandFailedError(f"exit code {code}")


def real_runner(name: str, folder: Path, *settings: str) -> Runner:
    """Of the recipe ``name`` at small scale, with these settings for every command."""
    folder.mkdir(parents=True, exist_ok=True)
    return Runner(name, folder, settings, perform, make_recipe_simulator(name), lambda line: None, "small")


def answering(
    folder: Path, answer: Answer, *given: str, scale: Scale = "small", settings: tuple[str, ...] = ()
) -> Runner:
    """A runner of the recipe `nothing` whose commands are answered, and not run: what is made of the answers can be
    checked exactly. The user gave ``given``; the scale has ``settings``."""

    def perform(command: Sequence[str], log: IO[str]) -> None:
        values = dict(argument.partition("=")[::2] for argument in command if "=" in argument)
        place = next(Path(v.strip("'")) for k, v in values.items() if k in ("run_folder", "hydra.sweep.dir"))
        name, content = answer(command[0], values, place)
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(content), encoding="utf-8")

    def simulate(chosen: Sequence[str]) -> Any:
        values = dict(setting.partition("=")[::2] for setting in chosen)
        _, content = answer("simulated", values, folder)
        return SimpleNamespace(**content)

    every = (*settings, *given)
    return Runner("nothing", folder, every, perform, simulate, lambda line: None, scale, given)


def column(table: Table, heading: str, origin: str = "") -> list[str]:
    """The cells of the column with this heading and origin."""
    return next([*one.cells] for one in table.columns if (one.heading, one.origin) == (heading, origin))
