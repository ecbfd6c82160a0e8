"""`gpipe reproduce`: tables, figures and results of the paper, at the scale that the machine allows.

One recipe gets a folder of its own. Several get one together, with a sub-folder for each: what is done there stays
done, so that an interrupted reproduction of the whole paper goes on, and all of it ends in one page.
"""

import shlex
import shutil
import sys
import time
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
from gpipe_cli.reporting.reproduced.page import REPORT, write_report
from gpipe_cli.reporting.run.console import following
from gpipe_cli.reporting.run.lines import override, show_facts, show_line
from gpipe_cli.reporting.run.result import read_result, write_result
from gpipe_cli.reporting.tables.recipe import (
    REPRODUCTION,
    Reproduction,
    read_reproduction,
    show_reproduction,
    write_reproduction,
)
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.reproduction.recipe import Recipe, load, names
from gpipe_cli.reproduction.runner import FOLDER, LOG, CommandFailedError, Scale, last_wins
from gpipe_cli.reproduction.simulated import Simulate, simulating
from gpipe_cli.system.files import LOCK
from gpipe_cli.system.gpus import Gpu, usable_gpus
from gpipe_cli.system.interrupts import Stopped
from gpipe_cli.units import duration

HELP = """Runs tables, figures and results of the GPipe paper, and prints the paper's numbers beside ours.

Usage: gpipe reproduce                               lists the recipes
       gpipe reproduce NAME [setting=value ...]      runs one
       gpipe reproduce NAME NAME ... | all           runs several into one folder, and makes a page of all of them

Settings
  scale      paper: as in the paper | desk: scaled down to two CPU cores | auto: paper if its GPUs are here, otherwise
             desk | smoke: as far as the code runs, in seconds (auto)
  output     folder of the folder that everything goes to (outputs)
  run_folder the folder of several recipes itself; what is done in it is not run again
  any other  goes to every command of the recipe: seed=1, batch_size=64; what is then of another size than the
             paper's is not compared with it

Writes reproduction.md, reproduction.json and log.txt, beside the runs themselves. Several recipes have a folder each,
and report.html and README.md of all of them above.

Examples
  gpipe reproduce table2_amoebanet
  gpipe reproduce transfer_cifar10 scale=paper dataset.root=data
  gpipe reproduce all scale=smoke                                   tries every recipe within minutes
  gpipe reproduce all scale=desk run_folder=outputs/paper           begins, or goes on after an interruption
  gpipe train -cd recipes -cn imagenet_amoebanet_b partitions=8     a recipe is a configuration, too
"""
REFUSED = {
    **dict.fromkeys(("resume", "hydra.sweep.dir"), "a recipe makes its own folders; give output=FOLDER"),
    "dry_run": "a recipe is run; use gpipe train -cd recipes -cn NAME dry_run=true",
}
ALL = "all"
ASKED = "asked.json"  # in the folder of several recipes: the scale and the settings of all of them
RUNS_ONE = "gpipe reproduce NAME runs one, gpipe reproduce all runs all"


@dataclass(frozen=True, slots=True)
class ReproduceSettings:
    """What belongs to the recipe as a whole, and not to the commands that it runs."""

    scale: Literal["auto", "smoke", "desk", "paper"]
    output: str
    run_folder: str | None


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
    own = {"scale": "auto", "output": "outputs", "run_folder": None}
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
    chosen = [load(name) for name in (names() if rest == [ALL] else dict.fromkeys(rest))]
    given = tuple(one for one in last_wins(line.typed) if key_of(one) not in own)
    for recipe in chosen:
        recipe.check(given)
    if len(chosen) > 1:
        return _several(chosen, whole, given, rest)
    if whole.run_folder is not None:
        raise InputError(f"run_folder={whole.run_folder}: one recipe makes its own folder; give output=FOLDER")
    return _one(chosen[0], whole, given)


@dataclass(frozen=True)
class _Machine:
    """Where recipes run, and how they are shown."""

    console: Console
    gpus: Sequence[Gpu]

    def scale(self, recipe: Recipe, whole: ReproduceSettings, given: Sequence[str]) -> tuple[Scale, str]:
        """The scale of a recipe, and why."""
        if whole.scale != "auto":
            return whole.scale, "as was asked for"
        if "device=cpu" in given:
            return "desk", "device=cpu uses no GPU"
        return recipe.needs.fitting_scale(self.gpus)

    def reproduce(self, recipe: Recipe, whole: ReproduceSettings, given: tuple[str, ...], folder: Path) -> Reproduction:
        """Raises what the commands of the recipe end with."""
        chosen, why = self.scale(recipe, whole, given)
        show = partial(show_line, self.console)
        return recipe.reproduce(
            chosen, why, self.gpus, given, folder, self._perform, simulating_recipe(recipe.name), show
        )

    def _perform(self, command: Sequence[str], log: IO[str]) -> None:
        fork = fork_command(lambda: run_command(command[0], command[1:]), log.fileno())
        result = ended(fork, following(self.console, Path(log.name)))  # in a thread, which must not be forked
        if result.error:
            log.write(f"gpipe {command[0]}: {result.error}\n")
        if result.exit_code == BAD_INPUT:
            raise result.refusal or InputError(result.error)
        if result.exit_code != 0:
            raise CommandFailedError(result.error)


