"""`gpipe reproduce`: tables, figures and results of the paper, at the scale that the machine allows."""

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.command_line import read
from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.outcome import INTERRUPTED, STOPPED, import_torch
from gpipe_cli.commands.recipe_run import Machine, ReproduceSettings
from gpipe_cli.commands.reproduce_several import ALL, reproduce_several
from gpipe_cli.config.settings import key_of
from gpipe_cli.config.typed import typed
from gpipe_cli.distributed.torchrun import refuse_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import show_facts, show_line
from gpipe_cli.reporting.tables.recipe import show_reproduction, write_reproduction
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.reproduction.recipe import Recipe, load, names
from gpipe_cli.reproduction.runner import LOG, CommandFailedError, last_wins
from gpipe_cli.system.files import LOCK
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.interrupts import Stopped

HELP = """Reproduces tables, figures and results of the GPipe paper, and prints the paper's numbers beside ours.

Usage: gpipe reproduce                               lists the recipes
       gpipe reproduce NAME [setting=value ...]      runs one
       gpipe reproduce NAME NAME ... | all           runs several into one folder, and writes a page about all of them

Settings
  scale      paper: as in the paper | desk: scaled down to two CPU cores | auto: paper if its GPUs are here, otherwise
             desk | smoke: only to see that the code runs, in seconds (auto)
  output     folder in which the command makes a folder for everything that it writes (outputs)
  run_folder the folder of several recipes itself; recipes that are done there do not run again
  any other  goes to every command of the recipe: seed=1, batch_size=64; numbers of another size than the paper's
             are then not compared with it

Writes reproduction.md, reproduction.json and log.txt, beside the runs themselves. Several recipes have a folder each,
beside report.html about all of them, and README.md once every recipe is done.

Examples
  gpipe reproduce table2_amoebanet
  gpipe reproduce transfer_cifar10 scale=paper dataset.root=data
  gpipe reproduce all scale=smoke                                   tries every recipe within minutes
  gpipe reproduce all scale=desk run_folder=outputs/paper           begins, or continues after an interruption
  gpipe train -cd recipes -cn imagenet_amoebanet_b partitions=8     a recipe is a configuration, too
"""
REFUSED = {
    **dict.fromkeys(("resume", "hydra.sweep.dir"), "a recipe makes its own folders; give output=FOLDER"),
    "dry_run": "a recipe is run; use gpipe train -cd recipes -cn NAME dry_run=true",
}
RUNS_ONE = "gpipe reproduce NAME runs one, gpipe reproduce all runs all"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    if arguments[:1] == ["-sc"]:  # no completion: Hydra completes settings, and not the names of recipes
        return 0
    # a path such as ../micro_batches=4 is no setting
    rest = [argument for argument in arguments if "=" not in argument or argument.startswith((".", "/"))]
    for argument in arguments:
        if argument.startswith("-"):
            raise InputError(
                f"{argument}: there is no such option; write NAME setting=value, see gpipe reproduce --help"
            )
        if argument.startswith("~"):
            raise InputError(f"{argument}: settings cannot be removed; write NAME setting=value, or use gpipe train")
    line = read("reproduce", [argument for argument in arguments if argument not in rest])
    line.refuse(REFUSED)
    for key in line.swept:
        raise InputError(f"{key}={line.overrides[key]}: all commands share one value; run the recipe once for each")
    own = {"scale": "auto", "output": "outputs", "run_folder": None}
    whole = typed(ReproduceSettings, {key: line.overrides.get(key, value) for key, value in own.items()})
    refuse_torchrun("a recipe starts its own processes; call gpipe reproduce")
    if not rest:
        if line.typed:
            raise InputError(f"{line.typed[0]}: of which recipe? gpipe reproduce lists them")
        console = Console()
        show_table(console, recipes())
        console.print()
        show_line(console, f"{RUNS_ONE}; gpipe reproduce --help")
        return 0
    chosen = [load(name) for name in (names() if rest == [ALL] else dict.fromkeys(rest))]
    given = tuple(one for one in last_wins(line.typed) if key_of(one) not in own)
    for recipe in chosen:
        recipe.check(given)
    if len(chosen) > 1:
        return reproduce_several(chosen, whole, given, rest)
    if whole.run_folder is not None:
        raise InputError(f"run_folder={whole.run_folder}: one recipe makes its own folder; give output=FOLDER")
    return _one(chosen[0], whole, given)


def _one(recipe: Recipe, whole: ReproduceSettings, given: tuple[str, ...]) -> int:
    console = Console()
    import_torch()
    machine = Machine(console, usable_gpus())
    chosen, why = machine.scale(recipe, whole, given)
    place = Path(whole.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{recipe.name}")
    with locked_folder(place, f"output={whole.output}", new=True) as folder:
        facts = [("recipe", f"{recipe.name}: {recipe.title}"), ("source", recipe.source)]
        facts += [("scale", f"{chosen}: {why}"), ("folder", str(folder))]
        if chosen == "desk":
            without = " without the given settings" if given else ""
            facts.append(("takes", f"{recipe.desk.duration} on 2 CPU cores{without}"))
        show_facts(console, facts)
        try:
            found = machine.reproduce(recipe, whole, given, folder)
        except KeyboardInterrupt as asked:
            show_line(console, f"interrupted; what was run is in {folder}", "bold yellow")
            return STOPPED if isinstance(asked, Stopped) else INTERRUPTED
        except CommandFailedError as error:
            show_line(console, f"failed: {error}", "bold red")
            return 1
        except InputError as error:
            if {path.name for path in folder.rglob("*") if path.is_file()} <= {LOG, LOCK}:
                shutil.rmtree(folder)  # no command has written anything
                raise
            raise InputError(f"{error}; what was run before is in {folder}") from error
        try:
            write_reproduction(found, folder)
        finally:  # show the results even if they cannot be written
            show_reproduction(console, found, folder)
    return 0


def recipes() -> Table:
    found = {name: load(name) for name in names()}
    columns = [
        Column("recipe", cells=list(found)),
        Column(
            "at a desk", cells=[recipe.desk.duration for recipe in found.values()], number=True, key="desk_duration"
        ),
        Column("reproduces", cells=[recipe.title for recipe in found.values()], key="title"),
    ]
    return Table("", columns)
