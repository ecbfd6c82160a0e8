"""`gpipe reproduce`: tables, figures and results of the paper, at the scale that the machine allows.

Several recipes share a folder, with a subfolder each. A recipe that is done does not run again, as the whole paper
takes over an hour at small scale and may be interrupted. The results become a page and, once all recipes are done,
part of the recipes' README.
"""

import shlex
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.commands.command_line import find_config_dir, parse_command_line
from gpipe_cli.commands.command_runner import import_torch
from gpipe_cli.commands.folders import lock_folder
from gpipe_cli.commands.recipe_run import ReproduceSettings, check_known, choose_scale, reproduce
from gpipe_cli.config.old_words import update_argument, update_words
from gpipe_cli.config.schema import parse_config
from gpipe_cli.config.settings import key_of
from gpipe_cli.distributed.torchrun_env import check_not_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.reproduced.page import REPORT, write_report
from gpipe_cli.reporting.reproduced.readme import README, insert_results
from gpipe_cli.reporting.run.lines import format_override, print_fields, show_line
from gpipe_cli.reporting.tables.recipe import REPRODUCTION, read_reproduction, show_reproduction, write_reproduction
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.reproduction.recipe import Recipe, read_recipe, recipe_names
from gpipe_cli.reproduction.runner import LOG, RECIPES_DIR, CommandFailedError, keep_last
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.system.files import contents, read_text, write_atomic
from gpipe_cli.units import duration

HELP = """Reproduces tables, figures and results of the GPipe paper, and prints the paper's numbers next to ours.

Usage: gpipe reproduce                               lists the recipes
       gpipe reproduce NAME [setting=value ...]      runs one
       gpipe reproduce NAME NAME ... | all           runs several into one folder, and writes a page about all of them
       gpipe reproduce -cd FOLDER -cn NAME [...]     runs one of your own, FOLDER/NAME.yaml

Settings
  scale      paper: as in the paper | small: scaled down to two CPU cores | auto: paper if its GPUs are here, otherwise
             small | smoke: only to see that the code runs, in seconds (auto)
  output     folder in which the command makes a folder for everything that it writes (outputs)
  run_folder the folder of several recipes itself; recipes that are done there do not run again
  any other  goes to every command of the recipe: seed=1, batch_size=64; numbers of another size than the paper's
             are then not compared with it

Writes reproduction.md, reproduction.json and log.txt, next to the runs themselves. Several recipes have a folder each,
next to report.html about all of them, and README.md once every recipe is done.

Examples
  gpipe reproduce table2_amoebanet
  gpipe reproduce transfer_cifar10 scale=paper dataset.root=data
  gpipe reproduce all scale=smoke                                   tries every recipe within minutes
  gpipe reproduce all scale=small run_folder=outputs/paper           begins, or continues after an interruption
  gpipe train -cd recipes -cn imagenet_amoebanet_b partitions=8     a recipe is also a configuration
"""
UNSUPPORTED = {
    **dict.fromkeys(("resume", "hydra.sweep.dir"), "a recipe makes its own folders; give output=FOLDER"),
    "quiet": "a recipe's commands print into log.txt; remove it",
    "dry_run": "a recipe is run; use gpipe train -cd recipes -cn NAME dry_run=true",
}
USAGE_HINT = "gpipe reproduce NAME runs one, gpipe reproduce all runs all"
ALL = "all"  # stands for the names of all recipes
REQUEST_FILE = "asked.json"  # a file with the scale and the settings of all recipes in a folder


