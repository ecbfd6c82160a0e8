"""`gpipe reproduce`: one table, figure or result of the paper, at the scale that the machine allows."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Literal

from omegaconf import DictConfig
from rich.console import Console

from gpipe_cli.commands.command_line import TRAINING_KEYS, JobTrees, arranged, compose, read, training
from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.outcome import BAD_INPUT, INTERRUPTED, STOPPED, ended, fork_command, import_torch, run_command
from gpipe_cli.config.settings import key_of
from gpipe_cli.config.typed import typed
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.console import following
from gpipe_cli.reporting.run.lines import show_facts, show_line
from gpipe_cli.reporting.tables.recipe import show_reproduction
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.reproduction.recipe import Recipe, Scale, load, names
from gpipe_cli.reproduction.runner import LOG, CommandFailedError, Configure, last_wins
from gpipe_cli.system.files import LOCK
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.interrupts import Stopped

HELP = """Runs a table, figure or result of the GPipe paper, and prints the paper's numbers beside ours.

Usage: gpipe reproduce                               lists the recipes
       gpipe reproduce NAME [setting=value ...]      runs one

Settings
  scale      paper: as in the paper | desk: scaled down to two CPU cores | auto: paper if its GPUs are here (auto)
  output     folder of the folder that everything goes to (outputs)
  any other  goes to every command of the recipe: seed=1, batch_size=64; what is then of another size than the
             paper's is not compared with it

Writes reproduction.md, reproduction.json and log.txt, beside the runs themselves.

Examples
  gpipe reproduce table2_amoebanet
  gpipe reproduce transfer_cifar10 scale=paper dataset.root=data
  gpipe train -cd recipes -cn imagenet_amoebanet_b partitions=8     a recipe is a configuration, too
"""
REFUSED = {
    **dict.fromkeys(("run_folder", "resume", "hydra.sweep.dir"), "a recipe makes its own folders; give output=FOLDER"),
    "dry_run": "a recipe is run; use gpipe train -cd recipes -cn NAME dry_run=true",
}


RUNS_ONE = "gpipe reproduce NAME runs one"


@dataclass(frozen=True, slots=True)
class ReproduceSettings:
    """What belongs to the recipe as a whole, and not to the commands that it runs."""

    scale: Literal["auto", "desk", "paper"]
    output: str


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    if arguments[:1] == ["-sc"]:  # completion of names; Hydra's is of settings
        return 0
    arguments = arranged(arguments)
    # runs lie in folders such as ../micro_batches=4
    rest = [argument for argument in arguments if "=" not in argument or argument.startswith((".", "/"))]
    for argument in arguments:
        if argument.startswith("-"):
            raise InputError(
                f"{argument}: there is no such option; write NAME setting=value, see gpipe reproduce --help"
            )
        if argument.startswith("~"):
            raise InputError(f"{argument}: a recipe takes nothing away; write NAME setting=value, or use gpipe train")
    line = read("reproduce", [argument for argument in arguments if argument not in rest])
    line.refuse(REFUSED)
    for key in line.swept:
        raise InputError(f"{key}={line.overrides[key]}: one value for all commands of a recipe; run it once for each")
    own = {"scale": "auto", "output": "outputs"}
    whole = typed(ReproduceSettings, {key: line.overrides.get(key, value) for key, value in own.items()})
    if torchrun() is not None:
        raise InputError("torchrun: a recipe starts its own processes; call gpipe reproduce")
    if not rest:
        if line.typed:
            raise InputError(f"{line.typed[0]}: of which recipe? gpipe reproduce lists them")
        console = Console()
        show_table(console, recipes())
        console.print()
        show_line(console, f"{RUNS_ONE}; gpipe reproduce --help")
        return 0
    if len(rest) > 1:
        raise InputError(f"{' '.join(rest)}: one recipe at a time; run {rest[0]} first")
    recipe = load(rest[0])
    given = tuple(one for one in last_wins(line.typed) if key_of(one) not in own)
    recipe.check(given)
    return _reproduce(recipe, whole, given)


def _reproduce(recipe: Recipe, whole: ReproduceSettings, given: tuple[str, ...]) -> int:
    console = Console()
    import_torch()
    gpus = usable_gpus()
    chosen: Scale
    if whole.scale != "auto":
        chosen, why = whole.scale, "as was asked for"
    elif "device=cpu" in given:
        chosen, why = "desk", "device=cpu uses no GPU"
    else:
        chosen, why = recipe.needs.fitting_scale(gpus)

    def perform(command: Sequence[str], log: IO[str]) -> None:
        fork = fork_command(lambda: run_command(command[0], command[1:]), log.fileno())
        result = ended(fork, following(console, Path(log.name)))  # in a thread, which must not be forked
        if result.error:
            log.write(f"gpipe {command[0]}: {result.error}\n")
        if result.exit_code == BAD_INPUT:
            raise result.refusal or InputError(result.error)
        if result.exit_code != 0:
            raise CommandFailedError(result.error)

    place = Path(whole.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{recipe.name}")
    with locked_folder(place, f"output={whole.output}", new=True) as folder:
        facts = [("recipe", f"{recipe.name}: {recipe.title}"), ("source", recipe.source)]
        facts += [("scale", f"{chosen}: {why}"), ("folder", str(folder))]
        if chosen == "desk":
            without = " without what was given" if given else ""
            facts.append(("takes", f"{recipe.desk.duration} on 2 CPU cores{without}"))
        show_facts(console, facts)
        try:
            found = recipe.reproduce(chosen, why, gpus, given, folder, perform, configuring(), partial(show_line, console))
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
        show_reproduction(console, found, folder)
    return 0


def configuring() -> Configure:
    """What `gpipe plan` would plan, of many settings. Raises InputError as the command does."""

    def composed(chosen: Sequence[str]) -> DictConfig:
        tree = compose(read("train", chosen), TRAINING_KEYS)
        assert tree is not None  # nothing but settings was given
        return tree

    trees = JobTrees(composed)
    return lambda settings: training(trees.tree(settings), {})[0]


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
