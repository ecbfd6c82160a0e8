"""From a recipe to its tables: `gpipe reproduce` below the command line."""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gpipe_cli.config.setting_owners import key_of
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction import breakdown, consistency, largest_model, throughput, training
from gpipe_cli.reproduction.breakdown import Breakdown
from gpipe_cli.reproduction.consistency import Consistency
from gpipe_cli.reproduction.largest_model import LargestModel
from gpipe_cli.reproduction.numbers import changing
from gpipe_cli.reproduction.recipe import FOLDER, Needs, Recipe, settings_of
from gpipe_cli.reproduction.runner import Findings, Gpu, Perform, Runner, last_wins, with_users
from gpipe_cli.reproduction.throughput import Throughput
from gpipe_cli.reproduction.training import Training
from gpipe_cli.units import plural, size

Scale = Literal["desk", "paper"]


def fitting_scale(needs: Needs, gpus: Sequence[Gpu]) -> tuple[Scale, str]:
    """The scale that the machine allows, and why."""
    wanted = f"the paper's scale needs {plural(needs.gpus, 'GPU')} of {needs.memory_gib:g} GiB"
    enough = [gpu for gpu in gpus if gpu.memory_bytes >= needs.memory_gib * 2**30]
    if len(enough) >= needs.gpus:
        return "paper", f"{wanted}: they are here"
    here = f"{plural(len(gpus), 'GPU')} of {size(min(gpu.memory_bytes for gpu in gpus))}" if gpus else "no GPU"
    return "desk", f"{wanted}, and there is {here}"


def reproduce(
    name: str,
    recipe: Recipe,
    scale: Scale,
    why: str,
    gpus: Sequence[Gpu],
    given: Sequence[str],
    folder: Path,
    perform: Perform,
    progress: Callable[[str], None],
) -> Reproduction:
    """Run the recipe's commands into ``folder``; ``given`` are settings of the user, which win.

    Raises ValueError as the commands do for bad input, and CommandFailedError.
    """
    begin = time.monotonic()
    desk = recipe.desk.settings if scale == "desk" else ()
    runner = Runner(
        name, FOLDER, folder, with_users(desk, given), perform, progress, scale == "desk", users=last_wins(given)
    )
    try:
        found = _run(recipe, runner)
    except ValueError as error:
        if not runner.commands:  # refused by the recipe itself
            raise
        command = [key_of(one) for one in shlex.split(runner.commands[-1]) if "=" in one]
        line = explained(str(error), given, desk, (*command, *settings_of(name)))
        if scale == "paper" and recipe.needs.how is not None and refused_key(line).partition(".")[0] == "dataset":
            line += f"; {recipe.needs.how}; scale=desk runs without it"
        raise ValueError(line) from error
    notes = [("paper's", recipe.hardware), ("scale", f"{scale}: {why}"), *given_note(given)]
    if scale == "desk":
        notes.append(("scaled down", recipe.desk.scaled))
    notes += [("our choice", choice) for choice in recipe.choices]
    host = hardware((), 1)
    machine = f"{host['cores']} cores of {host['cpu']}"
    if gpus and runner.given("device") != "cpu":
        machine = f"{plural(len(gpus), 'GPU')} ({gpus[0].name}), {machine}"
    return Reproduction(
        name=name,
        title=recipe.title,
        source=recipe.source,
        scale=scale,
        machine=machine,
        tables=found.tables,
        notes=(*notes, *found.notes),
        commands=tuple(runner.commands),
        files=found.files,
        seconds=time.monotonic() - begin,
    )


def explained(message: str, users: Sequence[str], desk: Sequence[str], own: Sequence[str]) -> str:
    """The refusal of a setting, and whose setting it is if the user has not given it.

    Args:
        message: `model.variant=d: the chosen model has no such setting; leave it out`.
        users: settings of the user.
        desk: those of the recipe at desk scale, if that is its scale.
        own: keys of all others that the command had: of the recipe's file, and of a row of its table.
    """
    key = refused_key(message)
    if key in map(key_of, users) or key not in (*map(key_of, desk), *own):
        return message
    place = "a setting of this recipe at desk scale" if key in map(key_of, desk) else "a setting of this recipe"
    group = next((one for one in users if key_of(one) == key.partition(".")[0]), None)
    if group is None:
        return f"{message} ({place})"
    return f"{message.removesuffix('; leave it out')} ({place}, which {group} does not go with)"


def refused_key(message: str) -> str:
    """The setting that a refusal begins with: `model.variant` of `model.variant=d: ...`; "" without one."""
    found = re.match(r"([\w.]+)=", message)
    return found[1] if found else ""


def given_note(given: Sequence[str]) -> list[tuple[str, str]]:
    """A note of the user's settings, and what they make of all that is said of the recipe; none without settings."""
    if not given:
        return []
    line = f"{' '.join(given)}: in every command"
    if changing(given):
        said = "titles, scaled down, our choice, the paper's size"
        line += f"; what else is said of models and sizes ({said}) holds for the recipe without them"
    return [("given", line)]


def _run(recipe: Recipe, runner: Runner) -> Findings:
    match recipe.experiment:
        case LargestModel() as what:
            return largest_model.reproduce(what, runner)
        case Throughput() as what:
            return throughput.reproduce(what, runner)
        case Breakdown() as what:
            return breakdown.reproduce(what, runner)
        case Training() as what:
            return training.reproduce(what, runner)
        case Consistency() as what:
            return consistency.reproduce(what, runner)