def main(arguments: Sequence[str]) -> int:
    folder = RECIPES_DIR
    if arguments[:1] == ["-cd"] and arguments[2:3] == ["-cn"] and len(arguments) > 3:
        folder = find_config_dir(arguments[1])
        arguments = arguments[3:]
    # a path such as ../micro_batches=4 is not a setting
    rest = [argument for argument in arguments if "=" not in argument or argument.startswith((".", "/"))]
    for argument in arguments:
        if argument.startswith("-"):
            raise InputError(f"{argument}: no such option; gpipe reproduce --help names all")
        if argument.startswith("~"):
            raise InputError(f"{argument}: settings cannot be removed; write NAME setting=value, or use gpipe train")
    line = parse_command_line("reproduce", [argument for argument in arguments if argument not in rest])
    line.check_allowed(UNSUPPORTED)
    for key in line.swept:
        raise InputError(f"{key}={line.overrides[key]}: all commands share one value; run the recipe once for each")
    defaults = {"scale": "auto", "output": "outputs", "run_folder": None}
    recipe_settings = parse_config(
        ReproduceSettings, {key: line.overrides.get(key, value) for key, value in defaults.items()}
    )
    check_not_torchrun("a recipe starts its own processes; call gpipe reproduce")
    if not rest:
        if line.typed:
            raise InputError(f"{line.typed[0]}: of which recipe? gpipe reproduce lists them")
        console = Console()
        show_table(console, recipes())
        console.print()
        show_line(console, f"{USAGE_HINT}; gpipe reproduce --help")
        return 0
    if folder != RECIPES_DIR and len(rest) > 1:
        raise InputError(f"{rest[1]}: your own recipes run one at a time; remove it")
    every = rest == [ALL] and folder == RECIPES_DIR
    chosen = [read_recipe(name, folder) for name in (recipe_names() if every else dict.fromkeys(rest))]
    given = tuple(setting for setting in keep_last(line.typed) if key_of(setting) not in defaults)
    for recipe in chosen:
        recipe.check(given)
    check_known(chosen[0], given)
    if len(chosen) > 1:
        return _reproduce_several(chosen, recipe_settings, given, rest)
    if recipe_settings.run_folder is not None:
        raise InputError(
            f"run_folder={recipe_settings.run_folder}: one recipe makes its own folder; give output=FOLDER"
        )
    return _reproduce_one(chosen[0], recipe_settings, given)