def _one(recipe: Recipe, whole: ReproduceSettings, given: tuple[str, ...]) -> int:
    console = Console()
    import_torch()
    machine = _Machine(console, usable_gpus())
    chosen, why = machine.scale(recipe, whole, given)
    place = Path(whole.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{recipe.name}")
    with locked_folder(place, f"output={whole.output}", new=True) as folder:
        facts = [("recipe", f"{recipe.name}: {recipe.title}"), ("source", recipe.source)]
        facts += [("scale", f"{chosen}: {why}"), ("folder", str(folder))]
        if chosen == "desk":
            without = " without what was given" if given else ""
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
        finally:  # what cannot be written is shown all the same
            show_reproduction(console, found, folder)
    return 0


def _several(recipes: Sequence[Recipe], whole: ReproduceSettings, given: tuple[str, ...], asked: list[str]) -> int:
    """Runs what is not done yet in the folder, and goes on after a recipe that fails; returns the exit code."""
    console = Console()
    new = whole.run_folder is None
    stem = ALL if asked == [ALL] else f"{len(recipes)}_recipes"
    place = Path(whole.output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_reproduce_{stem}")
    setting = f"output={whole.output}" if new else f"run_folder={whole.run_folder}"
    with locked_folder(place if whole.run_folder is None else Path(whole.run_folder), setting, new=new) as folder:
        _refuse_others(folder, whole, given)
        import_torch()
        machine = _Machine(console, usable_gpus())
        write_result(folder, {"scale": whole.scale, "settings": given}, ASKED)
        settings = [one for one in (f"scale={whole.scale}", *given) if one != "scale=auto"]
        go_on = shlex.join(["gpipe", "reproduce", *asked, *settings]) + f" {override('run_folder', str(folder))}"
        show_facts(console, [("recipes", str(len(recipes))), ("folder", str(folder)), ("goes on by", go_on)])
        failed: dict[str, str] = {}
        begin, ran = time.monotonic(), 0.0  # seconds at a desk of what was run
        for at, recipe in enumerate(recipes, start=1):
            below = folder / recipe.name
            which = f"{at} of {len(recipes)}"
            if _is_done(folder, recipe):
                show_line(console, f"{which:<12} {recipe.name}: is done")
                continue
            used = time.monotonic() - begin
            left = _left([one for one in recipes[at - 1 :] if not _is_done(folder, one)], used, ran, whole.scale)
            show_line(console, "")
            show_line(console, f"{which:<12} {recipe.name}: {recipe.title}; {duration(used)} used{left}", "bold")
            shutil.rmtree(below, ignore_errors=True)  # what an interruption or a failure has left
            below.mkdir()
            try:
                found = machine.reproduce(recipe, whole, given, below)
                write_reproduction(found, below)
            except KeyboardInterrupt as stop:
                show_line(console, f"interrupted; what is done stays in {folder}; go on by", "bold yellow")
                show_line(console, go_on)
                return STOPPED if isinstance(stop, Stopped) else INTERRUPTED
            except (CommandFailedError, InputError) as error:
                failed[recipe.name] = str(error)
                show_line(console, f"failed: {error}", "bold red")
            finally:
                _write_report(folder, failed)
            ran += 60 * recipe.desk.minutes
        for name, reason in failed.items():
            show_line(console, f"{name} failed: {reason}", "bold red")
        if failed:
            show_facts(console, [("try again", go_on)])
        show_facts(console, [("report", str(folder / REPORT))])
    return 1 if failed else 0


def _is_done(folder: Path, recipe: Recipe) -> bool:
    return (folder / recipe.name / f"{REPRODUCTION}.json").is_file()


def _refuse_others(folder: Path, whole: ReproduceSettings, given: tuple[str, ...]) -> None:
    """Raises InputError for a folder that holds something else, or what was reproduced in another way."""
    if {path.name for path in folder.iterdir()} <= {LOCK}:
        return
    if not (folder / ASKED).is_file():
        raise InputError(f"run_folder={folder}: the folder is not empty and holds no reproduction; choose another")
    before = read_result(folder, ASKED)
    if (before["scale"], before["settings"]) != (whole.scale, list(given)):
        asked = " ".join([f"scale={before['scale']}", *before["settings"]])
        raise InputError(
            f"run_folder={folder}: what lies there has {asked}; go on with these, or choose another folder"
        )


def _left(recipes: Sequence[Recipe], used: float, ran: float, scale: str) -> str:
    """About how long ``recipes`` will take: as at a desk, times what the ones before took of that."""
    if not ran and scale != "desk":
        return ""
    times = used / ran if ran else 1.0
    return f", about {duration(times * sum(60 * recipe.desk.minutes for recipe in recipes))} left"


def _write_report(folder: Path, failed: dict[str, str]) -> None:
    done = [recipe for name in names() if _is_done(folder, recipe := load(name))]
    write_report(folder, [read_reproduction(folder / recipe.name) for recipe in done], failed)


def simulating_recipe(name: str) -> Simulate:
    """Plans of the recipe. Raises InputError as `gpipe plan` does."""

    def composed(chosen: Sequence[str]) -> DictConfig:
        tree = compose(read("train", ["-cd", str(FOLDER), "-cn", name, *chosen]), TRAINING_KEYS)
        assert tree is not None  # nothing but settings was given
        return tree

    trees = JobTrees(composed)
    return simulating(lambda settings: training(trees.tree(settings), {}))


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
