"""Several recipes in one folder, each in a folder of its own below it.

A recipe that is done does not run again, as the whole paper takes over an hour at a desk and may be interrupted. The
results become one page and, once all recipes are done, part of the recipes' README.
"""

import shlex
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.outcome import INTERRUPTED, STOPPED, import_torch
from gpipe_cli.commands.recipe_run import Machine, ReproduceSettings
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.reproduced.page import REPORT, write_report
from gpipe_cli.reporting.reproduced.readme import README, with_results
from gpipe_cli.reporting.run.lines import override, show_facts, show_line
from gpipe_cli.reporting.tables.recipe import REPRODUCTION, read_reproduction, write_reproduction
from gpipe_cli.reproduction.recipe import Recipe, names
from gpipe_cli.reproduction.runner import FOLDER, CommandFailedError
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.system.files import LOCK, read_text, write_whole
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.interrupts import Stopped
from gpipe_cli.units import duration

ALL = "all"  # stands for the names of all recipes
ASKED = "asked.json"  # a file with the scale and the settings of all recipes in a folder


def reproduce_several(
    recipes: Sequence[Recipe], whole: ReproduceSettings, given: tuple[str, ...], asked: list[str]
) -> int:
    """Run the recipes that are not done yet, and continue after one that fails; returns the exit code."""
    console = Console()
    new = whole.run_folder is None
    stem = ALL if asked == [ALL] else f"{len(recipes)}_recipes"
    place = Path(whole.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{stem}")
    setting = f"output={whole.output}" if new else f"run_folder={whole.run_folder}"
    with locked_folder(place if whole.run_folder is None else Path(whole.run_folder), setting, new=new) as folder:
        _refuse_others(folder, whole, given)
        import_torch()
        machine = Machine(console, usable_gpus())
        write_result(folder, _asked(whole, given), ASKED)
        settings = [one for one in (f"scale={whole.scale}", *given) if one != "scale=auto"]
        go_on = shlex.join(["gpipe", "reproduce", *asked, *settings]) + f" {override('run_folder', str(folder))}"
        show_facts(console, [("recipes", str(len(recipes))), ("folder", str(folder)), ("continue with", go_on)])
        failed: dict[str, str] = {}
        begin = time.monotonic()
        took = stated = 0.0  # seconds of the recipes that have run here, and what their files state for a desk
        for at, recipe in enumerate(recipes, start=1):
            below = folder / recipe.name
            which = f"{at} of {len(recipes)}"
            if _is_done(folder, recipe.name):
                show_line(console, f"{which:<12} {recipe.name}: is done")
                continue
            used = time.monotonic() - begin
            left = ""
            if took or machine.scale(recipe, whole, given)[0] == "desk":
                todo = sum(60 * one.desk.minutes for one in recipes[at - 1 :] if not _is_done(folder, one.name))
                left = f", about {duration(todo * took / stated if took else todo)} left"
            show_line(console, "")
            so_far = f"; {duration(used)} used" if took else ""
            show_line(console, f"{which:<12} {recipe.name}: {recipe.title}{so_far}{left}", "bold")
            shutil.rmtree(below, ignore_errors=True)  # remains of an interrupted or failed run
            below.mkdir()
            try:
                found = machine.reproduce(recipe, whole, given, below)
                write_reproduction(found, below)
                took += found.seconds
                stated += 60 * recipe.desk.minutes
            except KeyboardInterrupt as stop:
                show_line(console, f"interrupted; what is done stays in {folder}; continue with", "bold yellow")
                show_line(console, go_on)
                return STOPPED if isinstance(stop, Stopped) else INTERRUPTED
            except (CommandFailedError, InputError) as error:
                failed[recipe.name] = str(error)
                show_line(console, f"failed: {error}", "bold red")
            finally:
                _write_report(folder, failed)
        _write_report(folder, failed)  # even if every recipe was done before
        for name, reason in failed.items():
            show_line(console, f"{name} failed: {reason}", "bold red")
        if failed:
            show_facts(console, [("try again", go_on)])
        show_facts(console, [("report", str(folder / REPORT))])
    return 1 if failed else 0


def _is_done(folder: Path, name: str) -> bool:
    return (folder / name / f"{REPRODUCTION}.json").is_file()


def _asked(whole: ReproduceSettings, given: Sequence[str]) -> dict[str, Any]:
    return {"scale": whole.scale, "settings": list(given)}


def _refuse_others(folder: Path, whole: ReproduceSettings, given: tuple[str, ...]) -> None:
    """Raises InputError for a folder that holds something else, or recipes with another scale or other settings."""
    if {path.name for path in folder.iterdir()} <= {LOCK}:
        return
    if not (folder / ASKED).is_file():
        raise InputError(f"run_folder={folder}: the folder is not empty and holds no reproduction; choose another")
    before = read_result(folder, ASKED)
    if before != _asked(whole, given):
        has = " ".join([f"scale={before.get('scale')}", *before.get("settings", [])])
        raise InputError(f"run_folder={folder}: what is there has {has}; use the same, or choose another folder")


def _write_report(folder: Path, failed: dict[str, str]) -> None:
    """Write the page about the recipes that are done; once all are, also README.md, if there is one to renew."""
    every = names()
    found = [read_reproduction(folder / name) for name in every if _is_done(folder, name)]
    write_report(folder, found, failed)
    if len(found) == len(every) and (FOLDER / README).is_file():
        write_whole(folder / README, with_results(read_text(FOLDER / README), found))