def _new_folder(recipe_settings: ReproduceSettings, name: str) -> Path:
    return Path(recipe_settings.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{name}")


def _reproduce_one(recipe: Recipe, recipe_settings: ReproduceSettings, given: tuple[str, ...]) -> int:
    console = Console()
    import_torch()
    scale, why = choose_scale(recipe, recipe_settings, given)
    with lock_folder(_new_folder(recipe_settings, recipe.name), f"output={recipe_settings.output}", new=True) as folder:
        facts = [("recipe", f"{recipe.name}: {recipe.title}"), ("source", recipe.source)]
        facts += [("scale", f"{scale}: {why}"), ("folder", str(folder))]
        if scale == "small":
            without = " without the given settings" if given else ""
            facts.append(("takes", f"{recipe.small.duration} on 2 CPU cores{without}"))
        print_fields(console, facts)
        try:
            reproduction = reproduce(recipe, recipe_settings, given, folder, console)
        except KeyboardInterrupt:
            show_line(console, f"interrupted; what was run is in {folder}", "bold yellow")
            raise
        except CommandFailedError as error:
            show_line(console, f"failed: {error}", "bold red")
            return 1
        except InputError as error:
            if contents(folder) <= {LOG}:
                (folder / LOG).unlink(missing_ok=True)  # no command has written anything else
                raise
            raise InputError(f"{error}; what was run before is in {folder}") from error
        try:
            write_reproduction(reproduction, folder)
        finally:  # show the results even if they cannot be written
            show_reproduction(console, reproduction, folder)
    return 0


def _reproduce_several(
    recipes: Sequence[Recipe], recipe_settings: ReproduceSettings, given: tuple[str, ...], asked: list[str]
) -> int:
    """Run the recipes that are not done yet, and continue when a recipe fails; returns the exit code."""
    console = Console()
    request = {"scale": recipe_settings.scale, "settings": list(given)}
    if recipe_settings.run_folder is None:
        place = (
            _new_folder(recipe_settings, ALL if asked == [ALL] else f"{len(recipes)}_recipes"),
            f"output={recipe_settings.output}",
        )
    else:
        place = Path(recipe_settings.run_folder), f"run_folder={recipe_settings.run_folder}"
    with lock_folder(*place, new=recipe_settings.run_folder is None) as folder:
        _check_same_request(folder, request)
        import_torch()
        write_result(folder, request, REQUEST_FILE)
        settings = [setting for setting in (f"scale={recipe_settings.scale}", *given) if setting != "scale=auto"]
        continue_command = (
            shlex.join(["gpipe", "reproduce", *asked, *settings]) + f" {format_override('run_folder', str(folder))}"
        )
        print_fields(
            console, [("recipes", str(len(recipes))), ("folder", str(folder)), ("continue with", continue_command)]
        )
        failed: dict[str, str] = {}
        begin = time.monotonic()
        took = stated = 0.0  # seconds: what the recipes run so far took, and what their files state for scale=small
        for at, recipe in enumerate(recipes, start=1):
            below = folder / recipe.name
            which = f"{at} of {len(recipes)}"
            if _is_done(below):
                show_line(console, f"{which:<12} {recipe.name}: is done")
                continue
            left = ""
            if took or choose_scale(recipe, recipe_settings, given)[0] == "small":
                todo = sum(
                    60 * waiting.small.minutes for waiting in recipes[at - 1 :] if not _is_done(folder / waiting.name)
                )
                left = f", about {duration(todo * took / stated if took else todo)} left"
            so_far = f"; {duration(time.monotonic() - begin)} used" if took else ""
            show_line(console, "")
            show_line(console, f"{which:<12} {recipe.name}: {recipe.title}{so_far}{left}", "bold")
            try:
                _recreate_folder(below)
                reproduction = reproduce(recipe, recipe_settings, given, below, console)
                write_reproduction(reproduction, below)
                took += reproduction.seconds
                stated += 60 * recipe.small.minutes
            except KeyboardInterrupt:
                show_line(console, f"interrupted; what is done stays in {folder}; continue with", "bold yellow")
                show_line(console, continue_command)
                raise
            except (CommandFailedError, InputError) as error:
                failed[recipe.name] = str(error)
                show_line(console, f"failed: {error}", "bold red")
            finally:
                _write_report(folder, failed)
        _write_report(folder, failed)  # even if every recipe was done before
        for name, reason in failed.items():
            show_line(console, f"{name} failed: {reason}", "bold red")
        print_fields(
            console, [*([("try again", continue_command)] if failed else []), ("report", str(folder / REPORT))]
        )
    return 1 if failed else 0


def _recreate_folder(folder: Path) -> None:
    """Make the folder of a recipe, replacing what an interrupted or failed run of it has left: its log is the first
    file there. Raises InputError for anything else."""
    has_files = any(not path.is_dir() for path in folder.rglob("*"))
    if folder.is_symlink() or (has_files and not (folder / LOG).is_file()):
        raise InputError(f"{folder}: has no {LOG}, so it is not what a recipe has left there; move it away")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _is_done(folder: Path) -> bool:
    return (folder / f"{REPRODUCTION}.json").is_file()


def _check_same_request(folder: Path, request: dict[str, Any]) -> None:
    """Raises InputError for a folder that holds something else, or recipes with another scale or other settings."""
    if not contents(folder):
        return
    if not (folder / REQUEST_FILE).is_file():
        raise InputError(f"run_folder={folder}: the folder is not empty and holds no reproduction; choose another")
    before = update_words(read_result(folder, REQUEST_FILE))
    before |= {"settings": [update_argument(setting, "reproduce") for setting in before.get("settings", [])]}
    if before != request:
        has = " ".join([f"scale={before.get('scale')}", *before["settings"]])
        raise InputError(f"run_folder={folder}: what is there has {has}; use the same, or choose another folder")


def _write_report(folder: Path, failed: dict[str, str]) -> None:
    """Write the page about the recipes that are done; once all are done, also README.md, if it exists."""
    every = recipe_names()
    reproductions = [read_reproduction(folder / name) for name in every if _is_done(folder / name)]
    write_report(folder, reproductions, failed)
    if len(reproductions) == len(every) and (RECIPES_DIR / README).is_file():
        write_atomic(folder / README, insert_results(read_text(RECIPES_DIR / README), reproductions))


def recipes() -> Table:
    """A table of the recipes."""
    loaded = {name: read_recipe(name) for name in recipe_names()}
    durations = [recipe.small.duration for recipe in loaded.values()]
    columns = [
        Column("recipe", cells=list(loaded)),
        Column("small scale", cells=durations, number=True, key="small_duration"),
        Column("reproduces", cells=[recipe.title for recipe in loaded.values()], key="title"),
    ]
    return Table("", columns)
